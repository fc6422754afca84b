#include "rejoin/c_support.h"
#include "rejoin/checkpoint_transfer.h"

using rejoin::c::all_bytes_of, rejoin::c::asking, rejoin::c::code, rejoin::c::failed, rejoin::c::guarded,
    rejoin::c::listen_config, rejoin::c::milliseconds_of, rejoin::c::null_argument;

struct rejoin_checkpoint_server {
  std::unique_ptr<rejoin::CheckpointServer> server;
};

struct rejoin_checkpoint_fetch {
  std::unique_ptr<rejoin::CheckpointFetch> fetch;
};

extern "C" {

rejoin_code rejoin_checkpoint_serve(const char* transport, const char* listen, const char* advertise,
                                    rejoin_checkpoint_server** server) {
  return guarded([&] {
    auto opened = rejoin::CheckpointServer::open(listen_config(transport, listen, advertise));
    if (!opened) return failed(opened.error());
    *server = new rejoin_checkpoint_server{std::move(*opened)};
    return REJOIN_OK;
  });
}
void rejoin_checkpoint_server_close(rejoin_checkpoint_server* server) { rejoin::c::destroy(server); }
const char* rejoin_checkpoint_address(const rejoin_checkpoint_server* server) {
  return server->server->address().c_str();
}
rejoin_code rejoin_checkpoint_publish(rejoin_checkpoint_server* server, uint64_t step, const void* description,
                                      uint64_t description_bytes, const rejoin_memory* buffers, size_t count) {
  return guarded([&] {
    if (description == nullptr && description_bytes > 0) return null_argument("the description");
    if (buffers == nullptr && count > 0) return null_argument("the list of buffers");
    const auto all = all_bytes_of(buffers, count);
    return code(server->server->publish(
        step,
        description_bytes == 0
            ? ""
            : std::string(static_cast<const char*>(description), static_cast<std::size_t>(description_bytes)),
        {all.begin(), all.end()}));
  });
}
rejoin_code rejoin_checkpoint_withdraw(rejoin_checkpoint_server* server, uint64_t patience_ms, int (*cancelled)(void*),
                                       void* with, uint64_t* cut_off) {
  return guarded([&] {
    *cut_off = server->server->withdraw(milliseconds_of(patience_ms), asking(cancelled, with));
    return REJOIN_OK;
  });
}

rejoin_code rejoin_checkpoint_fetch_open(const char* transport, const char* address, uint64_t step, uint64_t limit_ms,
                                         int (*cancelled)(void*), void* with, rejoin_checkpoint_fetch** fetch) {
  return guarded([&] {
    if (transport == nullptr || address == nullptr) return null_argument("the transport or the address");
    auto opened =
        rejoin::CheckpointFetch::open(transport, address, step, milliseconds_of(limit_ms), asking(cancelled, with));
    if (!opened) return failed(opened.error());
    *fetch = new rejoin_checkpoint_fetch{std::move(*opened)};
    return REJOIN_OK;
  });
}
void rejoin_checkpoint_fetch_close(rejoin_checkpoint_fetch* fetch) { rejoin::c::destroy(fetch); }
rejoin_memory rejoin_checkpoint_description(const rejoin_checkpoint_fetch* fetch) {
  const auto& text = fetch->fetch->description();
  return {const_cast<char*>(text.data()), text.size()};
}
const uint64_t* rejoin_checkpoint_sizes(const rejoin_checkpoint_fetch* fetch, size_t* count) {
  *count = fetch->fetch->sizes().size();
  return fetch->fetch->sizes().data();
}
rejoin_code rejoin_checkpoint_fetch_into(rejoin_checkpoint_fetch* fetch, const rejoin_memory* buffers, size_t count,
                                         uint64_t limit_ms) {
  return guarded([&] {
    if (buffers == nullptr && count > 0) return null_argument("the list of buffers");
    return code(fetch->fetch->into(all_bytes_of(buffers, count), milliseconds_of(limit_ms)));
  });
}

}  // extern "C"
