#include "daemon/coordinator_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/events.h"
#include "base/fail.h"
#include "base/flight.h"
#include "base/location.h"
#include "base/log.h"
#include "base/refusals.h"
#include "daemon/clock_stamp.h"
#include "daemon/versions_report.h"

namespace rejoin::daemon {

namespace {

// As events name them: 0,1,2c
void add_member(std::string& members, std::uint64_t replica, bool catching_up) {
  members += fmt::format("{}{}{}", members.empty() ? "" : ",", replica, catching_up ? "c" : "");
}

}  // namespace

void emit_events(const std::vector<proto::LogRecord>& records) {
  for (const auto& record : records) {
    if (record.has_committed())
      events::record(events::Kind::commit, {.epoch = record.committed().epoch(), .step = record.committed().step()});
    if (record.has_rolled_back())
      events::record(events::Kind::rolled_back,
                     {.a = record.rolled_back().from(), .b = record.rolled_back().version()});
    if (record.has_stopped()) {
      spdlog::critical("the job stops after step {}: {}", record.stopped().step(), record.stopped().reason());
      events::record(events::Kind::stopped, {.step = record.stopped().step()}, record.stopped().reason());
    }
    if (record.has_epoch()) {
      std::string members;
      for (const auto& m : record.epoch().members()) add_member(members, m.replica(), m.catching_up());
      events::record(events::Kind::epoch, {.epoch = record.epoch().epoch(), .step = record.epoch().step()},
                     members + "\n" + record.epoch().reason());
    }
  }
}

void emit_recovered(const membership::Coordinator& machine) {
  if (!machine.started()) return;
  std::string members;
  for (const auto& m : machine.members()) add_member(members, m.replica.value, m.catching_up);
  flight::set_job(machine.job());
  events::record(events::Kind::recovered, {.epoch = machine.epoch().value, .step = machine.committed().value + 1},
                 members + "\n");
}

void send_all(NodeListener& nodes, const std::vector<std::pair<std::vector<membership::NodeId>, proto::ToNode>>& send,
              const std::vector<membership::NodeId>& close, const std::string& page) {
  for (const auto& [to, message] : send) {
    std::string bytes;
    if (message.has_registered()) {
      proto::ToNode with_page = message;
      with_page.mutable_registered()->set_page(page);
      bytes = with_page.SerializeAsString();
    } else {
      bytes = message.SerializeAsString();
    }
    if (message.has_heartbeat() || message.has_leads()) stamp(bytes);
    if (message.has_refused()) refusals::count(static_cast<refusals::Why>(message.refused().why()));
    if (message.has_plan()) flight::set_job(message.plan().job());
    // Before anybody hears it and acts on it: this process may be killed in between.
    if (message.has_plan() && message.plan().finished()) events::record(events::Kind::finished);
    for (auto node : to) nodes.send(node, bytes);
  }
  for (auto node : close) nodes.close(node);
}

void end_of_deciding(const std::string& why, int status) {
  events::record(events::Kind::ended, {}, why);
  spdlog::critical("{}", why);
  std::_Exit(status);
}

nlohmann::json status_of(const WriteTimes& times) {
  const auto us = [](Duration time) { return std::chrono::duration_cast<std::chrono::microseconds>(time).count(); };
  const auto count = static_cast<std::int64_t>(std::max<std::uint64_t>(times.count, 1));
  return {{"last", us(times.last)},
          {"mean", us(times.total) / count},
          {"longest", us(times.longest)},
          {"count", times.count}};
}

nlohmann::json stragglers_of(const membership::Coordinator& machine, const JobHistory& history, TimePoint now) {
  const auto ms = [](Duration time) { return static_cast<std::uint64_t>(milliseconds(time)); };
  nlohmann::json all = nlohmann::json::array();
  if (machine.finished()) return all;
  for (const auto& one : machine.stragglers())
    all.push_back({{"what", "compute"},
                   {"replica", one.replica.value},
                   {"times", static_cast<double>(one.slower) * 1e-3},
                   {"since_step", one.since.value},
                   {"for_ms", ms(now - one.since_at)}});
  if (const auto slow = machine.slow_link())
    all.push_back({{"what", "link"},
                   {"replica", slow->link.to.value},
                   {"rank", slow->link.rank},
                   {"from", slow->link.from.value},
                   {"below_mb_per_second", mb_of(slow->link.rate)},
                   {"usual_below_mb_per_second", mb_of(slow->usual)},
                   {"times", static_cast<double>(mb_of(slow->usual)) / static_cast<double>(mb_of(slow->link.rate))},
                   {"since_step", slow->since.value},
                   {"for_ms", ms(now - slow->since_at)}});
  if (!all.empty()) return all;  // whoever waits for them finds gaps
  if (const auto hop = history.slow_hop(now))
    all.push_back(
        {{"what", "hop"},
         {"replica", hop->replica},
         {"rank", hop->rank},
         {"from", hop->from},
         {"gap_us", hop->gap_us},
         {"usual_us", hop->usual_us},
         {"times", static_cast<double>(hop->gap_us) / static_cast<double>(std::max<std::uint64_t>(1, hop->usual_us))},
         {"since_step", hop->since_step},
         {"for_ms", ms(now - hop->since)}});
  return all;
}

std::vector<std::string> unreached_of(const membership::Coordinator& machine, const JobHistory& history,
                                      TimePoint now) {
  std::vector<std::string> all;
  for (const auto* one : history.reports(now)) {
    const auto member = std::ranges::find(machine.members(), ReplicaId(one->report.replica()),
                                          [](const membership::MemberState& m) { return m.replica; });
    if (one->report.unreached().empty() || member == machine.members().end() || !member->catching_up) continue;
    all.push_back(fmt::format(
        "replica {} can't catch up: its daemon {} says of {}. It stays out of the steps until that is mended",
        member->replica, one->report.node(), one->report.unreached()));
  }
  return all;
}

nlohmann::json status_of(const membership::Coordinator& machine, const NodeListener& nodes, TimePoint now) {
  nlohmann::json json{{"epoch", machine.epoch().value},
                      {"committed", machine.committed().value},
                      {"job", fmt::format("{:016x}", machine.job())},
                      {"finished", machine.finished()},
                      {"nodes", nodes.nodes()},
                      {"rejected", nodes.rejected()},
                      {"strangers", nodes.strangers()},
                      {"waiting_for", machine.waiting_for(now)}};
  const auto& audit = machine.audit();
  json["audit"] = {{"period", audit.period()},
                   {"rounds", audit.counted().rounds},
                   {"result_differences", audit.counted().result_differences},
                   {"state_differences", audit.counted().state_differences},
                   {"drift_reports", audit.counted().drift_reports},
                   {"last_difference", audit.counted().last}};
  json["versions"] = versions_of(machine);
  json["stopped"] = machine.stopped().value_or("");
  json["members"] = nlohmann::json::array();
  for (const auto& m : machine.members()) {
    const auto* batch = machine.ledger().batch_of(m.replica);
    auto& member = json["members"].emplace_back();
    member = {{"replica", m.replica.value},
              {"incarnation", m.incarnation.value},
              {"role", m.catching_up ? "catching_up" : "contributor"},
              {"has_left", machine.finished() && !machine.replicas().contains(m.replica)},
              {"reduced", m.reduced.size()},
              {"samples", batch == nullptr ? 0 : membership::samples_of(*batch)}};
    if (const auto its = machine.located(m.replica, m.incarnation)) {
      Location all = Location::parse(its->ranks.front()).value_or(Location());
      for (const auto one : its->ranks) all = all.common(Location::parse(one).value_or(Location()));
      member["location"] = all.text();
    }
    if (const auto trips = machine.round_trips(m.replica, m.incarnation); !trips.empty())
      member["round_trip_us"] = {{"nearest", us_of(trips.by_length().front().first)},
                                 {"farthest", us_of(trips.by_length().back().first)}};
    if (const auto pace = machine.pace(m.replica)) member["us_per_sample"] = static_cast<double>(*pace) * 1e-6;
  }
  json["neighbourhoods"] = nlohmann::json::array();
  for (const auto& one : machine.neighbourhoods()) {
    auto& replicas = json["neighbourhoods"].emplace_back(nlohmann::json::array());
    for (auto replica : one) replicas.push_back(replica.value);
  }
  json["orders_by_round_trips"] = machine.orders_by_round_trips();
  const auto& rule = machine.balance_rule();
  json["balance"] = {{"on", rule.on},
                     {"at_least", rule.at_least * 1e-3},
                     {"at_most", rule.at_most * 1e-3},
                     {"in_force", machine.ledger().balance().in_force()}};
  json["suspended"] = nlohmann::json::array();
  for (const auto& out : machine.suspended())
    json["suspended"].push_back({{"replica", out.replica.value}, {"reason", out.reason}});
  json["out"] = nlohmann::json::array();
  for (const auto& out : machine.outages(now)) {
    json["out"].push_back({{"replica", out.replica.value}, {"reason", out.why}, {"next", out.next}});
    if (out.lasting) json["out"].back()["for_ms"] = static_cast<std::uint64_t>(milliseconds(*out.lasting));
  }
  json["alarms"] = machine.alarms();
  json["refused"] = nlohmann::json::array();
  for (const auto& [replica, refused] : machine.refused())
    json["refused"].push_back({{"replica", replica.value}, {"rank", refused.first}, {"reason", refused.second}});
  json["blocked_on"] = nlohmann::json::array();
  for (auto replica : machine.blocked_on()) json["blocked_on"].push_back(replica.value);
  json["steps_rolled_back"] = machine.steps_rolled_back();
  if (auto step = machine.wants_roll_back()) {
    json["wants_roll_back_to"] = step->value;
    json["roll_back_word"] = machine.word_for(*step).text();
  }
  if (machine.wants_log()) json["wants_log"] = true;
  json["registered"] = nlohmann::json::array();
  for (const auto& [id, replica] : machine.replicas())
    json["registered"].push_back({{"replica", id.value},
                                  {"incarnation", replica.incarnation.value},
                                  {"ranks", replica.registered},
                                  {"caught_up", machine.caught_up(replica)}});
  return json;
}

}  // namespace rejoin::daemon
