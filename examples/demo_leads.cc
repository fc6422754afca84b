#include "examples/demo_leads.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "base/bytes.h"
#include "membership/log.h"

namespace rejoin::demo {

namespace {

constexpr std::int64_t kEver = INT64_MAX;

nlohmann::json leads_in(const std::vector<proto::LogRecord>& records) {
  nlohmann::json leads = nlohmann::json::array();
  std::uint64_t step = 0;
  for (const auto& record : records) {
    if (record.has_committed()) step = record.committed().step();
    if (record.has_led())
      leads.push_back({{"who", record.led().name()}, {"term", record.led().term()}, {"after_step", step}});
  }
  return leads;
}

std::set<std::string> members_of(const Event& epoch) {
  std::set<std::string> members;
  for (std::string one : split(epoch.fields.value("members", ""), ',')) {
    if (one.ends_with('c')) one.pop_back();
    members.insert(one);
  }
  return members;
}

// Between the commits of two steps, as the last trainer has heard of them: of those that were under way between `from`
// and `to`, the first two and all.
std::pair<double, double> longest_step(const std::vector<Event>& events, std::int64_t from, std::int64_t to) {
  std::map<std::uint64_t, std::int64_t> commits;
  for (const auto& event : events)
    if (event.kind == "committed") commits[event.number("step")] = std::max(commits[event.number("step")], event.t);
  std::int64_t of_two = 0, of_all = 0, before = 0;
  int steps = 0;
  for (const auto& [step, t] : commits) {
    const std::int64_t begun = std::exchange(before, t);
    if (begun == 0 || t <= from || begun >= to) continue;
    of_all = std::max(of_all, t - begun);
    if (++steps <= 2) of_two = of_all;
  }
  return {ms(of_two), ms(of_all)};
}

nlohmann::json put_out(const std::vector<Event>& events, std::int64_t from, std::int64_t to) {
  std::set<std::string> members, out;
  for (const auto& event : events) {
    if ((event.kind != "epoch" && event.kind != "recovered") || event.t > to) continue;
    const auto now = members_of(event);
    if (event.t > from)
      for (const auto& member : members)
        if (!now.contains(member)) out.insert(member);
    members = now;
  }
  return out;
}

// What it committed after it had gone on and before it led again, and others had.
std::uint64_t decided_late(const std::vector<Event>& events, const Deed& deed) {
  std::uint64_t first = 0, decided = 0;
  for (const auto& event : events) {
    if (event.t <= deed.t) continue;
    if (event.kind == "leader" && event.who == deed.who) break;
    if (event.kind != "commit") continue;
    if (event.who != deed.who && first == 0) first = event.number("step");
    if (event.who == deed.who && first != 0 && event.number("step") >= first) ++decided;
  }
  return decided;
}

}  // namespace

nlohmann::json audit_of(const std::map<std::string, std::string>& logs, std::uint64_t committed) {
  nlohmann::json json;
  for (const auto& [name, path] : logs) {
    nlohmann::json ledger{{"samples", 0}, {"once", 0}, {"lost", 0}, {"repeated", 0}};
    const auto records = membership::read_log(path);
    const auto steps = records ? membership::trained_by_step(*records) : std::map<std::uint64_t, membership::Batch>{};
    const std::uint64_t last = steps.empty() ? 0 : steps.rbegin()->first;
    if (records) {
      const auto audit = membership::audit(steps);
      ledger = {{"samples", audit.samples}, {"once", audit.once}, {"lost", audit.lost}, {"repeated", audit.repeated}};
    } else {  // no proof: the caller must not take it for one
      ledger["error"] = records.error().message;
    }
    if (logs.size() > 1) {
      json["copies"][name] = ledger;
      json["copies"][name]["last_step"] = last;
    }
    if (!json.contains("ledger")) json["ledger"] = ledger;
    if (!records || json.contains("rolled_back_steps") || (logs.size() > 1 && last != committed)) continue;
    json["ledger"] = ledger;
    json["rolled_back_steps"] = membership::rolled_back(*records).steps;
    if (logs.size() > 1) json["leads"] = leads_in(*records);
  }
  if (logs.size() > 1 && !json.contains("leads"))
    json["ledger"]["error"] = fmt::format("no coordinator's log goes on to step {}", committed);
  return json;
}

nlohmann::json what_it_cost(const Deed& deed, const std::vector<Deed>& deeds, const std::vector<Event>& events) {
  std::int64_t to = kEver;
  for (const auto& other : deeds)
    if (other.t > deed.t) to = std::min(to, other.t);
  const auto [met, longest] = longest_step(events, deed.t, to);
  nlohmann::json json{
      {"who", deed.who}, {"met_step_ms", met}, {"longest_step_ms", longest}, {"put_out", put_out(events, deed.t, to)}};
  const auto next = std::find_if(events.begin(), events.end(), [&](const Event& event) {
    return event.kind == "leader" && event.t > deed.t && event.t < to;
  });
  if (next != events.end())
    json["next_leader"] = {{"who", next->who}, {"term", next->number("term")}, {"after_ms", ms(next->t - deed.t)}};
  if (deed.until != 0) json["away_ms"] = ms(deed.until - deed.t);
  if (deed.kind == "pause_leader") {
    json["decided_late"] = decided_late(events, deed);
    json["follows"] = std::any_of(events.begin(), events.end(), [&](const Event& event) {
      return event.kind == "standby" && event.who == deed.who && event.t > deed.t;
    });
  }
  return json;
}

std::string cost_line(const nlohmann::json& failure) {
  std::string line = fmt::format(
      "  {} ({}) at step {}: the step that it met took {:.1f} ms, the longest from then on "
      "{:.1f}; ",
      failure.at("kind").get<std::string>(), failure.at("who").get<std::string>(), failure.at("step").get<int>(),
      failure.at("met_step_ms").get<double>(), failure.at("longest_step_ms").get<double>());
  if (failure.contains("next_leader")) {
    const auto& next = failure.at("next_leader");
    line += fmt::format("{} led after {:.1f} ms, in term {}; ", next.at("who").get<std::string>(),
                        next.at("after_ms").get<double>(), next.at("term").get<int>());
  }
  if (failure.contains("away_ms")) line += fmt::format("back after {:.0f} ms; ", failure.at("away_ms").get<double>());
  if (failure.value("follows", false))
    line +=
        fmt::format("it went on as one that follows, and decided {}; ",
                    failure.at("decided_late") == 0 ? "nothing" : failure.at("decided_late").dump() + " STEPS AGAIN");
  const auto out = failure.at("put_out").get<std::vector<std::string>>();
  return line +
         (out.empty() ? std::string("nobody was put out\n") : fmt::format("put out: {}\n", fmt::join(out, ", ")));
}

std::string proof_lines(const nlohmann::json& report) {
  if (!report.contains("copies")) return "";
  std::string text;
  for (const auto& [name, copy] : report.at("copies").items())
    text += copy.contains("error")
                ? fmt::format("  {}'s log: {}\n", name, copy.at("error").get<std::string>())
                : fmt::format("  {}'s log: up to step {}, {} samples trained once, {} lost, {} repeated\n", name,
                              copy.at("last_step").get<std::uint64_t>(), copy.at("once").get<std::uint64_t>(),
                              copy.at("lost").get<std::uint64_t>(), copy.at("repeated").get<std::uint64_t>());
  std::vector<std::string> leads;
  for (const auto& lead : report.value("leads", nlohmann::json::array()))
    leads.push_back(fmt::format("{} in term {}, after step {}", lead.at("who").get<std::string>(),
                                lead.at("term").get<int>(), lead.at("after_step").get<int>()));
  text += fmt::format("  who led: {}\n", fmt::join(leads, "; "));
  if (const auto write = report.value("write_us", nlohmann::json()); !write.is_null())
    text += fmt::format("  a decision was in etcd after {:.2f} ms ({} writes by {}), {:.2f} ms at most\n",
                        write.at("mean").get<double>() * 1e-3, write.at("count").get<int>(),
                        write.at("who").get<std::string>(), write.at("longest").get<double>() * 1e-3);
  return text;
}

bool sound(const nlohmann::json& report) {
  if (!report.contains("copies")) return true;
  for (const auto& [name, copy] : report.at("copies").items())
    if (copy.contains("error") || copy.at("lost") != 0 || copy.at("repeated") != 0 ||
        copy.at("last_step") != report.at("steps_committed"))
      return false;
  for (const auto& failure : report.at("failures"))
    if (failure.value("decided_late", 0) != 0) return false;
  return true;
}

}  // namespace rejoin::demo
