#include "daemon/trace.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/fail.h"

namespace rejoin::daemon {

namespace {

// The phases of a step, by the event that ends each. A phase begins where the one before it has ended, in the same
// process; without a beginning (the file was opened in the middle of a step) there is no span.
const std::map<std::string, std::string> kPhases = {
    {"computed", "compute"}, {"exchanged", "exchange"}, {"committed", "commit"}, {"updated", "update"}};

bool is_event(const nlohmann::json& line) {
  return line.is_object() && line.contains("t") && line.at("t").is_number() && line.contains("kind") &&
         line.at("kind").is_string();
}

class Row {
 public:
  Row(int number, nlohmann::json& trace) : number_(number), trace_(trace) {}
  void add(nlohmann::json event) {
    const double at = event.at("t").get<double>() * 1e-3;
    const std::string kind = event.at("kind").get<std::string>();
    for (const char* key : {"t", "who", "kind"}) event.erase(key);
    if (kind == "step") return void(begun_ = at);
    const auto phase = kPhases.find(kind);
    if (phase == kPhases.end() || !begun_)
      return trace_.push_back(
          {{"ph", "i"}, {"s", "p"}, {"name", kind}, {"pid", number_}, {"tid", 1}, {"ts", at}, {"args", event}});
    std::string name = phase->second;
    if (event.contains("step")) name.append(" ").append(event.at("step").dump());
    trace_.push_back({{"ph", "X"},
                      {"name", name},
                      {"pid", number_},
                      {"tid", 1},
                      {"ts", *begun_},
                      {"dur", at - *begun_},
                      {"args", event}});
    begun_ = at;
  }

 private:
  const int number_;
  nlohmann::json& trace_;
  std::optional<double> begun_;  // the phase under way
};

}  // namespace

Result<int> merge_trace(const std::string& directory, const std::string& output) {
  nlohmann::json trace = nlohmann::json::array();
  int rows = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
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
  }
  if (error) return fail(ErrorCode::not_found, "event directory {}: {}", directory, error.message());
  if (rows == 0)
    return fail(ErrorCode::not_found, "no events in {}; start daemons and trainers with --events", directory);
  std::ofstream out(output);
  out << nlohmann::json{{"traceEvents", trace}, {"displayTimeUnit", "ms"}}.dump() << "\n";
  if (!out.flush()) return fail(ErrorCode::io, "can't write {}", output);
  return rows;
}

}  // namespace rejoin::daemon
