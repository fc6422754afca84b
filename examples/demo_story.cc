#include "examples/demo_story.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "examples/demo_leads.h"

namespace rejoin::demo {

namespace {

std::optional<RankName> rank_of(const std::string& who) {  // "r1.0"
  RankName rank;
  if (std::sscanf(who.c_str(), "r%u.%u", &rank.replica, &rank.rank) != 2) return std::nullopt;
  return rank;
}

double quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<std::size_t>(q * static_cast<double>(values.size())))];
}

}  // namespace

std::vector<Event> Story::read() {
  std::vector<Event> fresh;
  std::error_code gone;
  for (const auto& entry : std::filesystem::directory_iterator(directory_, gone)) {
    if (entry.path().extension() != ".jsonl") continue;
    const std::string path = entry.path();
    std::ifstream in(path);
    in.seekg(static_cast<std::streamoff>(offsets_[path]));
    // "WHO.PID.jsonl"
    const std::string stem = entry.path().stem();
    const int pid = std::atoi(stem.substr(stem.rfind('.') + 1).c_str());
    for (std::string line; std::getline(in, line);) {
      if (in.eof()) break;  // half a line: the rest comes later
      offsets_[path] += line.size() + 1;
      auto json = nlohmann::json::parse(line, nullptr, false);
      if (json.is_discarded()) continue;
      const auto name = names_.find(pid);
      fresh.push_back({json.value("t", std::int64_t{0}), name == names_.end() ? json.value("who", "") : name->second,
                       json.value("kind", ""), pid, std::move(json)});
    }
  }
  std::stable_sort(fresh.begin(), fresh.end(), [](const Event& a, const Event& b) { return a.t < b.t; });
  for (const auto& event : fresh) take(event);
  events_.insert(events_.end(), fresh.begin(), fresh.end());
  return fresh;
}

void Story::undone(const std::string& kind, std::int64_t t) {
  const auto last = std::find_if(deeds_.rbegin(), deeds_.rend(), [&](const Deed& deed) { return deed.kind == kind; });
  if (last != deeds_.rend()) last->until = t;
}

void Story::take(const Event& event) {
  // A coordinator may be killed when the trainers know already, and it has not said so.
  if (event.kind == "commit" || event.kind == "committed") committed_ = std::max(committed_, event.number("step"));
  if (event.kind == "epoch") {
    for (auto& [id, replica] : replicas_) replica.role = "out";
    std::string members = event.fields.value("members", "") + ",";
    for (std::size_t at = 0, comma; (comma = members.find(',', at)) != std::string::npos; at = comma + 1) {
      const std::string one = members.substr(at, comma - at);
      if (!one.empty())
        replicas_[static_cast<std::uint32_t>(std::stoul(one))].role = one.back() == 'c' ? "catching up" : "contributor";
    }
  }
  if (event.kind == "catch_up") {
    auto& state = replicas_[static_cast<std::uint32_t>(event.number("replica"))]
                      .catch_up[static_cast<std::uint32_t>(event.number("rank"))];
    state = {event.number("bytes"), event.number("total"), event.fields.value("rate", 0.0), event.number("sources")};
  }
  const auto rank = rank_of(event.who);
  if (!rank) return;
  if (event.kind == "progress") {
    auto& replica = replicas_[rank->replica];
    replica.version = event.number("step");
    if (event.fields.value("contributes", false)) {
      replica.loss = event.fields.value("loss", 0.0);
      loss_[event.number("step")][event.who] = replica.loss;
    }
  }
}

std::vector<std::pair<std::uint64_t, double>> Story::losses() const {
  std::vector<std::pair<std::uint64_t, double>> curve;
  for (const auto& [step, by_rank] : loss_) {
    double sum = 0;
    for (const auto& [who, loss] : by_rank) sum += loss;
    curve.emplace_back(step, sum / static_cast<double>(by_rank.size()));
  }
  return curve;
}

// From the deed until every survivor has seen the interrupted step committed. The trainers' own computing does not
// count: the clock starts at the deed or when the last survivor has finished its backward, whichever is later.
nlohmann::json Story::failure(const Deed& deed) const {
  std::int64_t detected = 0, computed = deed.t, resumed = 0;
  std::map<std::string, int> computations;
  for (const auto& event : events_) {
    const auto rank = rank_of(event.who);
    const bool survivor = rank && rank->replica != deed.replica;
    if (event.t >= deed.t && detected == 0 &&
        ((event.kind == "rank_down" && event.number("replica") == deed.replica) ||
         (event.kind == "epoch" && event.t > deed.t)))
      detected = event.t;
    if (survivor && event.kind == "computed" && event.number("step") == deed.step) {
      computed = std::max(computed, event.t);
      ++computations[fmt::format("{} {}", event.who, event.pid)];
    }
    if (survivor && event.kind == "committed" && event.number("step") == deed.step)
      resumed = std::max(resumed, event.t);
  }
  int recomputed = 0;
  for (const auto& [who, count] : computations) recomputed += count - 1;
  return {{"kind", deed.kind},
          {"replica", deed.replica},
          {"rank", deed.rank},
          {"step", deed.step},
          {"detected_ms", detected == 0 ? -1.0 : ms(detected - deed.t)},
          {"resumed_ms", resumed == 0 ? -1.0 : ms(resumed - computed)},
          {"with_compute_ms", resumed == 0 ? -1.0 : ms(resumed - deed.t)},
          {"recomputed_steps", recomputed}};
}

nlohmann::json Story::catch_ups() const {
  nlohmann::json all = nlohmann::json::array();
  std::map<std::pair<std::uint64_t, std::uint64_t>, nlohmann::json> open;  // replica, rank
  for (const auto& event : events_) {
    const std::pair key(event.number("replica"), event.number("rank"));
    if (event.kind == "catch_up_started")
      open[key] = {{"replica", key.first}, {"rank", key.second}, {"started_step", event.number("step")}};
    if (!open.contains(key)) continue;
    if (event.kind == "catch_up")
      open[key].update({{"bytes", event.number("bytes")},
                        {"seconds", event.fields.value("seconds", 0.0)},
                        {"sources", event.number("sources")},
                        {"refetched", event.number("refetched")}});
    if (event.kind == "promoted") {
      open[key]["promoted_step"] = event.number("step");
      all.push_back(open.extract(key).mapped());
    }
  }
  return all;
}

nlohmann::json Story::step_times() const {
  std::vector<double> quiet, during, all;
  std::set<std::pair<std::uint64_t, std::uint64_t>> joining;
  std::int64_t last = 0;
  for (const auto& event : events_) {
    if (event.kind == "catch_up_started") joining.insert({event.number("replica"), event.number("rank")});
    if (event.kind == "promoted" || event.kind == "rank_down")
      joining.erase({event.number("replica"), event.number("rank")});
    if (event.kind != "commit") continue;
    if (last != 0) {
      all.push_back(ms(event.t - last));
      (joining.empty() ? quiet : during).push_back(all.back());
    }
    last = event.t;
  }
  return {{"median", quantile(quiet, 0.5)},
          {"p99", quantile(all, 0.99)},
          {"max", quantile(all, 1.0)},
          {"median_during_catch_up", quantile(during, 0.5)}};
}

nlohmann::json Story::report(const JobSettings& settings, const std::map<std::string, std::string>& logs) const {
  nlohmann::json json{{"replicas", settings.replicas},
                      {"ranks", settings.ranks},
                      {"steps_committed", committed_},
                      {"params", settings.parameters}};
  const std::int64_t start = events_.empty() ? 0 : events_.front().t;
  json["events"] = nlohmann::json::array();
  for (const auto& deed : deeds_)
    json["events"].push_back({{"t_ms", ms(deed.t - start)},
                              {"kind", deed.kind},
                              {"replica", deed.replica},
                              {"rank", deed.rank},
                              {"step", deed.step},
                              {"who", deed.who}});
  for (const auto& event : events_) {
    if (event.kind != "epoch" && event.kind != "rank_down" && event.kind != "catch_up_started" &&
        event.kind != "promoted" && event.kind != "daemon_lost" && event.kind != "daemon_back" &&
        event.kind != "finished" && event.kind != "leader" && event.kind != "standby")
      continue;
    nlohmann::json entry{{"t_ms", ms(event.t - start)},
                         {"kind", event.kind},
                         {"replica", event.number("replica")},
                         {"rank", event.number("rank")},
                         {"step", event.number("step")}};
    if (event.fields.contains("reason")) entry["reason"] = event.fields.at("reason");
    if (event.fields.contains("members")) entry["members"] = event.fields.at("members");
    if (event.fields.contains("term")) entry["who"] = event.who, entry["term"] = event.number("term");
    if (const auto rank = rank_of(event.who)) entry["replica"] = rank->replica, entry["rank"] = rank->rank;
    json["events"].push_back(std::move(entry));
  }
  std::stable_sort(json["events"].begin(), json["events"].end(),
                   [](const auto& a, const auto& b) { return a.at("t_ms") < b.at("t_ms"); });
  json["failures"] = nlohmann::json::array();
  for (const auto& deed : deeds_) {
    json["failures"].push_back(failure(deed));
    if (settings.several()) json["failures"].back().update(what_it_cost(deed, deeds_, events_));
  }
  json["catch_ups"] = catch_ups();
  json["step_ms"] = step_times();
  // As trainers enter each epoch: how many connections they have at most, and how many they lack in all.
  std::map<std::uint64_t, std::pair<std::uint64_t, std::uint64_t>> links;
  for (const auto& event : events_)
    if (event.kind == "links") {
      auto& [most, missing] = links[event.number("epoch")];
      most = std::max(most, event.number("connections"));
      missing += event.number("missing");
    }
  json["links"] = nlohmann::json::array();
  for (const auto& [epoch, of] : links)
    json["links"].push_back({{"epoch", epoch}, {"most", of.first}, {"missing", of.second}});

  // The last report of each rank: its version and digest when it ended.
  std::map<std::uint32_t, std::map<std::uint32_t, std::pair<std::uint64_t, std::string>>> digests;
  for (const auto& event : events_)
    if (const auto rank = rank_of(event.who); rank && event.kind == "digest")
      digests[rank->replica][rank->rank] = {event.number("version"), event.fields.value("digest", "")};
  // A replica that was lost so late that it could not come back before the end has no digest at the last version.
  bool same = true;
  std::optional<std::map<std::uint32_t, std::pair<std::uint64_t, std::string>>> first;
  json["digests"] = nlohmann::json::object();
  json["absent"] = nlohmann::json::array();
  for (std::uint32_t replica = 0; replica < settings.replicas; ++replica) {
    const auto& ranks = digests[replica];
    const bool there = ranks.size() == settings.ranks && std::all_of(ranks.begin(), ranks.end(), [&](const auto& r) {
                         return r.second.first == committed_;
                       });
    if (!there) {
      json["absent"].push_back(replica);
      continue;
    }
    if (!first) first = ranks;
    same = same && ranks == *first;
    for (const auto& [rank, digest] : ranks) json["digests"][std::to_string(replica)].push_back(digest.second);
  }
  json["same_bits"] = same && first.has_value();

  json.update(audit_of(logs, committed_));
  const auto curve = losses();
  if (!curve.empty()) {
    const auto mean_of = [&](std::size_t from, std::size_t to) {  // single steps are noisy
      double sum = 0;
      for (std::size_t i = from; i < to; ++i) sum += curve[i].second;
      return sum / static_cast<double>(to - from);
    };
    const std::size_t window = std::min<std::size_t>(10, curve.size());
    json["loss"] = {{"first", curve.front().second}, {"last", mean_of(curve.size() - window, curve.size())}};
  }
  return json;
}

}  // namespace rejoin::demo
