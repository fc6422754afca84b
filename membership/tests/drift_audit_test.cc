// Differences among replicas: found, named, repeated, and settled.
#include "membership/drift_audit.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "membership/tests/drift_report.h"

namespace rejoin::membership {
namespace {

using namespace std::chrono_literals;
using Kind = DriftAudit::Verdict::Kind;

struct Auditing {
  DriftAudit audit{{.on = true, .period = 4}, 2};
  std::vector<DriftAudit::Voter> voters{
      {ReplicaId(0), Incarnation(1), true}, {ReplicaId(1), Incarnation(2), true}, {ReplicaId(2), Incarnation(3), true}};
  Epoch epoch{1};
  Step committed{7};
  std::string notes, tensor = "w";  // that differs

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
  void agree() {
    for (std::uint32_t r = 0; r < 3; ++r) reports(r, 1, 2);
    ASSERT_EQ(judge().kind, Kind::agree);
  }
  // A bit, on its way to this replica.
  void flip(std::uint32_t at, std::uint32_t from = 0) {
    for (std::uint32_t r = 0; r < 3; ++r) reports(r, r == at ? 9 : 1, 2);
    ASSERT_EQ(judge().kind, Kind::repeat);
    for (std::uint32_t r = 0; r < 3; ++r) sends_details(r, {{r == at ? 77u : 10u, from}});
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
      range_digest.set_tensor(digest == 1 ? "same" : tensor);
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

TEST(DriftAudit, WhoseHopsFlipBitsThreeTimesIsOutForNowUnlessItsStateDiffersToo) {
  for (const std::uint64_t state : {2u, 3u}) {
    Auditing a;
    a.agree();
    for (int time = 0; time < 3; ++time) a.flip(2);
    for (std::uint32_t r = 0; r < 3; ++r) a.reports(r, 1, r == 2 ? state : 2);
    const auto verdict = a.judge();
    EXPECT_EQ(verdict.kind, state == 2 ? Kind::suspend : Kind::remove);
    EXPECT_EQ(verdict.replica, ReplicaId(2));
    EXPECT_EQ(verdict.reason.find("its results differed 3 times, in step 9, the last time: step 9: bucket 0 of rank 1 "
                                  "differs at replica 2"),
              0u)
        << verdict.reason;
  }
}

TEST(DriftAudit, WhatAProcessIsBlamedForIsNotHeldAgainstTheOneThatComesAfterIt) {
  for (const bool anew : {false, true}) {
    Auditing a;
    a.agree();
    for (int time = 0; time < 2; ++time) a.flip(2), a.agree();
    if (anew) a.voters[2].incarnation = Incarnation(4);
    a.agree();
    a.flip(2, anew ? 0 : 1);  // the healthy one at the other end is not blamed alone, either
    for (std::uint32_t r = 0; r < 3; ++r) a.reports(r, 1, 2);
    const auto verdict = a.judge();
    EXPECT_EQ(verdict.kind, anew ? Kind::agree : Kind::suspend);
    if (!anew)
      EXPECT_EQ(verdict.reason.find("its results differed 3 times, in steps 9, 10, 12, the last time: step 12: "), 0u)
          << verdict.reason;
  }
}

TEST(DriftAudit, TheOnlyContributorIsNotPutOutForAJoinersHop) {
  Auditing a;
  a.voters = {{ReplicaId(0), Incarnation(1), true}, {ReplicaId(1), Incarnation(2), false}};
  for (int time = 0; time < 3; ++time) {
    a.reports(0, 1, 2), a.reports(1, 9, 0);
    ASSERT_EQ(a.judge().kind, Kind::repeat);
    a.sends_details(0, {{77, 1}});  // it has accused the contributor's side
    a.sends_details(1, {{10, 1}});
  }
  a.reports(0, 1, 2), a.reports(1, 1, 0);
  const auto verdict = a.judge();
  EXPECT_EQ(verdict.kind, Kind::suspend);
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

TEST(DriftAudit, AReplicaWhoseStateIsAnotherOneEachTimeIsOutAllTheSame) {
  Auditing a;
  std::uint64_t wrong = 6;
  DriftAudit::Verdict verdict;
  for (int time = 0; time < 10 && verdict.kind != Kind::remove; ++time) {
    for (std::uint32_t r : {0u, 1u}) a.reports(r, 1, 5);
    a.reports(2, 1, wrong++);
    verdict = a.judge();
    ASSERT_NE(verdict.kind, Kind::agree);
  }
  EXPECT_EQ(verdict.kind, Kind::remove);
  EXPECT_EQ(verdict.replica, ReplicaId(2));
  a.voters.pop_back();
  a.reports(0, 1, 5), a.reports(1, 1, 7);
  EXPECT_EQ(a.judge().kind, Kind::repeat) << "it may have been a bit on its way";
}

TEST(DriftAudit, TwoWhoseStatesAreOthersEachTimeStopTheJob) {
  Auditing a;
  a.voters.pop_back();
  std::uint64_t state = 6;
  DriftAudit::Verdict verdict;
  for (int time = 0; time < 10 && verdict.kind != Kind::stop; ++time) {
    for (std::uint32_t r : {0u, 1u}) a.reports(r, 1, state++);
    verdict = a.judge();
    ASSERT_NE(verdict.kind, Kind::agree);
  }
  EXPECT_EQ(verdict.kind, Kind::stop);
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

// It is told in records of the log.
TEST(DriftAudit, WhatIsSaidOfATensorIsCut) {
  Auditing a;
  a.voters.pop_back();
  proto::Drift drift;
  a.tensor = std::string(1 << 20, 'w');
  drift.set_tensor(a.tensor);
  drift.set_total(4000);
  for (std::uint32_t source = 0; source < 100'000; ++source) drift.add_sources(source), drift.add_digests(source);
  a.audit.on_drift(drift);
  EXPECT_LT(a.audit.counted().last.size(), 4000u);
  a.reports(0, 1, 2), a.reports(1, 1, 3);
  a.judge();
  a.sends_details(0, {}, 0xaa), a.sends_details(1, {}, 0xbb);
  a.reports(0, 1, 2), a.reports(1, 1, 3);
  const auto verdict = a.judge();
  EXPECT_NE(verdict.reason.find("tensor 'www"), std::string::npos) << verdict.reason.size();
  EXPECT_LT(verdict.reason.size(), 4000u);
}

struct Period : testing::Test {
  DriftAudit audit{{}, 2};
  TimePoint now{1s};
  void steps(int count) {
    const DriftAudit::Voter voter{ReplicaId(0), Incarnation(1), true};
    for (int step = 0; step < count; ++step) {
      audit.on_reduced(ReplicaId(0), report({1, 1}, {2, 2}));
      ASSERT_EQ(audit.judge({&voter, 1}, Epoch(1), Step(0)).kind, Kind::agree);
      audit.on_committed(now += 100ms);
    }
  }
};

TEST_F(Period, IsSuchThatDigestsTakeHalfAPercentOfTheTime) {
  audit.on_digest_time(0, 50ms);
  audit.on_digest_time(1, 200ms);
  steps(200);
  EXPECT_EQ(audit.period(), 400u) << "0.5 ms a step, of the slower rank";
}

TEST_F(Period, IsNotThatOfOneWhoWasPausedWhileItMeasured) {
  for (const auto time : {1ms, 5'000ms, 1ms}) audit.on_digest_time(0, time);
  steps(200);
  EXPECT_EQ(audit.period(), 2u);
}

// All that have measured so far were slow, as when a job starts on a busy machine.
TEST_F(Period, FallsAtOnceWhenItIsMeasuredShorter) {
  audit.on_digest_time(0, 5'000ms);
  steps(200);
  EXPECT_EQ(audit.period(), 10'000u);
  audit.on_digest_time(0, 1ms);
  steps(1);
  EXPECT_EQ(audit.period(), 2u);
  const auto rounds = audit.counted().rounds;
  steps(10);
  EXPECT_GE(audit.counted().rounds, rounds + 4);
}

TEST(DriftAudit, OffItAsksNobodyForAnythingAndComparesNothing) {
  DriftAudit audit({.on = false}, 1);
  proto::Plan plan;
  audit.fill(plan);
  EXPECT_FALSE(plan.has_audit());
  const DriftAudit::Voter voters[] = {{ReplicaId(0), Incarnation(1), true}, {ReplicaId(1), Incarnation(2), true}};
  audit.on_reduced(ReplicaId(0), report({1}, {2}));
  EXPECT_EQ(audit.judge(voters, Epoch(1), Step(0)).kind, Kind::agree);
}

}  // namespace
}  // namespace rejoin::membership
