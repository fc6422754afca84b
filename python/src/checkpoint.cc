// A state as of one step for other processes (rejoin/c.h) as two Python classes. All calls that may wait let other
// Python threads run meanwhile, and hear signals.
#include <memory>
#include <optional>
#include <vector>

#include "native.h"

namespace rejoin::python {

namespace {

// What a signal's handler raises ends the call that waits.
class SignalsHeard {
 public:
  static int ask(void* self) {
    const nb::gil_scoped_acquire acquire;
    auto& raised = static_cast<SignalsHeard*>(self)->raised_;
    if (!raised && PyErr_CheckSignals() != 0) raised.emplace();
    return raised.has_value() ? 1 : 0;
  }
  void rethrow() {
    if (!raised_) return;
    nb::python_error error = std::move(*raised_);
    raised_.reset();
    throw std::move(error);
  }

 private:
  std::optional<nb::python_error> raised_;
};

std::vector<rejoin_memory> memory_of(const std::vector<Memory>& buffers) {
  std::vector<rejoin_memory> all;
  all.reserve(buffers.size());
  for (const auto& [address, bytes] : buffers) all.push_back({reinterpret_cast<void*>(address), bytes});
  return all;
}

// A call that is under way keeps the server: close() may come from another thread.
class CheckpointServer {
 public:
  CheckpointServer(const std::string& transport, const std::string& listen, const std::string& advertise) {
    rejoin_checkpoint_server* server = nullptr;
    check(rejoin_checkpoint_serve(transport.c_str(), listen.c_str(), advertise.c_str(), &server));
    server_.reset(server, rejoin_checkpoint_server_close);
  }
  CheckpointServer(const CheckpointServer&) = delete;
  ~CheckpointServer() { close(); }

  std::string address() const { return rejoin_checkpoint_address(open().get()); }
  void publish(std::uint64_t step, const nb::bytes& description, const std::vector<Memory>& buffers) {
    const auto all = memory_of(buffers);
    const auto server = open();
    const auto* const data = description.c_str();
    const auto size = description.size();
    rejoin_code code = REJOIN_OK;
    {
      const nb::gil_scoped_release release;
      code = rejoin_checkpoint_publish(server.get(), step, data, size, all.data(), all.size());
    }
    check(code);
  }
  std::uint64_t withdraw(std::uint64_t patience_ms) {
    const auto server = open();
    SignalsHeard signals;
    std::uint64_t cut_off = 0;
    rejoin_code code = REJOIN_OK;
    {
      const nb::gil_scoped_release release;
      code = rejoin_checkpoint_withdraw(server.get(), patience_ms, &SignalsHeard::ask, &signals, &cut_off);
    }
    signals.rethrow();
    check(code);
    return cut_off;
  }
  void close() {
    auto server = std::move(server_);
    server_ = nullptr;
    const nb::gil_scoped_release release;
    server.reset();
  }

 private:
  std::shared_ptr<rejoin_checkpoint_server> open() const {
    if (server_ == nullptr) raise(REJOIN_UNAVAILABLE, "this checkpoint server was shut down: make another");
    return server_;
  }
  std::shared_ptr<rejoin_checkpoint_server> server_;
};

class CheckpointFetch {
 public:
  CheckpointFetch(const std::string& transport, const std::string& address, std::uint64_t step,
                  std::uint64_t limit_ms) {
    waiting([&] {
      return rejoin_checkpoint_fetch_open(transport.c_str(), address.c_str(), step, limit_ms, &SignalsHeard::ask,
                                          &signals_, &fetch_);
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
    waiting([&] { return rejoin_checkpoint_fetch_into(fetch, all.data(), all.size(), limit_ms); });
  }

 private:
  template <typename Call>
  void waiting(const Call& call) {
    rejoin_code code = REJOIN_OK;
    {
      const nb::gil_scoped_release release;
      code = call();
    }
    signals_.rethrow();
    check(code);
  }

  rejoin_checkpoint_fetch* open() const {
    if (fetch_ == nullptr) raise(REJOIN_UNAVAILABLE, "this fetch was closed: open another");
    return fetch_;
  }
  SignalsHeard signals_;
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
