// A state as of one step for other processes (rejoin/c.h) as two Python classes. All calls that may wait let other
// Python threads run meanwhile, and hear signals.
#include <memory>
#include <vector>

#include "native.h"

namespace rejoin::python {

namespace {

class CheckpointServer {
 public:
  CheckpointServer(const std::string& transport, const std::string& listen, const std::string& advertise) {
    rejoin_checkpoint_server* server = nullptr;
    check(rejoin_checkpoint_serve(transport.c_str(), listen.c_str(), advertise.c_str(), &server));
    server_.set(server, rejoin_checkpoint_server_close);
  }

  std::string address() const { return rejoin_checkpoint_address(server_.get().get()); }
  void publish(std::uint64_t step, const nb::bytes& description, const std::vector<Memory>& buffers) {
    const auto all = memory_of(buffers);
    const auto server = server_.get();
    const auto* const data = description.c_str();
    const auto size = description.size();
    Signals().waiting(
        [&] { return rejoin_checkpoint_publish(server.get(), step, data, size, all.data(), all.size()); });
  }
  std::uint64_t withdraw(std::uint64_t patience_ms) {
    const auto server = server_.get();
    Signals signals;
    std::uint64_t cut_off = 0;
    signals.waiting(
        [&] { return rejoin_checkpoint_withdraw(server.get(), patience_ms, &Signals::ask, &signals, &cut_off); });
    return cut_off;
  }
  void close() { server_.close(); }

 private:
  Opened<rejoin_checkpoint_server> server_{"this checkpoint server was shut down: make another"};
};

class CheckpointFetch {
 public:
  CheckpointFetch(const std::string& transport, const std::string& address, std::uint64_t step,
                  std::uint64_t limit_ms) {
    signals_.waiting([&] {
      return rejoin_checkpoint_fetch_open(transport.c_str(), address.c_str(), step, limit_ms, &Signals::ask, &signals_,
                                          &fetch_);
    });
  }
  CheckpointFetch(const CheckpointFetch&) = delete;
  ~CheckpointFetch() { close(); }
  void close() {
    auto* const fetch = std::exchange(fetch_, nullptr);
    const nb::gil_scoped_release release;
    rejoin_checkpoint_fetch_close(fetch);
  }

  nb::bytes description() const {
    const auto text = rejoin_checkpoint_description(open());
    return nb::bytes(static_cast<const char*>(text.data), static_cast<std::size_t>(text.bytes));
  }
  std::vector<std::uint64_t> sizes() const {
    std::size_t count = 0;
    const auto* const sizes = rejoin_checkpoint_sizes(open(), &count);
    return {sizes, sizes + count};
  }
  void into(const std::vector<Memory>& buffers, std::uint64_t limit_ms) {
    const auto all = memory_of(buffers);
    auto* const fetch = open();
    signals_.waiting([&] { return rejoin_checkpoint_fetch_into(fetch, all.data(), all.size(), limit_ms); });
  }

 private:
  rejoin_checkpoint_fetch* open() const {
    if (fetch_ == nullptr) raise(REJOIN_UNAVAILABLE, "this fetch was closed: open another");
    return fetch_;
  }
  Signals signals_;
  rejoin_checkpoint_fetch* fetch_ = nullptr;
};

}  // namespace

void bind_checkpoints(nb::module_& m) {
  nb::class_<CheckpointServer>(m, "CheckpointServer")
      .def(nb::init<const std::string&, const std::string&, const std::string&>(), nb::arg("transport"),
           nb::arg("listen"), nb::arg("advertise"))
      .def("address", &CheckpointServer::address)
      .def("publish", &CheckpointServer::publish, nb::arg("step"), nb::arg("description"), nb::arg("buffers"))
      .def("withdraw", &CheckpointServer::withdraw, nb::arg("patience_ms"))
      .def("close", &CheckpointServer::close);
  nb::class_<CheckpointFetch>(m, "CheckpointFetch")
      .def(nb::init<const std::string&, const std::string&, std::uint64_t, std::uint64_t>(), nb::arg("transport"),
           nb::arg("address"), nb::arg("step"), nb::arg("limit_ms"))
      .def("close", &CheckpointFetch::close)
      .def("description", &CheckpointFetch::description)
      .def("sizes", &CheckpointFetch::sizes)
      .def("into", &CheckpointFetch::into, nb::arg("buffers"), nb::arg("limit_ms"));
}

}  // namespace rejoin::python
