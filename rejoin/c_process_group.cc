#include <fmt/format.h>

#include "rejoin/c_support.h"
#include "rejoin/process_group.h"

using rejoin::c::all_bytes_of, rejoin::c::asking, rejoin::c::code, rejoin::c::failed, rejoin::c::guarded,
    rejoin::c::listen_config, rejoin::c::milliseconds_of, rejoin::c::null_argument;

struct rejoin_group {
  std::unique_ptr<rejoin::ProcessGroup> group;
};

struct rejoin_work {
  std::shared_ptr<rejoin::Work> work;
};

namespace {

// A number that an enumeration of C++ has.
bool within(std::uint32_t value, int last) { return value <= static_cast<std::uint32_t>(last); }

}  // namespace

extern "C" {

rejoin_code rejoin_group_open(const char* transport, const char* listen, const char* advertise, rejoin_group** group) {
  return rejoin_group_open_on(transport, listen, advertise, nullptr, group);
}
rejoin_code rejoin_group_open_on(const char* transport, const char* listen, const char* advertise, const char* device,
                                 rejoin_group** group) {
  return rejoin_group_open_towards(transport, listen, advertise, device, nullptr, group);
}
rejoin_code rejoin_group_open_towards(const char* transport, const char* listen, const char* advertise,
                                      const char* device, const char* towards, rejoin_group** group) {
  return guarded([&] {
    auto config = listen_config(transport, listen, advertise);
    if (towards != nullptr) config.towards = towards;
    auto opened = rejoin::ProcessGroup::open(config, device == nullptr ? "host" : device);
    if (!opened) return failed(opened.error());
    *group = new rejoin_group{std::move(*opened)};
    return REJOIN_OK;
  });
}
void rejoin_group_close(rejoin_group* group) { rejoin::c::destroy(group); }
const char* rejoin_group_handle(const rejoin_group* group) { return group->group->handle().c_str(); }
rejoin_code rejoin_group_reconfigure(rejoin_group* group, uint64_t number, const char* const* members, size_t count,
                                     uint64_t limit_ms, int (*cancelled)(void*), void* with) {
  return guarded([&] {
    if (members == nullptr && count > 0) return null_argument("a list of members that is not empty");
    for (std::size_t i = 0; i < count; ++i)
      if (members[i] == nullptr) return null_argument(fmt::format("member {} of {}", i, count));
    return code(group->group->reconfigure(number, {members, members + count}, milliseconds_of(limit_ms),
                                          asking(cancelled, with)));
  });
}
uint32_t rejoin_group_rank(const rejoin_group* group) { return group->group->rank(); }
uint32_t rejoin_group_size(const rejoin_group* group) { return group->group->size(); }
int rejoin_group_failed(const rejoin_group* group) { return group->group->failed() ? 1 : 0; }
rejoin_code rejoin_group_start(rejoin_group* group, const rejoin_collective_call* call, rejoin_work** work) {
  return guarded([&] {
    if (!within(call->kind, REJOIN_RECEIVE) || !within(call->type, REJOIN_INT64) ||
        !within(call->combine, REJOIN_BITWISE_XOR))
      return failed({rejoin::ErrorCode::invalid_argument, "a collective's kind, type or combine is none of c.h"});
    if ((call->inputs == nullptr && call->input_count > 0) || (call->outputs == nullptr && call->output_count > 0))
      return null_argument("a list of buffers that is not empty");
    auto started = group->group->start({.kind = static_cast<rejoin::Collective>(call->kind),
                                        .type = static_cast<rejoin::DataType>(call->type),
                                        .combine = static_cast<rejoin::Combine>(call->combine),
                                        .root = call->root,
                                        .tag = call->tag,
                                        .inputs = all_bytes_of(call->inputs, call->input_count),
                                        .outputs = all_bytes_of(call->outputs, call->output_count),
                                        .limit = milliseconds_of(call->limit_ms),
                                        .on_device = call->on_device != 0,
                                        .stream = static_cast<rejoin::CudaStream>(call->stream)});
    if (!started) return failed(started.error());
    *work = new rejoin_work{std::move(*started)};
    return REJOIN_OK;
  });
}
rejoin_code rejoin_group_next_done(rejoin_group* group, uint64_t limit_ms, uint64_t* number) {
  return guarded([&] {
    const auto next = group->group->next_done(milliseconds_of(limit_ms));
    if (next) *number = *next;
    return code(next);
  });
}
rejoin_code rejoin_group_abort(rejoin_group* group, const char* reason) {
  return guarded([&] {
    if (reason == nullptr) return null_argument("the reason");
    group->group->abort(reason);
    return REJOIN_OK;
  });
}
rejoin_code rejoin_group_shutdown(rejoin_group* group, uint64_t limit_ms) {
  return guarded([&] {
    group->group->shutdown(milliseconds_of(limit_ms));
    return REJOIN_OK;
  });
}
int rejoin_work_done(const rejoin_work* work) { return work->work->done() ? 1 : 0; }
rejoin_code rejoin_work_wait(rejoin_work* work, uint64_t limit_ms, int (*cancelled)(void*), void* with) {
  return guarded([&] { return code(work->work->wait(milliseconds_of(limit_ms), asking(cancelled, with))); });
}
rejoin_code rejoin_work_wait_on(rejoin_work* work, void* stream) {
  return guarded([&] { return code(work->work->wait_on(static_cast<rejoin::CudaStream>(stream))); });
}
rejoin_code rejoin_work_notify(rejoin_work* work, uint64_t number) {
  return guarded([&] {
    work->work->notify(number);
    return REJOIN_OK;
  });
}
void rejoin_work_close(rejoin_work* work) { rejoin::c::destroy(work); }

}  // extern "C"
