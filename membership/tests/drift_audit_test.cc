// Differences among replicas: found, named, repeated, and settled.
#include "membership/drift_audit.h"

#include <gtest/gtest.h>

#include <set>

#include "membership/node.h"
#include "membership/relay.h"

namespace rejoin::membership {
namespace {

using namespace std::chrono_literals;
using Kind = DriftAudit::Verdict::Kind;

proto::Reduced report(const std::vector<std::uint64_t>& results, const std::vector<std::uint64_t>& state) {
  proto::Reduced reduced;
  auto& ranks = *reduced.add_ranks();
  ranks.set_end(results.size());
  reduced.mutable_results()->Add(results.begin(), results.end());
  reduced.mutable_state()->Add(state.begin(), state.end());
  return reduced;
}

struct Auditing {
  DriftAudit audit{{.on = true, .period = 4}, 2};
  std::vector<DriftAudit::Voter> voters{{ReplicaId(0), true}, {ReplicaId(1), true}, {ReplicaId(2), true}};
  Epoch epoch{1};
  Step committed{7};
  std::string notes;

  void reports(std::uint32_t replica, std::uint64_t reduced, std::uint64_t state, std::uint64_t other_rank = 5) {
    audit.on_reduced(ReplicaId(replica), report({other_rank, reduced}, {6, state}));
  }
  DriftAudit::Verdict judge() {
    const auto verdict = audit.judge(voters, epoch, committed);
    for (const auto& note : audit.take_notes()) notes += note + "\n";
    if (verdict.kind == Kind::agree) audit.on_committed(TimePoint(1s)), committed = committed.next();
    else audit.on_epoch(), epoch = epoch.next();
    return verdict;
  }
  proto::Plan plan() const {
    proto::Plan plan;
    audit.fill(plan);
    return plan;
  }
  // What a rank has of bucket 0, segment by segment, and from whom; and of its state.
  void sends_details(std::uint32_t replica, const std::vector<std::pair<std::uint64_t, std::uint32_t>>& segments,
                     std::uint64_t state = 0) {
    proto::Details details;
    details.set_replica(replica);
    details.set_rank(plan().inspect().rank());
    details.set_epoch(plan().inspect().epoch());
    auto& bucket = *details.add_buckets();
    for (const auto& [digest, from] : segments) {
      bucket.add_segments()->set_digest(digest);
      bucket.mutable_segments()->rbegin()->set_from(from);
    }
    for (const std::uint64_t digest : {std::uint64_t{1}, state}) {
      auto& range_digest = *details.add_state();
      range_digest.set_tensor(digest == 1 ? "same" : "w");
      range_digest.set_first(64);
      range_digest.set_count(32);
      range_digest.set_digest(digest);
    }
    audit.on_details(details);
  }
};

TEST(DriftAudit, ReplicasThatAgreeAreCommittedAndAllOfTheStateComesUpInAPeriod) {
  Auditing a;
  std::vector<std::uint64_t> phases;
  for (int step = 0; step < 8; ++step) {
    EXPECT_EQ(a.plan().audit().period(), 4u);
    EXPECT_FALSE(a.plan().has_inspect());
    phases.push_back(a.plan().audit().phase());
    for (std::uint32_t r = 0; r < 3; ++r) a.reports(r, 1, 2);
    EXPECT_EQ(a.judge().kind, Kind::agree);
  }
  EXPECT_EQ(phases, (std::vector<std::uint64_t>{0, 1, 2, 3, 0, 1, 2, 3}));
  EXPECT_EQ(a.audit.counted().rounds, 2u);
  EXPECT_EQ(a.notes, "");
}

TEST(DriftAudit, AFlippedResultIsRepeatedAndTheHopThatItCameOverIsNamed) {
  Auditing a;
  a.reports(0, 1, 2), a.reports(1, 1, 2), a.reports(2, 9, 2);
  const auto verdict = a.judge();
  EXPECT_EQ(verdict.kind, Kind::repeat);
  EXPECT_NE(verdict.reason.find("rank 1"), std::string::npos) << verdict.reason;
  EXPECT_EQ(a.plan().inspect().rank(), 1u);
  EXPECT_EQ(a.plan().inspect().epoch(), 1u);
  // Segment 1 starts at replica 1; both others have another one, and 0 got it from 2.
  a.sends_details(0, {{10, 0}, {99, 2}});
  a.sends_details(1, {{10, 0}, {11, 1}});
  a.sends_details(2, {{10, 0}, {99, 1}});
  for (std::uint32_t r = 0; r < 3; ++r) a.reports(r, 1, 2);
  EXPECT_EQ(a.judge().kind, Kind::agree);
  EXPECT_NE(a.notes.find("bucket 0 of rank 1 differs at replica 2 from what replica 1 has sent it"), std::string::npos)
      << a.notes;
  EXPECT_EQ(a.audit.counted().result_differences, 1u);
  EXPECT_FALSE(a.plan().has_inspect());
}

TEST(DriftAudit, AJoinersResultsCountAndItsStateDoesNot) {
  Auditing a;
  a.voters[2].contributes = false;
  a.reports(0, 1, 2), a.reports(1, 1, 2), a.reports(2, 1, 0);
  EXPECT_EQ(a.judge().kind, Kind::agree);
  a.reports(0, 1, 2), a.reports(1, 1, 2), a.reports(2, 8, 0);
  EXPECT_EQ(a.judge().kind, Kind::repeat);
}

TEST(DriftAudit, WhoseHopsFlipBitsThreeTimesInARowIsOut) {
  Auditing a;
  for (std::uint32_t r = 0; r < 3; ++r) a.reports(r, 1, 2);
  ASSERT_EQ(a.judge().kind, Kind::agree);
  for (int time = 0; time < 3; ++time) {
    a.reports(0, 1, 2), a.reports(1, 1, 2), a.reports(2, 9 + static_cast<std::uint64_t>(time), 2);
    ASSERT_EQ(a.judge().kind, Kind::repeat) << time;
    a.sends_details(0, {{10, 0}});
    a.sends_details(1, {{10, 0}});
    a.sends_details(2, {{77, 0}});
  }
  for (std::uint32_t r = 0; r < 3; ++r) a.reports(r, 1, 2);
  const auto verdict = a.judge();
  EXPECT_EQ(verdict.kind, Kind::remove);
  EXPECT_EQ(verdict.replica, ReplicaId(2));
  EXPECT_NE(verdict.reason.find("bucket 0 of rank 1 differs at replica 2"), std::string::npos) << verdict.reason;
}

TEST(DriftAudit, TheOnlyContributorIsNotPutOutForAJoinersHop) {
  Auditing a;
  a.voters = {{ReplicaId(0), true}, {ReplicaId(1), false}};
  for (int time = 0; time < 3; ++time) {
    a.reports(0, 1, 2), a.reports(1, 9, 0);
    ASSERT_EQ(a.judge().kind, Kind::repeat);
    a.sends_details(0, {{77, 1}});  // it has accused the contributor's side
    a.sends_details(1, {{10, 1}});
  }
  a.reports(0, 1, 2), a.reports(1, 1, 0);
  const auto verdict = a.judge();
  EXPECT_EQ(verdict.kind, Kind::remove);
  EXPECT_EQ(verdict.replica, ReplicaId(1));
}

TEST(DriftAudit, WhoAloneHasContributedToTheLastCommitIsNotPutOutForItsHops) {
  Auditing a;
  a.voters[1].contributes = a.voters[2].contributes = false;
  a.reports(0, 1, 2), a.reports(1, 1, 0), a.reports(2, 1, 0);
  ASSERT_EQ(a.judge().kind, Kind::agree);
  a.voters[1].contributes = a.voters[2].contributes = true;  // promoted just now
  for (const std::uint32_t receiver : {1u, 2u, 1u}) {
    for (std::uint32_t r = 0; r < 3; ++r) a.reports(r, r == receiver ? 9 : 1, 2);
    ASSERT_EQ(a.judge().kind, Kind::repeat);
    for (std::uint32_t r = 0; r < 3; ++r) a.sends_details(r, {{r == receiver ? 77u : 10u, 0}});
  }
  for (std::uint32_t r = 0; r < 3; ++r) a.reports(r, 1, 2);
  EXPECT_EQ(a.judge().kind, Kind::agree) << "only replica 0 was part of each of these hops";
}

TEST(DriftAudit, TwoThatDifferAgainAndAgainWithoutATraceStopTheJob) {
  Auditing a;
  a.voters.pop_back();
  for (int time = 0; time < 3; ++time) {
    a.reports(0, 1, 2), a.reports(1, 9, 2);
    ASSERT_EQ(a.judge().kind, Kind::repeat);
  }
  a.reports(0, 1, 2), a.reports(1, 9, 2);
  EXPECT_EQ(a.judge().kind, Kind::stop);
}

TEST(DriftAudit, AReplicaWhoseStateDriftedIsOutByMajorityWithTensorAndDigestsNamed) {
  Auditing a;
  a.reports(0, 1, 2), a.reports(1, 1, 0xbad), a.reports(2, 1, 2);
  ASSERT_EQ(a.judge().kind, Kind::repeat) << "for its details";
  a.sends_details(0, {}, 0xaa), a.sends_details(1, {}, 0xbb), a.sends_details(2, {}, 0xaa);
  a.reports(0, 1, 2), a.reports(1, 1, 0xbad), a.reports(2, 1, 2);
  const auto verdict = a.judge();
  EXPECT_EQ(verdict.kind, Kind::remove);
  EXPECT_EQ(verdict.replica, ReplicaId(1));
  EXPECT_EQ(verdict.reason,
            "its state differs from that of most replicas at version 7 tensor 'w' elements 64 to 96 of rank 1: "
            "00000000000000aa at replica 0, 00000000000000bb at replica 1");
  EXPECT_EQ(a.audit.counted().state_differences, 1u);
}

// A plan that one has heard before the coordinator's restart and another after it names other parts of the state.
TEST(DriftAudit, StatesThatDifferOnceAreNotHeldAgainstAnyone) {
  Auditing a;
  a.reports(0, 1, 2), a.reports(1, 1, 3), a.reports(2, 1, 2);
  ASSERT_EQ(a.judge().kind, Kind::repeat);
  for (std::uint32_t r = 0; r < 3; ++r) a.reports(r, 1, 2);
  EXPECT_EQ(a.judge().kind, Kind::agree);
}

TEST(DriftAudit, WithoutAMajorityTheJobStopsAndTheOperatorsChoicesAreNamed) {
  Auditing a;
  a.voters.pop_back();
  a.reports(0, 1, 2), a.reports(1, 1, 3);
  ASSERT_EQ(a.judge().kind, Kind::repeat);
  a.sends_details(0, {}, 0xaa), a.sends_details(1, {}, 0xbb);
  a.reports(0, 1, 2), a.reports(1, 1, 3);
  const auto verdict = a.judge();
  EXPECT_EQ(verdict.kind, Kind::stop);
  EXPECT_NE(verdict.reason.find("tensor 'w' elements 64 to 96 of rank 1"), std::string::npos) << verdict.reason;
  EXPECT_NE(verdict.reason.find("--drop-replica 0@7 or --drop-replica 1@7"), std::string::npos) << verdict.reason;
}

TEST(DriftAudit, WhatAJoinersSourcesDifferInIsAuditedNext) {
  Auditing a;
  proto::Drift drift;
  drift.set_tensor("w");
  drift.set_offset(3000);
  drift.set_total(4000);
  a.audit.on_drift(drift);
  EXPECT_EQ(a.plan().audit().phase(), 0u) << "the step under way has its plan";
  for (std::uint32_t r = 0; r < 3; ++r) a.reports(r, 1, 2);
  a.judge();
  EXPECT_EQ(a.plan().audit().phase(), 3u);
  drift.set_offset(4000);  // nonsense
  a.audit.on_drift(drift);
  EXPECT_EQ(a.audit.counted().drift_reports, 2u);
}

TEST(DriftAudit, ThePeriodIsSuchThatDigestsTakeHalfAPercentOfTheTime) {
  DriftAudit audit({}, 1);
  const DriftAudit::Voter voter{ReplicaId(0), true};
  audit.on_digest_time(200ms);
  TimePoint now(1s);
  for (int step = 0; step < 200; ++step) {
    audit.on_reduced(ReplicaId(0), report({1}, {2}));
    ASSERT_EQ(audit.judge({&voter, 1}, Epoch(1), Step(0)).kind, Kind::agree);
    audit.on_committed(now += 100ms);
  }
  EXPECT_EQ(audit.period(), 400u) << "0.5 ms a step";
}

TEST(DriftAudit, OffItAsksNobodyForAnythingAndComparesNothing) {
  DriftAudit audit({.on = false}, 1);
  proto::Plan plan;
  audit.fill(plan);
  EXPECT_FALSE(plan.has_audit());
  const DriftAudit::Voter voters[] = {{ReplicaId(0), true}, {ReplicaId(1), true}};
  audit.on_reduced(ReplicaId(0), report({1}, {2}));
  EXPECT_EQ(audit.judge(voters, Epoch(1), Step(0)).kind, Kind::agree);
}

// Two replicas of one rank, at the coordinator.
struct Pair {
  JobConfig config{.replicas = 2, .ranks = 1, .audit = {.period = 2}};
  std::unique_ptr<Coordinator> coordinator;
  TimePoint now{1s};
  std::vector<proto::LogRecord> log;
  std::map<std::uint32_t, proto::Plan> plans;  // the last that each node has heard
  std::map<std::uint32_t, std::uint64_t> incarnations;
  std::set<std::uint32_t> evicted;

  Pair() { restart(); }
  void restart(std::optional<JobConfig::Drop> drop = {}) {
    config.drop = drop;
    coordinator = std::make_unique<Coordinator>(config);
    const auto recovered = coordinator->recover(log, now);
    ASSERT_TRUE(recovered) << recovered.error().message;
    plans.clear();
  }
  void send(std::uint32_t replica, const proto::FromNode& message) {
    const Actions actions = coordinator->on_message(NodeId(replica), message, now);
    log.insert(log.end(), actions.append.begin(), actions.append.end());
    for (const auto& [node, sent] : actions.send) {
      const auto to = static_cast<std::uint32_t>(node.value);
      if (sent.has_registered()) incarnations[to] = sent.registered().incarnation();
      if (sent.has_plan()) plans[to] = sent.plan();
      if (sent.has_evicted()) evicted.insert(to);
    }
  }
  void up(std::uint32_t replica) {
    proto::FromNode message;
    auto& rank = *message.mutable_rank_up();
    rank.set_replica(replica);
    rank.set_instance(replica + 1);
    rank.set_plan_hash(9);
    if (incarnations.contains(replica)) rank.set_incarnation(incarnations[replica]);
    send(replica, message);
  }
  void link() {
    for (std::uint32_t replica : {0u, 1u}) {
      proto::FromNode message;
      auto& status = *message.mutable_replica_status();
      status.set_replica(replica);
      status.set_incarnation(incarnations[replica]);
      RankSet(0).to(status.mutable_ranks());
      status.add_links(incarnations[1 - replica]);
      send(replica, message);
    }
  }
  void reduced(std::uint32_t replica, std::uint64_t reduced, std::uint64_t state) {
    proto::FromNode message;
    auto& done = *message.mutable_reduced() = report({reduced}, {state});
    done.set_replica(replica);
    done.set_incarnation(incarnations[replica]);
    done.set_epoch(coordinator->epoch().value);
    done.set_step(coordinator->committed().value + 1);
    send(replica, message);
  }
};

TEST(Coordinator, AStepWhoseResultsDifferIsRepeatedByTheSameMembersInANewEpoch) {
  Pair job;
  job.up(0), job.up(1), job.link();
  ASSERT_TRUE(job.coordinator->started());
  const Epoch epoch = job.coordinator->epoch();
  job.reduced(0, 1, 5), job.reduced(1, 2, 5);
  EXPECT_EQ(job.coordinator->committed(), Step(0));
  EXPECT_EQ(job.coordinator->epoch(), epoch.next());
  EXPECT_EQ(job.coordinator->members().size(), 2u);
  EXPECT_EQ(job.plans[0].inspect().epoch(), epoch.value);
  EXPECT_EQ(job.plans[0].members(0).batch(0).begin(), 0u) << "with the same samples";
  job.reduced(0, 1, 5), job.reduced(1, 1, 5);
  EXPECT_EQ(job.coordinator->committed(), Step(1));
  EXPECT_FALSE(job.plans[0].has_inspect());
}

// Its audit begins anew, and some replicas have heard of the phase before: what they say of their states is of
// different parts.
TEST(Coordinator, ARestartInTheMiddleOfAStepIsNotTakenForDrift) {
  Pair job;
  job.up(0), job.up(1), job.link();
  job.reduced(0, 1, 5), job.reduced(1, 1, 5);
  ASSERT_EQ(job.coordinator->committed(), Step(1));
  job.restart();
  job.up(0), job.up(1);
  const Epoch epoch = job.coordinator->epoch();
  job.reduced(0, 1, 5), job.reduced(1, 1, 6);
  EXPECT_EQ(job.coordinator->committed(), Step(2));
  EXPECT_EQ(job.coordinator->epoch(), epoch);
  job.reduced(0, 1, 5), job.reduced(1, 1, 6);
  EXPECT_EQ(job.coordinator->committed(), Step(2)) << "from the next step on they are compared again";
}

TEST(Coordinator, WhoseStateDiffersWithoutAMajorityStopsTheJobThroughRestartsUntilOneIsDropped) {
  Pair job;
  job.up(0), job.up(1), job.link();
  job.reduced(0, 1, 5), job.reduced(1, 1, 5);
  ASSERT_EQ(job.coordinator->committed(), Step(1));
  for (int time = 0; time < 3; ++time) job.reduced(0, 1, 5), job.reduced(1, 1, 6);
  ASSERT_TRUE(job.coordinator->stopped());
  EXPECT_EQ(job.plans[1].stopped(), *job.coordinator->stopped());
  EXPECT_NE(job.coordinator->waiting_for(job.now).at(0).find("an operator's decision"), std::string::npos);
  // Also where they agree again: nobody knows which of them has been wrong since when.
  job.reduced(0, 1, 5), job.reduced(1, 1, 5);
  EXPECT_EQ(job.coordinator->committed(), Step(1));
  job.restart();
  job.up(0), job.up(1);
  EXPECT_TRUE(job.coordinator->stopped());
  job.restart(JobConfig::Drop{ReplicaId(0), Step(2)});  // not what the operator has seen
  EXPECT_TRUE(job.coordinator->stopped());
  {
    // It has ended since, as people were asked to see to.
    Pair ended = [&] {
      Pair pair;
      pair.log = job.log;
      pair.incarnations = job.incarnations;
      return pair;
    }();
    ended.restart();
    ended.up(0), ended.up(1);
    proto::FromNode message;
    auto& down = *message.mutable_rank_down();
    down.set_replica(0);
    down.set_instance(1);
    down.set_ended(true);
    ended.send(0, message);
    ended.restart(JobConfig::Drop{ReplicaId(0), Step(1)});
    EXPECT_FALSE(ended.coordinator->stopped());
  }
  Coordinator given_nonsense({.replicas = 2, .ranks = 1, .drop = JobConfig::Drop{ReplicaId(7), Step(1)}});
  const auto refused = given_nonsense.recover(job.log, job.now);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("replica 7 is none of those that differ, which are 0, 1"), std::string::npos)
      << refused.error().message;
  job.restart(JobConfig::Drop{ReplicaId(0), Step(1)});
  EXPECT_FALSE(job.coordinator->stopped());
  job.up(1), job.up(0);
  EXPECT_TRUE(job.evicted.contains(0));
  EXPECT_FALSE(job.evicted.contains(1));
  ASSERT_EQ(job.coordinator->members().size(), 1u);
  EXPECT_EQ(job.coordinator->members()[0].replica, ReplicaId(1));
  job.reduced(1, 1, 6);
  EXPECT_EQ(job.coordinator->committed(), Step(2));
  job.restart(JobConfig::Drop{ReplicaId(1), Step(2)});  // it is not stopped: nothing to decide
  job.up(1);
  EXPECT_EQ(job.coordinator->members().size(), 1u);
}

// Rank → daemon → relay: whatever the order of reports, each digest arrives under its rank.
TEST(Digests, ComeThroughDaemonsAndRelaysUnderTheirRanks) {
  const TimePoint now(1s);
  Relay relay("relay", 1s);
  relay.on_coordinator_up(now);
  std::vector<Node> nodes;
  nodes.emplace_back("a", 1s, 1), nodes.emplace_back("b", 1s, 2);
  proto::Reduced heard;
  const auto up = [&](std::size_t node, const Node::Actions& actions) {
    for (const auto& message : actions.to_coordinator)
      for (const auto& said : relay.on_node_message(NodeId(node), message, now).to_coordinator)
        if (said.has_reduced()) heard = said.reduced();
  };
  for (std::size_t n = 0; n < 2; ++n) up(n, nodes[n].on_coordinator_up(now));
  // Ranks 0 and 2 on one node, 1 and 3 on the other.
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    proto::FromNode message;
    message.mutable_rank_up()->set_rank(rank);
    message.mutable_rank_up()->set_instance(rank + 1);
    message.mutable_rank_up()->set_incarnation(1);
    up(rank % 2, nodes[rank % 2].on_rank_message(RankConnection(rank), message, now));
  }
  for (const std::uint32_t rank : {3u, 0u, 2u, 1u}) {
    proto::FromNode message;
    auto& reduced = *message.mutable_reduced();
    reduced.set_epoch(1);
    reduced.set_step(1);
    RankSet(rank).to(reduced.mutable_ranks());
    reduced.add_results(100 + rank);
    reduced.add_state(200 + rank);
    up(rank % 2, nodes[rank % 2].on_rank_message(RankConnection(rank), message, now));
  }
  ASSERT_EQ(RankSet(heard.ranks(), 100).size(), 4u);
  DigestTable table;
  table.take(heard, 4);
  for (std::uint32_t rank = 0; rank < 4; ++rank) EXPECT_EQ(table.of(rank), (RankDigests{100 + rank, 200 + rank}));
}

TEST(Digests, OfEndlessRangesAreNoEndlessWork) {
  proto::Reduced reduced, told;
  reduced.add_ranks()->set_end(~std::uint64_t{0});
  reduced.add_results(1);
  DigestTable table;
  table.take(reduced, ~std::uint64_t{0});
  table.write_to(RankSet(reduced.ranks(), ~std::uint64_t{0}), told);
  EXPECT_EQ(table.of(0).reduced, 1u);
  EXPECT_EQ(static_cast<std::uint64_t>(told.results_size()), kMostRanks);
}

}  // namespace
}  // namespace rejoin::membership
