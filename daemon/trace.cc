#include "daemon/trace.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/fail.h"
#include "base/step_phases.h"

namespace rejoin::daemon {

namespace {

bool is_event(const nlohmann::json& line) {
  return line.is_object() && line.contains("t") && line.at("t").is_number() && line.contains("kind") &&
         line.at("kind").is_string();
}

class Row {
 public:
  Row(int number, nlohmann::json& trace) : number_(number), trace_(trace) {}
  void add(nlohmann::json event) {
    const auto at = event.at("t").get<std::int64_t>();
    const std::string kind = event.at("kind").get<std::string>();
    for (const char* key : {"t", "who", "kind"}) event.erase(key);
    const auto phase = phases_.ended_by(kind, at);
    if (StepPhases::begins(kind)) return;
    if (!phase)
      return trace_.push_back(
          {{"ph", "i"}, {"s", "p"}, {"name", kind}, {"pid", number_}, {"tid", 1}, {"ts", us(at)}, {"args", event}});
    std::string name(phase->name);
    if (event.contains("step")) name.append(" ").append(event.at("step").dump());
    trace_.push_back({{"ph", "X"},
                      {"name", name},
                      {"pid", number_},
                      {"tid", 1},
                      {"ts", us(phase->begun)},
                      {"dur", us(phase->ended - phase->begun)},
                      {"args", event}});
  }

 private:
  static double us(std::int64_t ns) { return static_cast<double>(ns) * 1e-3; }
  const int number_;
  nlohmann::json& trace_;
  StepPhases phases_;
};

// A few of them, for a message.
std::string some_of(std::vector<std::string> names) {
  constexpr std::size_t most = 5;
  std::sort(names.begin(), names.end());
  const std::size_t more = names.size() - std::min(names.size(), most);
  names.resize(names.size() - more);
  return fmt::format("{}{}", fmt::join(names, ", "), more == 0 ? "" : fmt::format(" and {} more", more));
}

}  // namespace

Result<int> merge_trace(const std::string& directory, const std::string& output) {
  nlohmann::json trace = nlohmann::json::array();
  int rows = 0;
  std::error_code error;
  std::vector<std::string> without;  // files that hold no event
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    without.push_back(entry.path().filename().string());
    if (entry.path().extension() != ".jsonl") continue;
    std::optional<Row> row;
    std::ifstream in(entry.path());
    for (std::string line; std::getline(in, line);) {
      auto event = nlohmann::json::parse(line, nullptr, false);
      if (!is_event(event)) continue;  // the last line of a killed process
      if (!row) {
        row.emplace(++rows, trace);
        trace.push_back(
            {{"ph", "M"}, {"name", "process_name"}, {"pid", rows}, {"args", {{"name", entry.path().stem().string()}}}});
      }
      row->add(std::move(event));
    }
    if (row) without.pop_back();
  }
  if (error) return fail(ErrorCode::not_found, "event directory {}: {}", directory, error.message());
  if (rows == 0)
    return fail(ErrorCode::not_found,
                "no events in {}{}; start daemons and trainers with --events, and give their directory here", directory,
                without.empty() ? ": it has no file" : fmt::format(": none is in {}", some_of(without)));
  std::ofstream out(output);
  out << nlohmann::json{{"traceEvents", trace}, {"displayTimeUnit", "ms"}}.dump() << "\n";
  if (!out.flush()) return fail(ErrorCode::io, "can't write {}", output);
  return rows;
}

}  // namespace rejoin::daemon
