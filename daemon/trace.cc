#include "daemon/trace.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/fail.h"
#include "base/flight.h"
#include "base/step_phases.h"
#include "daemon/incident_words.h"
#include "daemon/recording.h"

namespace rejoin::daemon {

namespace {

double us_of(std::int64_t ns) { return static_cast<double>(ns) * 1e-3; }

// The file as it grows: a trace of a large job need not be in memory. Until there is an event to write, what is at its
// path stays as it is.
class TraceFile {
 public:
  explicit TraceFile(const std::string& path) : path_(path) {}
  void add(const nlohmann::json& event) {
    const bool first = !std::exchange(begun_, true);
    if (first) {
      errno = 0;
      out_.open(path_);
      out_ << "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
    }
    out_ << (first ? "\n" : ",\n") << event.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    note_error();
  }
  Result<> close(const nlohmann::json& about) {
    out_ << "\n],\"otherData\":" << about.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << "}\n"
         << std::flush;
    note_error();
    if (error_ == 0) return {};
    const bool full = error_ == ENOSPC || error_ == EDQUOT;
    return fail(ErrorCode::io, "can't write {}: {}; give another -o{}", path_, std::strerror(error_),
                full ? ", or free space there" : "");
  }
  void name_process(int pid, const std::string& name) {
    add({{"ph", "M"}, {"name", "process_name"}, {"pid", pid}, {"args", {{"name", name}}}});
  }
  void name_row(int pid, int row, const std::string& name) {
    add({{"ph", "M"}, {"name", "thread_name"}, {"pid", pid}, {"tid", row}, {"args", {{"name", name}}}});
    add({{"ph", "M"}, {"name", "thread_sort_index"}, {"pid", pid}, {"tid", row}, {"args", {{"sort_index", row}}}});
  }
  void span(int pid, int row, const std::string& name, std::int64_t from, std::int64_t to, const nlohmann::json& args) {
    add({{"ph", "X"},
         {"name", name},
         {"pid", pid},
         {"tid", row},
         {"ts", us_of(from)},
         {"dur", us_of(std::max<std::int64_t>(to - from, 0))},
         {"args", args}});
  }
  void instant(int pid, int row, const std::string& name, std::int64_t at, const nlohmann::json& args) {
    add({{"ph", "i"}, {"s", "t"}, {"name", name}, {"pid", pid}, {"tid", row}, {"ts", us_of(at)}, {"args", args}});
  }

 private:
  void note_error() {
    if (!out_ && error_ == 0) error_ = errno != 0 ? errno : EIO;
  }

  const std::string& path_;
  std::ofstream out_;
  int error_ = 0;  // the first
  bool begun_ = false;
};

// ---- event files

constexpr std::string_view kEventFile = ".jsonl";

bool is_event(const nlohmann::json& line) {
  return line.is_object() && line.contains("t") && line.at("t").is_number() && line.contains("kind") &&
         line.at("kind").is_string();
}

class FileRow {
 public:
  FileRow(int number, TraceFile& trace) : number_(number), trace_(trace) {}
  void add(nlohmann::json event) {
    const auto at = event.at("t").get<std::int64_t>();
    const std::string kind = event.at("kind").get<std::string>();
    for (const char* key : {"t", "who", "kind"}) event.erase(key);
    const auto phase = phases_.ended_by(kind, at);
    if (StepPhases::begins(kind)) return;
    if (!phase) return trace_.instant(number_, 1, kind, at, event);
    std::string name(phase->name);
    if (event.contains("step")) name.append(" ").append(event.at("step").dump());
    trace_.span(number_, 1, name, phase->begun, phase->ended, event);
  }

 private:
  const int number_;
  TraceFile& trace_;
  StepPhases phases_;
};

// A line as JSON without what is nested too deeply: copying and writing what is there takes a call for each level.
nlohmann::json parsed(const std::string& line) {
  constexpr int deepest = 32;
  const auto keep = [](int depth, auto, const auto&) { return depth <= deepest; };
  return nlohmann::json::parse(line, keep, false);
}

// Whether there is an event in it.
bool add_event_file(const std::string& path, int number, TraceFile& trace) {
  const auto row = std::make_unique<FileRow>(number, trace);  // GCC 12 takes it for uninitialized on the stack
  bool any = false;
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return false;  // a pipe would wait for a writer
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    auto event = parsed(line);
    if (!is_event(event)) continue;  // the last line of a killed process
    if (!std::exchange(any, true)) trace.name_process(number, std::filesystem::path(path).stem().string());
    row->add(std::move(event));
  }
  return any;
}

// ---- recordings

constexpr int kFirstBucketRow = 16, kBucketRows = 16;
constexpr std::pair<events::Lane, const char*> kRows[] = {{events::Lane::decisions, "decisions"},
                                                          {events::Lane::trainer, "steps"},
                                                          {events::Lane::all_reduce, "epochs and peers"},
                                                          {events::Lane::stream, "catch-up"},
                                                          {events::Lane::control, "control"}};

int row_of(events::Lane lane) {
  const auto* found = std::ranges::find(kRows, lane, &std::pair<events::Lane, const char*>::first);
  return static_cast<int>(found - kRows) + 1;
}

nlohmann::json arguments_of(const RecordedEvent& event) {
  const auto& its = events::traits(event.kind);
  nlohmann::json all = nlohmann::json::object();
  const auto add = [&](std::string_view name, std::uint64_t value) {
    if (name.ends_with('?')) all[std::string(name.substr(0, name.size() - 1))] = value != 0;
    else if (!name.empty()) all[std::string(name)] = value;
  };
  if (its.epoch) add("epoch", event.numbers.epoch);
  if (its.step) add("step", event.numbers.step);
  add(its.replica, event.numbers.replica);
  add(its.number, event.numbers.number);
  add(its.a, event.numbers.a);
  add(its.b, event.numbers.b);
  if (!its.text.empty() && !event.text.empty()) all[std::string(its.text)] = event.first_text();
  if (!its.more_text.empty()) all[std::string(its.more_text)] = event.more_text();
  return all;
}

class ProcessTrace {
 public:
  ProcessTrace(const Recording& of, int pid, TraceFile& trace) : of_(of), pid_(pid), trace_(trace) {
    trace_.name_process(pid, of.name());
    if (of.begins[0] != 0)
      trace_.add({{"ph", "M"},
                  {"name", "process_labels"},
                  {"pid", pid},
                  {"args",
                   {{"labels",
                     "what happened in steps is overwritten before " + std::to_string(us_of(of.begins[0])) + " us"}}}});
    std::vector<bool> used(std::size(kRows) + 1);
    for (const auto& event : of.events) used[static_cast<std::size_t>(row_of(events::traits(event.kind).lane))] = true;
    for (std::size_t i = 0; i < std::size(kRows); ++i)
      if (used[i + 1]) trace_.name_row(pid, static_cast<int>(i) + 1, kRows[i].second);
  }
  void add_all() {
    for (const auto& event : of_.events) add(event);
    if (entering_)
      trace_.span(pid_, row_of(events::Lane::all_reduce), "enter epoch, not ended", entering_->at, of_.events.back().at,
                  arguments_of(*entering_));
  }

 private:
  void add(const RecordedEvent& event) {
    const auto& its = events::traits(event.kind);
    const auto& n = event.numbers;
    const int row = row_of(its.lane);
    if (const auto phase = phases_.ended_by(its.name, event.at))
      return trace_.span(pid_, row, fmt::format("{} {}", phase->name, n.step), phase->begun, phase->ended,
                         arguments_of(event));
    switch (event.kind) {
      case events::Kind::step:
      case events::Kind::beat:
      case events::Kind::heard: return;
      case events::Kind::bucket_begun: buckets_[n.a] = event; return;
      case events::Kind::bucket_done: return add_bucket(event);
      case events::Kind::paused:
      case events::Kind::appended:
        return trace_.span(pid_, row, std::string(its.name), event.at - nanoseconds(n.a), event.at,
                           arguments_of(event));
      case events::Kind::enter_epoch:
        buckets_.clear();  // what was under way is dropped
        entering_ = event;
        return flow("f", n.epoch, event.at);
      case events::Kind::entered:
        if (const auto begun = std::exchange(entering_, std::nullopt))
          return trace_.span(pid_, row, fmt::format("enter epoch {}", n.epoch), begun->at, event.at,
                             arguments_of(*begun));
        break;
      case events::Kind::epoch:
        trace_.span(pid_, row, fmt::format("epoch {}", n.epoch), event.at, event.at + 1000, arguments_of(event));
        return flow("s", n.epoch, event.at);
      case events::Kind::catch_up:
        return trace_.add({{"ph", "C"},
                           {"name", fmt::format("catch-up of replica {} rank {}", n.replica, n.number)},
                           {"pid", pid_},
                           {"ts", us_of(event.at)},
                           {"args", {{"bytes", n.a}}}});
      case events::Kind::catch_up_started: joiners_[{n.replica, n.number}] = event.at; break;
      case events::Kind::promoted:
        if (const auto begun = joiners_.extract({n.replica, n.number}); !begun.empty())
          return trace_.span(pid_, row, fmt::format("catch-up of replica {} rank {}", n.replica, n.number),
                             begun.mapped(), event.at, arguments_of(event));
        break;
      default: break;
    }
    const std::string name =
        its.name.empty() ? fmt::format("kind {}", static_cast<unsigned>(event.kind)) : std::string(its.name);
    trace_.instant(pid_, row, name, event.at, arguments_of(event));
  }

  void add_bucket(const RecordedEvent& done) {
    const auto begun = buckets_.extract(done.numbers.a);
    if (begun.empty()) return;
    const int row = kFirstBucketRow + static_cast<int>(done.numbers.a % kBucketRows);
    if (!std::exchange(bucket_rows_[row], true))
      trace_.name_row(pid_, row, fmt::format("buckets {} …", done.numbers.a % kBucketRows));
    nlohmann::json arguments = arguments_of(done);
    arguments["bytes"] = begun.mapped().numbers.b;
    trace_.span(pid_, row, fmt::format("bucket {} of step {}", done.numbers.a, done.numbers.step), begun.mapped().at,
                done.at, arguments);
  }

  // An arrow from the decision to each process that it reaches: of one name and number, from one to many.
  void flow(const char* phase, std::uint64_t epoch, std::int64_t at) {
    nlohmann::json event{
        {"ph", phase},    {"name", "epoch"},
        {"cat", "epoch"}, {"id", epoch},
        {"pid", pid_},    {"tid", row_of(*phase == 's' ? events::Lane::decisions : events::Lane::all_reduce)},
        {"ts", us_of(at)}};
    if (*phase == 'f') event["bp"] = "e";
    trace_.add(event);
  }

  const Recording& of_;
  const int pid_;
  TraceFile& trace_;
  StepPhases phases_;
  std::map<std::uint64_t, RecordedEvent> buckets_;
  std::map<int, bool> bucket_rows_;
  std::optional<RecordedEvent> entering_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::int64_t> joiners_;
};

// A few of them, for a message.
std::string some_of(std::vector<std::string> names) {
  constexpr std::size_t most = 5;
  for (auto& name : names) name = std::filesystem::path(name).filename().string();
  std::ranges::sort(names);
  const std::size_t more = names.size() - std::min(names.size(), most);
  names.resize(names.size() - more);
  return fmt::format("{}{}", fmt::join(names, ", "), more == 0 ? "" : fmt::format(" and {} more", more));
}

// Where the reference's time of the day has changed against its monotonic clock: put right by hand, or suspended.
nlohmann::json times_of_day(const Recordings& recordings) {
  constexpr std::int64_t change = 1'000'000'000;  // ns
  auto times = nlohmann::json::array();
  std::int64_t last = 0;
  for (const auto& [from, offset] : recordings.wall_offsets)
    if (times.empty() || std::abs(offset - last) >= change) {
      times.push_back({{"from_us", us_of(from)}, {"add_for_ns_since_1970", offset}});
      last = offset;
    }
  return times;
}

nlohmann::json about(const Recordings& recordings) {
  nlohmann::json all{{"times", "ns by the coordinator's CLOCK_MONOTONIC"},
                     {"add_for_ns_since_1970", recordings.wall_offset},
                     {"clocks", recordings.clocks},
                     {"clocks_differ_by_at_most_us", us_of(recordings.clock_error)},
                     {"notes", recordings.notes}};
  if (auto times = times_of_day(recordings); times.size() > 1) all["times_of_day"] = std::move(times);
  if (recordings.job != 0) all["job"] = fmt::format("{:016x}", recordings.job);
  return all;
}

// Files that are read, which a trace in their place would end.
Result<> check_output(const std::string& output, const Recordings& recordings) {
  for (const auto& path : recordings.files) {
    std::error_code ignored;
    const bool read = path.ends_with(flight::kSuffix) || path.ends_with(kEventFile);
    if (read && std::filesystem::equivalent(path, output, ignored))
      return fail(ErrorCode::invalid_argument, "the trace would overwrite {}, which is read for it: give another -o",
                  output);
  }
  return {};
}

}  // namespace

Result<MergedTrace> merge_trace(const std::vector<std::string>& paths, const std::string& output, std::uint64_t job) {
  auto recordings = read_recordings(paths, job);
  if (!recordings) return tl::unexpected(recordings.error());
  if (auto checked = check_output(output, *recordings); !checked) return tl::unexpected(checked.error());
  std::erase(recordings->others, output);
  MergedTrace merged{.processes = 0, .notes = recordings->notes};
  std::vector<std::string> unread;
  {
    TraceFile trace(output);
    for (const auto& one : recordings->all) ProcessTrace(one, ++merged.processes, trace).add_all();
    for (const auto& path : recordings->others) {
      const bool event_file = path.ends_with(kEventFile) && add_event_file(path, merged.processes + 1, trace);
      if (event_file) ++merged.processes;
      else unread.push_back(path);
    }
    if (merged.processes > 0)
      if (auto written = trace.close(about(*recordings)); !written) return tl::unexpected(written.error());
  }
  if (merged.processes > 0) return merged;
  return fail(ErrorCode::not_found,
              "no events in {}{}; give the --flight-dir of daemons and trainers, or the directory that they were "
              "started with --events for",
              paths.empty() ? flight::default_directory() : fmt::format("{}", fmt::join(paths, ", ")),
              unread.empty() ? ": it has no file" : fmt::format(": none is in {}", some_of(unread)));
}

}  // namespace rejoin::daemon
