#include "daemon/overview.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/release.h"
#include "base/text.h"
#include "daemon/versions_report.h"

namespace rejoin::daemon {

namespace {

using nlohmann::json;

constexpr std::size_t kMostRows = 32, kLongestText = 400;

std::int64_t ms(Duration d) { return std::chrono::duration_cast<std::chrono::milliseconds>(d).count(); }

std::int64_t ms_since_1970(TimePoint then, TimePoint now) {
  return ms(std::chrono::system_clock::now().time_since_epoch() - (now - then));
}

json shortened_texts(json value) {
  if (value.is_string()) return shortened(value.get<std::string>(), kLongestText);
  for (auto& inner : value)
    if (inner.is_string() || inner.is_structured()) inner = shortened_texts(std::move(inner));
  return value;
}

// The first rows of a list, and how many there are.
void put_rows(json& into, const char* key, const json& rows, std::size_t most = kMostRows) {
  json first = json::array();
  for (const auto& row : rows) {
    if (first.size() == most) break;
    first.push_back(shortened_texts(row));
  }
  into[key] = {{"rows", std::move(first)}, {"count", rows.size()}};
}

// The most first.
void sort_by(json& rows, const char* key) {
  std::sort(rows.begin(), rows.end(),
            [key](const json& one, const json& other) { return one.at(key) > other.at(key); });
}

// cccc..j as 4c2.1j
std::string run_lengths(const std::string& states) {
  std::string text;
  for (std::size_t i = 0; i < states.size();) {
    const std::size_t end = std::min(states.find_first_not_of(states[i], i), states.size());
    text += fmt::format("{}{}", end - i, states[i]);
    i = end;
  }
  return text;
}

json steps_of(const JobHistory& history) {
  json took = json::array(), broken = json::array();
  for (const auto& row : history.steps()) {
    took.push_back(row.took ? json(std::round(seconds(*row.took) * 1e5) / 1e5) : json());
    if (row.broken > 0) broken.push_back(row.step);
  }
  const auto first = history.steps().empty() ? 0 : history.steps().front().step;
  return {{"first", first}, {"seconds", std::move(took)}, {"broken", std::move(broken)}};
}

json epochs_of(const JobHistory& history, TimePoint now) {
  json epochs = json::array();
  for (const auto& row : history.epochs()) {
    json epoch{{"epoch", row.epoch},
               {"step", row.step},
               {"cause", JobHistory::name(row.cause)},
               {"reason", row.reason},
               {"states", run_lengths(row.states)}};
    if (row.at) epoch["at_ms"] = ms_since_1970(*row.at, now);
    epochs.push_back(std::move(epoch));
  }
  return epochs;
}

// What daemons have told of streams, hops and rails; the slowest first.
void put_reports(json& into, const JobHistory& history, TimePoint now) {
  json streams = json::array(), hops = json::array(), rails = json::array();
  std::vector<proto::Rail> all_rails;
  const auto reports = history.reports(now);
  for (const auto* one : reports) {
    const auto& report = one->report;
    if (report.has_stream())
      streams.push_back({{"replica", report.replica()},
                         {"node", report.node()},
                         {"bytes", report.stream().bytes()},
                         {"total_bytes", report.stream().total_bytes()},
                         {"bytes_per_second", report.stream().bytes_per_second()},
                         {"slices", report.stream().slices()},
                         {"verified", report.stream().verified()},
                         {"refetched", report.stream().refetched()},
                         {"sources", report.stream().sources()},
                         {"from_joiners", report.stream().from_joiners()},
                         {"passed_on", report.passed_on()}});
    if (report.has_slowest())
      hops.push_back({{"replica", report.replica()},
                      {"node", report.node()},
                      {"rank", report.slowest().rank()},
                      {"from", report.slowest().from()},
                      {"gap_us", report.slowest().gap_us()},
                      {"bytes_per_second", report.slowest().bytes_per_second()}});
    all_rails.resize(std::max(all_rails.size(), static_cast<std::size_t>(report.rails_size())));
    for (int i = 0; i < report.rails_size(); ++i) {
      const auto& rail = report.rails(i);
      auto& sum = all_rails[static_cast<std::size_t>(i)];
      sum.set_peers(sum.peers() + rail.peers());
      sum.set_up(sum.up() + rail.up());
      if (rail.up() < rail.peers())
        rails.push_back({{"replica", report.replica()},
                         {"node", report.node()},
                         {"rail", i},
                         {"peers", rail.peers()},
                         {"up", rail.up()}});
    }
  }
  sort_by(hops, "gap_us");
  put_rows(into, "streams", streams);
  put_rows(into, "hops", hops);
  put_rows(into, "rails_down", rails);
  into["rails"] = json::array();
  for (const auto& rail : all_rails) into["rails"].push_back({{"peers", rail.peers()}, {"up", rail.up()}});
  into["told"] = reports.size();
}

// Where members are, and who of them is near whom, as far as anybody tells of either: in the ring's order.
void put_locations(json& into, const json& c) {
  json located = json::array(), near = json::array();
  for (const auto& one : c.at("neighbourhoods"))
    near.push_back(fmt::format("{}", fmt::join(one.get<std::vector<std::uint32_t>>(), " ")));
  for (const auto& m : c.at("members")) {
    json member{{"replica", m.at("replica")}, {"catches_up", m.at("role") == "catching_up"}};
    if (m.contains("location")) member["location"] = m.at("location");
    if (m.contains("round_trip_us") && !near.empty()) member["round_trip_us"] = m.at("round_trip_us");
    located.push_back(std::move(member));
  }
  const auto tells = [](const json& member) { return member.size() > 2; };
  if (std::none_of(located.begin(), located.end(), tells)) located = json::array();
  put_rows(into, "locations", located);
  put_rows(into, "neighbourhoods", near);
}

// In a word, the first that applies.
const char* state_of(const json& c, const JobHistory& history, TimePoint now) {
  if (!c.at("store").at("leads").get<bool>()) return "standby";
  if (c.at("finished").get<bool>()) return "finished";
  if (c.at("stopped") != "") return "stopped";
  if (c.contains("wants_roll_back_to")) return "wants roll back";
  if (!c.at("blocked_on").empty()) return "blocked";
  if (c.at("store").value("stalled", false)) return "stalled";
  if (c.at("epoch") == 0) return "not started";
  const auto at = history.last_commit();
  if (history.states().find(JobHistory::kContributes) == std::string::npos) return "waiting";
  if (at && now - *at > std::max<Duration>(10 * history.usual_step(), std::chrono::seconds(2))) return "waiting";
  return at && history.median_step() ? "training" : "starting";
}

void put_training(json& into, const json& c, const JobHistory& history, TimePoint now) {
  const bool running = !c.at("finished").get<bool>() && c.at("store").at("leads").get<bool>();
  json t{{"state", state_of(c, history, now)}};
  if (const auto at = history.last_commit()) t["since_commit_ms"] = ms(now - *at);
  if (const auto median = history.median_step()) t["median_seconds"] = seconds(*median);
  if (const auto rate = history.steps_per_second()) t["steps_per_second"] = *rate;
  if (const auto absence = history.median_absence()) t["absence_seconds"] = seconds(*absence);
  const auto effective = history.effective(now, running);
  if (effective.total > Duration{}) {
    const double share = 1 - seconds(effective.lost) / seconds(effective.total);
    t["effective"] = share;
    t["of_replicas"] = share * effective.replica_seconds / seconds(effective.total) /
                       static_cast<double>(std::max<std::size_t>(history.states().size(), 1));
    t["seconds"] = seconds(effective.total);
    t["lost_seconds"] = seconds(effective.lost);
  }
  if (const auto& failure = history.last_failure()) {
    json f{{"epoch", failure->epoch},
           {"step", failure->step},
           {"cause", JobHistory::name(failure->cause)},
           {"reason", failure->reason},
           {"at_ms", ms_since_1970(failure->at, now)}};
    if (failure->recovery) f["recovery_seconds"] = seconds(*failure->recovery);
    if (failure->cost) f["cost_seconds"] = seconds(*failure->cost);
    t["last_failure"] = std::move(f);
  }
  into["training"] = std::move(t);
}

json of_coordinator(const json& c, const JobHistory& history, TimePoint now) {
  json o;
  for (const char* key : {"job", "epoch", "committed", "finished", "nodes", "stopped", "store", "audit", "balance"})
    o[key] = shortened_texts(c.at(key));
  if (c.contains("versions") && c.at("versions").at("mixed").get<bool>())
    o["mixed"] = shortened(versions_line(c.at("versions")), kLongestText);
  for (const char* key : {"wants_roll_back_to", "roll_back_word"})
    if (c.contains(key)) o[key] = c.at(key);
  o["replicas"] = history.states().size();
  o["states"] = run_lengths(history.states());
  put_training(o, c, history, now);
  for (const char* key : {"out", "waiting_for", "alarms", "refused", "blocked_on", "stragglers"})
    put_rows(o, key, c.at(key));
  put_reports(o, history, now);
  put_locations(o, c);
  o["orders_by_round_trips"] = c.at("orders_by_round_trips");
  o["steps"] = steps_of(history);
  o["epochs"] = epochs_of(history, now);
  return o;
}

json of_node(const json& n) {
  json o{{"name", shortened_texts(n.at("node"))}, {"coordinator", shortened_texts(n.at("coordinator"))}};
  for (const char* key : {"epoch", "committed", "bytes_served", "page"}) o[key] = n.at(key);
  json ranks = json::array();
  for (const auto& rank : n.at("ranks")) {
    if (ranks.size() == kMostRows) break;
    json row = rank;
    auto& hops = row.at("hops");
    sort_by(hops, "recent_gap_us");
    if (hops.size() > 8) hops.erase(hops.begin() + 8, hops.end());
    ranks.push_back(std::move(row));
  }
  o["ranks"] = {{"rows", std::move(ranks)}, {"count", n.at("ranks").size()}};
  put_rows(o, "gone", n.at("gone"));
  put_rows(o, "serving", n.at("serving"));
  return o;
}

}  // namespace

json overview(const json& status, const JobHistory* history, TimePoint now) {
  json o{{"version", release()}};
  if (status.contains("coordinator_role") && history != nullptr)
    o["coordinator"] = of_coordinator(status.at("coordinator_role"), *history, now);
  if (status.contains("relay_role")) o["relay"] = shortened_texts(status.at("relay_role"));
  if (status.contains("node_role")) o["node"] = of_node(status.at("node_role"));
  return o;
}

}  // namespace rejoin::daemon
