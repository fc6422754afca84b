// Processes and logs that do not belong together: those of another job, and older copies.
#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {
namespace {

// Another --log-directory than before, or none: those who have the job's state are not sent away for it.
TEST(Coordinator, WithALogOfAnotherJobItSendsNobodyAway) {
  Bench first;
  first.start();
  first.steps(3);
  Bench other({}, {.id = 78});
  for (std::uint32_t r : {0u, 1u, 2u}) other.back_from(first, r);
  other.pass(60s);
  EXPECT_FALSE(other.evicted_anybody());
  EXPECT_FALSE(other.coordinator.started());
  EXPECT_TRUE(other.waits_for("belongs to job 000000000000004d, which has committed step 3; this log is of job"));

  // Whoever ends one of them may start it for this job.
  for (std::uint32_t r : {0u, 1u, 2u}) other.down(r), other.down(r, 1, 0);
  EXPECT_FALSE(other.waits_for("belongs to job"));
  for (std::uint32_t r : {0u, 1u, 2u}) other.up(r, 2);
  other.link_all();
  EXPECT_EQ(other.contributors(), 3u);
}

TEST(Coordinator, AStrayProcessOfAnotherJobIsNothingToOneThatRuns) {
  Bench old({}, {.id = 78});
  old.start();
  old.steps(1);
  Bench bench;
  bench.start();
  bench.back_from(old, 1);
  bench.steps(2);
  EXPECT_EQ(bench.coordinator.committed(), Step(2));
  EXPECT_FALSE(bench.evicted_anybody()) << "it may have the last copy of its job's state";
  EXPECT_NE(bench.warnings.find("give its daemon that job's --connect, or end that process"), std::string::npos);
  EXPECT_EQ(bench.coordinator.members().size(), 3u);
}

// Both jobs have begun with epoch 1 and incarnations from 1 on.
TEST(Coordinator, WhatAStrayProcessReportsCountsForNobodyHere) {
  Bench old({}, {.id = 78});
  old.start();
  Bench bench;
  bench.start();
  bench.back(1, 9);  // through another node than the one that a process of the other job comes from
  bench.back_from(old, 1);
  bench.reduced(0), bench.reduced(2);
  bench.reduced(1);
  EXPECT_EQ(bench.coordinator.committed(), Step(0));
  proto::FromNode message;
  auto& accusation = *message.mutable_accusation();
  accusation.set_replica(1);
  accusation.set_epoch(bench.coordinator.epoch().value);
  accusation.set_suspect(0);
  accusation.set_lost(true);
  bench.send(1, message);
  bench.pass(500ms, {0, 1, 2, 9});
  EXPECT_EQ(bench.coordinator.epoch(), old.coordinator.epoch()) << "nobody has lost anybody";
}

// … nor to one of fewer replicas or ranks, which has no such places at all.
TEST(Coordinator, AStrayProcessOfALargerJobIsNotRefused) {
  Bench old({}, {.id = 78});
  old.start();
  old.steps(1);
  for (const bool fewer_ranks : {false, true}) {
    SCOPED_TRACE(fewer_ranks ? "fewer ranks" : "fewer replicas");
    Bench bench({}, {.replicas = fewer_ranks ? 3u : 2u, .ranks = fewer_ranks ? 1u : 2u});
    for (std::uint32_t r : {0u, 1u, 2u}) bench.back_from(old, r);
    bench.incarnations = old.incarnations;
    bench.reduced(2);
    bench.pass(60s);
    EXPECT_FALSE(bench.evicted_anybody());
    for (std::uint32_t r : {0u, 1u, 2u}) EXPECT_EQ(bench.refused(r), "") << "it may have the last copy of its state";
    EXPECT_TRUE(bench.waits_for(fewer_ranks ? "replica 2 rank 1: it belongs to job" : "replica 2 rank 0: it belongs"));
    EXPECT_FALSE(bench.coordinator.started());
    for (std::uint32_t r : {0u, 1u, 2u}) bench.down(r), bench.down(r, 1, 0);
    EXPECT_FALSE(bench.waits_for("belongs to job"));
  }
}

// What it would decide with an older copy has been decided otherwise.
TEST(Coordinator, WithAnOlderCopyOfItsLogItDecidesNothing) {
  Bench bench;
  bench.start();
  bench.steps(3);
  const auto copy = bench.log;
  bench.steps(2);
  Bench again(copy);
  for (std::uint32_t r : {0u, 1u, 2u}) again.back_from(bench, r);
  again.link_all();
  again.steps(2);
  for (std::uint32_t r : {0u, 1u}) again.down(r);
  for (std::uint32_t r : {0u, 1u}) again.up(r, 2);
  again.pass(60s);
  EXPECT_TRUE(again.log.empty());
  EXPECT_FALSE(again.evicted_anybody());
  EXPECT_TRUE(
      again.waits_for("the log is an older copy: it ends with step 3 in epoch 1, and replica 0 rank 0, replica 0 rank "
                      "1, replica 1 rank 0, replica 1 rank 1, replica 2 rank 0, replica 2 rank 1 have heard, at the "
                      "most, of step 5 in epoch 1. Nothing is decided until the coordinator is started with the whole "
                      "log, or, to go on from this one, without those processes"));

  Bench whole(bench.log);
  for (std::uint32_t r : {0u, 1u, 2u}) whole.back_from(bench, r);
  whole.incarnations = bench.incarnations;
  whole.steps(1);
  EXPECT_EQ(whole.coordinator.committed(), Step(6));
}

TEST(Coordinator, WithAnOlderCopyOfItsLogItNamesSomeOfAllWhoHaveHeardMoreAndCountsTheOthers) {
  Bench bench({}, {.ranks = 5});
  bench.start();
  bench.steps(3);
  const auto copy = bench.log;
  bench.steps(2);
  Bench again(copy, {.ranks = 5});
  auto first = Bench::introduction(1, 4, 1);
  first.mutable_rank_up()->set_incarnation(bench.incarnations.at(1));
  first.mutable_rank_up()->set_job(bench.coordinator.job());
  first.mutable_rank_up()->set_heard_epoch(1);
  first.mutable_rank_up()->set_heard_committed(5);
  again.send(1, first);
  EXPECT_TRUE(again.waits_for("and replica 1 rank 4 has heard of step 5 in epoch 1. Nothing is decided until the "));
  EXPECT_TRUE(again.waits_for("or, to go on from this one, without that process"));
  for (int times = 0; times < 2; ++times)  // the second time their daemons are connected anew
    for (std::uint32_t r : {2u, 1u, 0u}) again.back_from(bench, r);
  EXPECT_TRUE(again.waits_for("replica 1 rank 2 and 7 others have heard, at the most, of step 5 in epoch 1"));
}

// Nobody was left where the copy ends, so nobody who comes back is waited for.
TEST(Coordinator, WithAnOlderCopyOfItsLogItStartsNobody) {
  Bench bench;
  bench.start();
  bench.steps(3);
  for (std::uint32_t r : {0u, 1u, 2u}) bench.down(r);
  const auto copy = bench.log;
  bench.all_come(2, 3);
  bench.steps(2);
  ASSERT_EQ(bench.coordinator.committed(), Step(5));
  Bench again(copy);
  for (std::uint32_t r : {0u, 1u}) again.up(r, 3, 3);
  again.link_all();
  again.back_from(bench, 2);
  again.pass(60s);
  EXPECT_TRUE(again.coordinator.members().empty());
  EXPECT_TRUE(std::ranges::none_of(again.log, [](const auto& record) { return record.has_epoch(); }));
}

// It lacks an epoch alone: who is a member has been decided otherwise.
TEST(Coordinator, ALogThatLacksAnEpochIsAnOlderCopyAndOneThatWasRolledBackIsNone) {
  Bench bench;
  bench.start();
  bench.steps(3);
  const auto copy = bench.log;
  bench.down(2);
  Bench again(copy);
  again.back_from(bench, 0);
  EXPECT_TRUE(again.waits_for("the log is an older copy: it ends with step 3 in epoch 1"));

  Bench told(bench.log, {.roll_back_to = Step(1)});
  told.nobody_comes_back();
  told.all_come(2, 1);
  ASSERT_EQ(told.coordinator.committed(), Step(1));
  auto message = Bench::introduction(0, 0, 2);
  message.mutable_rank_up()->set_incarnation(told.incarnations[0]);
  message.mutable_rank_up()->set_job(told.coordinator.job());
  message.mutable_rank_up()->set_heard_committed(3);  // before it
  told.send(10, message);
  EXPECT_FALSE(told.waits_for("the log is an older copy"));
}

// It may be the log that is the wrong one, so that two of three are not enough, however long the third does not come.
TEST(Coordinator, BesideAProcessOfAnotherJobNobodyStarts) {
  Bench old({}, {.id = 78});
  old.start();
  old.steps(1);
  Bench bench;
  bench.start();
  bench.steps(3);
  for (std::uint32_t r : {0u, 1u, 2u}) bench.down(r);
  bench.incarnations.clear();
  for (std::uint32_t r : {0u, 1u}) bench.up(r, 2, 3);
  bench.link_all();
  bench.back_from(old, 2);
  bench.pass(60s);
  EXPECT_EQ(bench.contributors(), 0u);
  EXPECT_TRUE(bench.waits_for("replica 2 rank 0: it belongs to job"));
  bench.down(2), bench.down(2, 1, 0);
  bench.pass(20s);
  EXPECT_EQ(bench.contributors(), 2u);
}

// Whatever coordinator it was registered with has decided nothing since.
TEST(Coordinator, WhoHasHeardNothingOfAnotherJobIsSentAway) {
  Bench old({}, {.id = 78});
  old.up(0);
  Bench bench;
  bench.back_from(old, 0);
  EXPECT_TRUE(bench.evicted_anybody());
  EXPECT_FALSE(bench.waits_for("belongs to job"));
}

}  // namespace
}  // namespace rejoin::membership
