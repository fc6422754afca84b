#include "examples/demo_trace.h"

#include <fstream>

#include "base/fail.h"

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
  struct Marks {
    std::int64_t begun = 0, computed = 0, exchanged = 0, committed = 0;
  };
  std::map<std::pair<std::string, int>, Marks> marks;
  for (const auto& event : events) {
    Marks& m = marks[{event.who, event.pid}];
    const std::string step = std::to_string(event.number("step"));
    if (event.kind == "step") m = {.begun = event.t};
    else if (event.kind == "computed") span(event.who, "compute " + step, m.begun, m.computed = event.t);
    else if (event.kind == "exchanged")
      span(event.who, "exchange " + step, m.computed ? m.computed : m.begun, m.exchanged = event.t);
    else if (event.kind == "committed")
      span(event.who, "commit " + step, m.exchanged ? m.exchanged : event.t, m.committed = event.t);
    else if (event.kind == "updated") span(event.who, "update " + step, m.committed ? m.committed : event.t, event.t);
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
                     {"name", fmt::format("{} {}.{}", deed.kind, deed.replica, deed.rank)},
                     {"pid", row("demo")},
                     {"tid", 1},
                     {"ts", us(deed.t)}});
  std::ofstream out(path);
  out << nlohmann::json{{"traceEvents", trace}, {"displayTimeUnit", "ms"}}.dump() << "\n";
  if (!out.flush()) return fail(ErrorCode::io, "can't write the trace to {}", path);
  return {};
}

}  // namespace rejoin::demo
