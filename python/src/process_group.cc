// Collective operations without a session (rejoin/c.h) as two Python classes. All calls that may wait let other Python
// threads run meanwhile, and those that are not for a thread of the package's hear signals.
#include <algorithm>
#include <memory>
#include <vector>

#include "native.h"

namespace rejoin::python {

namespace {

class Work {
 public:
  explicit Work(rejoin_work* work) : work_(work, rejoin_work_close) {}

  bool done() const { return rejoin_work_done(work_.get()) != 0; }
  void wait(std::uint64_t limit_ms) {
    const auto work = work_;
    Signals signals;
    signals.waiting([&] { return rejoin_work_wait(work.get(), limit_ms, &Signals::ask, &signals); });
  }
  void wait_on(std::uintptr_t stream) {
    const auto work = work_;
    Signals().waiting([&] { return rejoin_work_wait_on(work.get(), reinterpret_cast<void*>(stream)); });
  }
  void notify(std::uint64_t number) { check(rejoin_work_notify(work_.get(), number)); }

 private:
  const std::shared_ptr<rejoin_work> work_;
};

class ProcessGroup {
 public:
  ProcessGroup(const std::string& transport, const std::string& listen, const std::string& advertise,
               const std::string& device, const std::string& towards) {
    rejoin_group* group = nullptr;
    check(rejoin_group_open_towards(transport.c_str(), listen.c_str(), advertise.c_str(), device.c_str(),
                                    towards.c_str(), &group));
    group_.set(group, rejoin_group_close);
  }

  std::string handle() const { return rejoin_group_handle(group_.get().get()); }
  std::uint32_t rank() const { return rejoin_group_rank(group_.get().get()); }
  std::uint32_t size() const { return rejoin_group_size(group_.get().get()); }
  bool failed() const { return rejoin_group_failed(group_.get().get()) != 0; }
  void reconfigure(std::uint64_t number, const std::vector<std::string>& members, std::uint64_t limit_ms) {
    std::vector<const char*> all;
    std::transform(members.begin(), members.end(), std::back_inserter(all),
                   [](const auto& one) { return one.c_str(); });
    const auto group = group_.get();
    Signals signals;
    signals.waiting([&] {
      return rejoin_group_reconfigure(group.get(), number, all.data(), all.size(), limit_ms, &Signals::ask, &signals);
    });
  }
  // With a stream buffers are in the memory of the group's device, and it begins behind what is queued there.
  // Puts the work into `begun` before any Python code runs again, a signal's handler say: what has begun is never lost.
  void start(std::uint32_t kind, std::uint32_t type, std::uint32_t combine, std::uint32_t root, std::uint32_t tag,
             const std::vector<Memory>& inputs, const std::vector<Memory>& outputs, std::uint64_t limit_ms,
             nb::list begun, std::optional<std::uintptr_t> stream) {
    const auto in = memory_of(inputs), out = memory_of(outputs);
    rejoin_collective_call call{};
    call.kind = kind;
    call.type = type;
    call.combine = combine;
    call.root = root, call.tag = tag;
    call.inputs = in.data(), call.input_count = in.size();
    call.outputs = out.data(), call.output_count = out.size();
    call.limit_ms = limit_ms;
    call.on_device = stream ? 1 : 0, call.stream = reinterpret_cast<void*>(stream.value_or(0));
    const auto group = group_.get();
    rejoin_work* work = nullptr;
    Signals().waiting([&] { return rejoin_group_start(group.get(), &call, &work); });
    begun.append(Work(work));
  }
  std::uint64_t next_done(std::uint64_t limit_ms) {
    const auto group = group_.get();
    std::uint64_t number = 0;
    Signals().waiting([&] { return rejoin_group_next_done(group.get(), limit_ms, &number); });
    return number;
  }
  void abort(const std::string& reason) { check(rejoin_group_abort(group_.get().get(), reason.c_str())); }
  void shutdown(std::uint64_t limit_ms) {
    const auto group = group_.get();
    Signals().waiting([&] { return rejoin_group_shutdown(group.get(), limit_ms); });
  }
  void close() { group_.close(); }

 private:
  Opened<rejoin_group> group_{"this process group was shut down: make another"};
};

}  // namespace

void bind_process_groups(nb::module_& m) {
  nb::class_<Work>(m, "Work")
      .def("done", &Work::done)
      .def("wait", &Work::wait, nb::arg("limit_ms"))
      .def("wait_on", &Work::wait_on, nb::arg("stream"))
      .def("notify", &Work::notify, nb::arg("number"));
  nb::class_<ProcessGroup>(m, "ProcessGroup")
      .def(nb::init<const std::string&, const std::string&, const std::string&, const std::string&,
                    const std::string&>(),
           nb::arg("transport"), nb::arg("listen"), nb::arg("advertise"), nb::arg("device") = "host",
           nb::arg("towards") = "")
      .def("handle", &ProcessGroup::handle)
      .def("rank", &ProcessGroup::rank)
      .def("size", &ProcessGroup::size)
      .def("failed", &ProcessGroup::failed)
      .def("reconfigure", &ProcessGroup::reconfigure, nb::arg("number"), nb::arg("members"), nb::arg("limit_ms"))
      .def("start", &ProcessGroup::start, nb::arg("kind"), nb::arg("type"), nb::arg("combine"), nb::arg("root"),
           nb::arg("tag"), nb::arg("inputs"), nb::arg("outputs"), nb::arg("limit_ms"), nb::arg("begun"),
           nb::arg("stream").none() = nb::none())
      .def("next_done", &ProcessGroup::next_done, nb::arg("limit_ms"))
      .def("abort", &ProcessGroup::abort, nb::arg("reason"))
      .def("shutdown", &ProcessGroup::shutdown, nb::arg("limit_ms"))
      .def("close", &ProcessGroup::close);
}

}  // namespace rejoin::python
