// The session's C interface (rejoin/c.h) as a Python class. Memory goes out as addresses and sizes: what wraps them in
// tensors, and keeps the session as long as those, is Python (memory.py). All calls that may wait let other Python
// threads run meanwhile, and hear signals.
#include "native.h"

#include <limits.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

using namespace rejoin::python;

namespace {

using Ranges = std::vector<std::pair<std::uint64_t, std::uint64_t>>;  // of samples: begin, end

class Session {
 public:
  explicit Session(const std::vector<std::string>& settings) {
    std::vector<const char*> all;
    for (const auto& setting : settings) all.push_back(setting.c_str());
    check(rejoin_open(all.data(), all.size(), &session_));
    rejoin_while_waiting(
        session_,
        [](void* self) {
          auto* const session = static_cast<Session*>(self);
          if (session->signals_.heard()) rejoin_interrupt(session->session_);
        },
        this);
  }
  Session(const Session&) = delete;
  ~Session() {
    nb::gil_scoped_release release;
    rejoin_close(session_);
  }

  std::uint32_t add(const std::string& name, int type, std::uint64_t count, std::uint32_t moments, bool elementwise,
                    const std::optional<std::vector<Memory>>& memory,
                    const std::optional<std::vector<int>>& moment_types, const std::optional<int>& gradient_type) {
    std::vector<rejoin_type> types;
    if (moment_types)
      for (const int one : *moment_types) types.push_back(static_cast<rejoin_type>(one));
    if (moment_types && types.size() != moments) throw nb::value_error("there is one type for each moment");
    const auto reduced = static_cast<rejoin_type>(gradient_type.value_or(type));
    const rejoin_tensor_spec spec{name.c_str(),        static_cast<rejoin_type>(type),        count,   moments,
                                  elementwise ? 1 : 0, moment_types ? types.data() : nullptr, &reduced};
    auto own = memory ? memory_of(*memory) : std::vector<rejoin_memory>();
    if (memory && own.size() != std::size_t{moments} + 1)
      throw nb::value_error("memory is that of the weight and each moment");
    std::uint32_t tensor = 0;
    check(rejoin_add(session_, &spec, memory ? own.data() : nullptr, &tensor));
    return tensor;
  }
  std::uint32_t bucket(const std::vector<std::uint32_t>& tensors, const std::optional<Memory>& gradients) {
    rejoin_memory own{};
    if (gradients) own = {reinterpret_cast<void*>(gradients->first), gradients->second};
    std::uint32_t bucket = 0;
    check(rejoin_bucket(session_, tensors.data(), tensors.size(), gradients ? &own : nullptr, &bucket));
    return bucket;
  }
  void allocate() {
    waiting([&] { return rejoin_allocate(session_); });
  }
  void set_fingerprint(const std::string& text) { check(rejoin_set_fingerprint(session_, text.c_str())); }
  Memory weight(std::uint32_t tensor) {
    return memory([&](rejoin_memory* to) { return rejoin_weight(session_, tensor, to); });
  }
  Memory moment(std::uint32_t tensor, std::uint32_t index) {
    return memory([&](rejoin_memory* to) { return rejoin_moment(session_, tensor, index, to); });
  }
  Memory gradient(std::uint32_t tensor) {
    return memory([&](rejoin_memory* to) { return rejoin_gradient(session_, tensor, to); });
  }
  Memory reduced(std::uint32_t tensor) {
    return memory([&](rejoin_memory* to) { return rejoin_reduced(session_, tensor, to); });
  }

  void join(const std::optional<std::string>& position, bool compare) {
    waiting([&] { return rejoin_join(session_, position ? position->c_str() : nullptr, compare ? 1 : 0); });
  }
  // number, contributes, leads, contributors, ranges of samples, weight, epoch, settled; nothing: the job is finished
  std::optional<std::tuple<std::uint64_t, bool, bool, std::uint32_t, Ranges, std::uint64_t, std::uint64_t, bool>>
  begin_step() {
    rejoin_step step{};
    waiting([&] { return rejoin_begin_step(session_, &step); });
    if (step.number == 0) return std::nullopt;
    return std::tuple(step.number, step.contributes != 0, step.leads != 0, step.contributors,
                      ranges_of({step.batch, step.batch_count}), step.weight, step.epoch, step.settled != 0);
  }
  // Replica and card of each contributor.
  std::vector<std::pair<std::uint32_t, std::string>> cards() {
    const rejoin_card* cards = nullptr;
    std::size_t count = 0;
    check(rejoin_cards(session_, &cards, &count));
    std::vector<std::pair<std::uint32_t, std::string>> all;
    for (std::size_t i = 0; i < count; ++i) all.emplace_back(cards[i].replica, cards[i].text);
    return all;
  }
  void keep_exact(std::uint32_t bucket) { check(rejoin_keep_exact(session_, bucket)); }
  void use_weights() { rejoin_use_weights(session_); }
  void set_card(const std::string& text, const std::string& listening) {
    check(rejoin_set_card_listening(session_, text.c_str(), listening.c_str()));
  }
  bool intact(std::uint64_t during_ms) {
    const nb::gil_scoped_release release;
    return rejoin_intact(session_, during_ms) != 0;
  }
  // Of each of the next steps, as far as it is known.
  std::vector<Ranges> upcoming(std::uint32_t steps) {
    const rejoin_batch* batches = nullptr;
    std::size_t count = 0;
    check(rejoin_upcoming(session_, steps, &batches, &count));
    std::vector<Ranges> all;
    for (std::size_t i = 0; i < count; ++i) all.push_back(ranges_of(batches[i]));
    return all;
  }
  void all_reduce(std::uint32_t bucket, const std::optional<std::uintptr_t>& stream) {
    waiting([&] {
      return stream ? rejoin_all_reduce_on(session_, bucket, reinterpret_cast<void*>(*stream))
                    : rejoin_all_reduce(session_, bucket);
    });
  }
  // tensor, first, count, step, the gradient's address; nothing: the same step comes once more
  std::optional<std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uintptr_t>>>
  begin_update() {
    int committed = 0;
    const rejoin_update* updates = nullptr;
    std::size_t count = 0;
    try {
      waiting([&] { return rejoin_begin_update(session_, &committed, &updates, &count); });
    } catch (nb::python_error&) {  // perhaps raised while the step came to its decision
      if (committed != 0) (void)rejoin_abandon_update(session_, "this process was told to end");
      throw;
    }
    if (committed == 0) return std::nullopt;
    std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uintptr_t>> all;
    all.reserve(count);
    for (std::size_t i = 0; i < count; ++i)
      all.emplace_back(updates[i].tensor, updates[i].first, updates[i].count, updates[i].step,
                       reinterpret_cast<std::uintptr_t>(updates[i].gradient.data));
    return all;
  }
  void end_update(const std::optional<std::uintptr_t>& stream) {
    waiting([&] {
      return stream ? rejoin_end_update_on(session_, reinterpret_cast<void*>(*stream)) : rejoin_end_update(session_);
    });
  }
  void scale_feedback(std::uint64_t step, float factor) { check(rejoin_scale_feedback(session_, step, factor)); }
  // Raises the error that all later calls raise.
  void abandon_update(const std::string& what) {
    waiting([&] { return rejoin_abandon_update(session_, what.c_str()); });
  }

  void busy(std::uint64_t limit_ms, const std::string& reason) {
    check(rejoin_busy(session_, limit_ms, reason.c_str()));
  }
  void busy_in_step(std::uint64_t limit_ms, const std::string& reason) {
    check(rejoin_busy_in_step(session_, limit_ms, reason.c_str()));
  }
  void done() { check(rejoin_done(session_)); }

  std::optional<std::uint64_t> version() const {
    int known = 0;
    std::uint64_t version = 0;
    check(rejoin_state_version(session_, &known, &version));
    return known != 0 ? std::optional(version) : std::nullopt;
  }
  std::uint64_t committed() const { return rejoin_committed(session_); }
  void check_job() const { check(rejoin_check(session_)); }
  std::string position() {
    const char* text = nullptr;
    waiting([&] { return rejoin_position(session_, &text); });
    return text;
  }
  std::uint64_t state_digest() {
    std::uint64_t digest = 0;
    waiting([&] { return rejoin_state_digest(session_, &digest); });
    return digest;
  }
  void leave() {
    waiting([&] { return rejoin_leave(session_); });
  }
  void interrupt() { rejoin_interrupt(session_); }
  void while_waiting(nb::object look) { signals_.look = std::move(look); }

 private:
  static Ranges ranges_of(const rejoin_batch& batch) {
    Ranges ranges;
    for (std::size_t i = 0; i < batch.count; ++i) ranges.emplace_back(batch.ranges[i].begin, batch.ranges[i].end);
    return ranges;
  }
  template <typename Call>
  void waiting(const Call& call) {
    signals_.waiting(call);
  }
  template <typename Call>
  Memory memory(const Call& call) {
    rejoin_memory to{};
    check(call(&to));
    return {reinterpret_cast<std::uintptr_t>(to.data), to.bytes};
  }

  rejoin_session* session_ = nullptr;
  Signals signals_;
};

}  // namespace

namespace {

// Of the library's threads, which must not wait for Python: what a full pipe doesn't take is left out.
void write_line(void* fd, int level, const char* line) {
  std::string whole = std::to_string(level) + line;
  whole.resize(std::min<std::size_t>(whole.size(), PIPE_BUF - 1));  // up to so many are written as one
  std::replace(whole.begin(), whole.end(), '\n', ' ');
  whole += '\n';
  [[maybe_unused]] const auto written =
      ::write(static_cast<int>(reinterpret_cast<std::intptr_t>(fd)), whole.data(), whole.size());
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // tensors keep their session for as long as they live, which may be to the very end
  m.def("version", [] { return std::string(rejoin_version()); });
  m.def(
      "set_error", [](nb::object make) { make_error() = std::move(make); }, nb::arg("make"));
  // The descriptor is a pipe's that doesn't block.
  m.def(
      "log_to",
      [](int fd) {
        const nb::gil_scoped_release release;
        rejoin_set_log(write_line, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)));
      },
      nb::arg("fd"));
  m.def("set_log_level", [](int level) {
    if (rejoin_set_log_level(level) != REJOIN_OK) throw nb::value_error(rejoin_error());
  });
  m.def("position_step", [](const std::string& position) {
    std::uint64_t step = 0;
    if (const auto code = rejoin_position_step(position.c_str(), &step); code != REJOIN_OK)
      throw nb::value_error(rejoin_error());
    return step;
  });
  nb::class_<Session>(m, "Session")
      .def(nb::init<const std::vector<std::string>&>(), nb::arg("settings"))
      .def("add", &Session::add, nb::arg("name"), nb::arg("type"), nb::arg("count"), nb::arg("moments"),
           nb::arg("elementwise"), nb::arg("memory") = nb::none(), nb::arg("moment_types") = nb::none(),
           nb::arg("gradient_type") = nb::none())
      .def("bucket", &Session::bucket, nb::arg("tensors"), nb::arg("gradients") = nb::none())
      .def("allocate", &Session::allocate)
      .def("set_fingerprint", &Session::set_fingerprint, nb::arg("text"))
      .def("weight", &Session::weight, nb::arg("tensor"))
      .def("moment", &Session::moment, nb::arg("tensor"), nb::arg("index"))
      .def("gradient", &Session::gradient, nb::arg("tensor"))
      .def("reduced", &Session::reduced, nb::arg("tensor"))
      .def("join", &Session::join, nb::arg("position") = nb::none(), nb::arg("compare") = true)
      .def("begin_step", &Session::begin_step)
      .def("upcoming", &Session::upcoming, nb::arg("steps"))
      .def("cards", &Session::cards)
      .def("keep_exact", &Session::keep_exact, nb::arg("bucket"))
      .def("use_weights", &Session::use_weights)
      .def("set_card", &Session::set_card, nb::arg("text"), nb::arg("listening") = "")
      .def("intact", &Session::intact, nb::arg("during_ms"))
      .def("all_reduce", &Session::all_reduce, nb::arg("bucket"), nb::arg("stream") = nb::none())
      .def("begin_update", &Session::begin_update)
      .def("end_update", &Session::end_update, nb::arg("stream") = nb::none())
      .def("scale_feedback", &Session::scale_feedback, nb::arg("step"), nb::arg("factor"))
      .def("abandon_update", &Session::abandon_update, nb::arg("what"))
      .def("busy", &Session::busy, nb::arg("limit_ms"), nb::arg("reason"))
      .def("busy_in_step", &Session::busy_in_step, nb::arg("limit_ms"), nb::arg("reason"))
      .def("done", &Session::done)
      .def("version", &Session::version)
      .def("committed", &Session::committed)
      .def("check", &Session::check_job)
      .def("position", &Session::position)
      .def("state_digest", &Session::state_digest)
      .def("leave", &Session::leave)
      .def("interrupt", &Session::interrupt)
      .def("while_waiting", &Session::while_waiting, nb::arg("look"));
  bind_checkpoints(m);
  bind_process_groups(m);
}
