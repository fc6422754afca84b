#include "examples/demo_trace.h"

#include <fstream>

#include "base/fail.h"
#include "base/step_phases.h"

namespace rejoin::demo {

Result<> write_trace(const std::string& path, const std::vector<Event>& events, const std::vector<Deed>& deeds) {
  nlohmann::json trace = nlohmann::json::array();
  std::map<std::string, int> rows;  // a row for each process' name
  const auto row = [&](const std::string& who) {
    const auto [it, fresh] = rows.try_emplace(who, static_cast<int>(rows.size()) + 1);
    if (fresh) trace.push_back({{"ph", "M"}, {"name", "process_name"}, {"pid", it->second}, {"args", {{"name", who}}}});
    return it->second;
  };
  const auto us = [](std::int64_t t) { return static_cast<double>(t) * 1e-3; };
  const auto span = [&](const std::string& who, const std::string& name, std::int64_t from, std::int64_t to) {
    trace.push_back(
        {{"ph", "X"}, {"name", name}, {"pid", row(who)}, {"tid", 1}, {"ts", us(from)}, {"dur", us(to - from)}});
  };
  std::map<std::pair<std::string, int>, StepPhases> phases;  // of each process
  for (const auto& event : events) {
    const auto phase = phases[{event.who, event.pid}].ended_by(event.kind, event.t);
    if (phase) span(event.who, fmt::format("{} {}", phase->name, event.number("step")), phase->begun, phase->ended);
    else if (StepPhases::begins(event.kind) || event.kind == "progress") continue;
    else if (event.kind == "catch_up")
      trace.push_back({{"ph", "C"},
                       {"name", "catch-up bytes rank " + std::to_string(event.number("rank"))},
                       {"pid", row(event.who)},
                       {"ts", us(event.t)},
                       {"args", {{"bytes", event.number("bytes")}}}});
    else {
      nlohmann::json arguments = event.fields;
      for (const char* key : {"t", "who", "kind"}) arguments.erase(key);
      trace.push_back({{"ph", "i"},
                       {"s", "p"},
                       {"name", event.kind},
                       {"pid", row(event.who)},
                       {"tid", 1},
                       {"ts", us(event.t)},
                       {"args", arguments}});
    }
  }
  for (const auto& deed : deeds)
    trace.push_back({{"ph", "i"},
                     {"s", "g"},
                     {"name", deed.who.empty() ? fmt::format("{} {}.{}", deed.kind, deed.replica, deed.rank)
                                               : fmt::format("{} {}", deed.kind, deed.who)},
                     {"pid", row("demo")},
                     {"tid", 1},
                     {"ts", us(deed.t)}});
  std::ofstream out(path);
  out << nlohmann::json{{"traceEvents", trace}, {"displayTimeUnit", "ms"}}.dump() << "\n";
  if (!out.flush()) return fail(ErrorCode::io, "can't write the trace to {}", path);
  return {};
}

}  // namespace rejoin::demo
