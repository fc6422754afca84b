// One of several coordinators by itself, over a store that answers as it is told.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "membership/replicated_coordinator.h"

namespace rejoin::membership {

using namespace std::chrono_literals;
using Asked = StoreRequest::Kind;
using Answered = StoreAnswer::Outcome;

inline constexpr Duration kQuiet = 1600ms;

inline proto::Leader other_leader() {
  proto::Leader leader;
  leader.set_term(7);
  leader.set_name("other");
  leader.set_address("other:1");
  leader.set_instance(99);
  return leader;
}

inline void begin_epoch(proto::LogEntry& entry, std::uint64_t epoch, std::initializer_list<std::uint32_t> members) {
  auto& begun = *entry.add_records()->mutable_epoch();
  begun.set_epoch(epoch);
  begun.set_step(1);
  for (std::uint32_t replica : members) {
    begun.add_members()->set_incarnation(replica + 1);
    begun.mutable_members()->rbegin()->set_replica(replica);
  }
}

// A store of one writer, and a coordinator that uses it.
struct Alone {
  ReplicatedCoordinator::Options options{.job = {.replicas = 2, .ranks = 1, .batch = 4, .id = 5, .silence = kQuiet},
                                         .name = "c0",
                                         .address = "c0:1",
                                         .instance = 1};
  TimePoint now{1h};
  std::unique_ptr<ReplicatedCoordinator> one;
  std::string leader, snapshot;
  std::uint64_t revision = 0, leader_revision = 0, alive = 0, snapshot_position = 0, snapshot_revision = 0;
  std::map<std::uint64_t, std::string> log;
  std::vector<StoreRequest> asked;
  std::vector<std::string> told;
  std::vector<proto::Leads> said;
  std::vector<NodeId> closed;
  std::optional<Error> failed;
  std::size_t copies = 0;  // records that have come out for the copy
  bool answers = true;
  std::optional<Asked> answers_not;     // requests of this kind alone
  bool keeps_requests = false;          // and says nothing of the next one either
  std::optional<StoreRequest> unheard;  // that one
  std::optional<Asked> lose;            // the answer to the next such request

  void start() { one = std::make_unique<ReplicatedCoordinator>(options, now); }
  // As if somebody else led, who has written what begins a job.
  void let_other_lead(std::initializer_list<std::uint32_t> members = {0, 1}) {
    leader = other_leader().SerializeAsString();
    leader_revision = ++revision;
    write(0, [&](proto::LogEntry& entry) {
      auto& job = *entry.add_records()->mutable_job();
      job.set_replicas(2), job.set_ranks(1);
      job.set_batch(4);
      job.set_id(5);
      begin_epoch(entry, 1, members);
    });
  }
  void write(std::uint64_t position, const std::function<void(proto::LogEntry&)>& fill) {
    proto::LogEntry entry;
    fill(entry);
    log[position] = entry.SerializeAsString();
    ++revision;
  }
  void give_out(std::uint64_t position, std::uint64_t incarnation) {
    write(position,
          [&](proto::LogEntry& entry) { entry.add_records()->mutable_incarnated()->set_incarnation(incarnation); });
  }
  bool has(const StoreRequest::Behind& behind) const {
    if (behind.entry) return log.contains(*behind.entry);
    return behind.snapshot_revision == 0 || behind.snapshot_revision == snapshot_revision;
  }
  StoreAnswer answer_to(const StoreRequest& request) {
    StoreAnswer answer{.outcome = Answered::unknown, .error = "nobody is there", .leader = {}};
    if (!answers || request.kind == answers_not) return answer;
    answer = {.outcome = Answered::done, .error = {}, .leader = {}};
    const bool fits = request.token == leader_revision && request.leader == leader;
    if (request.kind == Asked::read) {
      answer.alive_revision = alive;
      answer.snapshot_position = snapshot_position;
      answer.snapshot_revision = snapshot_revision;
      std::uint64_t from = request.position;
      if (snapshot_position > from && !log.contains(from)) from = snapshot_position, answer.snapshot = snapshot;
      for (auto entry = log.lower_bound(from); entry != log.end(); ++entry) answer.entries.emplace_back(*entry);
    } else if (!fits || !has(request.behind) || (request.kind == Asked::append && log.contains(request.position))) {
      answer.outcome = Answered::refused;
      if (request.kind == Asked::append && log.contains(request.position)) answer.existing = log[request.position];
    } else {
      ++revision;
      if (request.kind == Asked::claim) leader = request.value, leader_revision = revision;
      if (request.kind == Asked::append) log[request.position] = request.value;
      if (request.kind == Asked::renew) alive = revision;
      if (request.kind == Asked::compact) {
        snapshot = request.value, snapshot_position = request.position, snapshot_revision = revision;
        if (!request.entry.empty()) log[request.entry_at] = request.entry;
      }
    }
    answer.leader = leader;
    answer.leader_revision = leader_revision;
    return answer;
  }
  void carry_out(ReplicatedCoordinator::Actions actions) {
    for (bool more = true; more;) {
      more = actions.request.has_value();
      for (const auto& note : actions.notes) told.push_back(note.text);
      for (const auto& [nodes, message] : actions.send)
        if (message.has_leads()) said.push_back(message.leads());
      for (const auto node : actions.close) closed.push_back(node);
      if (actions.failed) return failed = actions.failed, void();  // its process has ended
      copies += actions.copy.size();
      if (!more) return;
      asked.push_back(*actions.request);
      if (keeps_requests) return unheard = actions.request, void();
      StoreAnswer answer = answer_to(asked.back());
      if (lose == asked.back().kind) {  // it is done, and nobody hears of it
        lose.reset();
        answer = {.outcome = Answered::unknown, .error = "it is lost", .leader = {}};
      }
      actions = one->on_answer(answer, now);
    }
  }
  void pass(Duration time) {
    for (const TimePoint until = now + time; now < until && !failed;) {
      now += kQuiet / 16;
      for (const auto& [node, view] : views) say(node);
      carry_out(one->on_tick(now));
    }
  }
  std::map<std::uint64_t, proto::LeaderView> views;  // of nodes that say the same again and again
  void node(std::uint64_t number, bool lost, bool stalled = false) {
    auto& view = views[number] = {};
    view.set_term(7);
    view.set_led_term(7);
    view.set_lost(lost || stalled);
    view.set_stalled(stalled);
    view.add_hosts()->set_replica(static_cast<std::uint32_t>(number));
    RankSet(0).to(view.mutable_hosts(0)->mutable_ranks());
    say(number);
  }
  // All nodes have lost the other one, which leads, and the store answers no claim.
  void claim_in_vain() {
    let_other_lead();
    start();
    pass(kQuiet);
    answers_not = Asked::claim;
    for (std::uint64_t number : {0, 1}) node(number, true);
  }
  void say(std::uint64_t number) {
    proto::FromNode message;
    message.mutable_hello()->set_node("n");
    carry_out(one->on_message(NodeId(number + 1), message, now));
    *message.mutable_leader_view() = views[number];
    carry_out(one->on_message(NodeId(number + 1), message, now));
  }
  bool leads() const { return one->leading() != nullptr; }
  std::size_t count(Asked kind) const {
    return static_cast<std::size_t>(
        std::ranges::count_if(asked, [&](const auto& request) { return request.kind == kind; }));
  }
};

}  // namespace rejoin::membership
