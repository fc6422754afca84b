// With which state and which samples a job may go on.
#include "membership/log.h"
#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {
namespace {

TEST(Coordinator, BelowTheLastCommittedStepItStartsOnlyAtAnOperatorsWordAndCountsWhatWasGivenUp) {
  Bench bench;
  bench.start();
  bench.steps(3);
  EXPECT_EQ(bench.coordinator.committed(), Step(3));
  for (std::uint32_t r : {0u, 1u, 2u}) bench.down(r);
  EXPECT_TRUE(bench.coordinator.members().empty());
  bench.all_come(2, 2);
  EXPECT_EQ(bench.coordinator.committed(), Step(3));
  EXPECT_EQ(bench.contributors(), 0u);
  EXPECT_EQ(bench.coordinator.wants_roll_back(), Step(2));
  EXPECT_TRUE(bench.waits_for("--roll-back-to 2@3 to give up 1 steps; if the job was to end there, end it"));

  Bench told(bench.log, {.roll_back_to = Step(2)});
  told.all_come(3, 2);
  EXPECT_EQ(told.coordinator.committed(), Step(2)) << "the most advanced state that is left";
  EXPECT_EQ(told.contributors(), 3u);
  EXPECT_EQ(told.coordinator.steps_rolled_back(), 1u);
  std::vector<proto::LogRecord> all = bench.log;
  all.insert(all.end(), told.log.begin(), told.log.end());
  EXPECT_EQ(rolled_back(all).steps, 1u);
  EXPECT_EQ(rolled_back(all).samples, 30u);

  // The word holds once.
  told.steps(2);
  for (std::uint32_t r : {0u, 1u, 2u}) told.down(r, 3);
  told.all_come(4, 2);
  EXPECT_EQ(told.coordinator.committed(), Step(4));
  EXPECT_EQ(told.coordinator.wants_roll_back(), Step(2));
}

// Its ranks were started one by one, and found different checkpoints: as long as it might bring a later state than
// anybody else, an operator isn't asked whether the job may go back.
TEST(Coordinator, AReplicaWhoseRanksComeWithTheStatesOfDifferentStepsStartsOnceMore) {
  Bench bench;
  bench.start();
  bench.steps(3);
  for (std::uint32_t r : {0u, 1u, 2u}) bench.down(r);
  bench.rank_up(0, 0, 2, 3);
  bench.rank_up(0, 1, 2, 2);
  for (std::uint32_t r : {1u, 2u}) bench.up(r, 2, 1);
  bench.inbox.clear();
  bench.link_all();
  EXPECT_FALSE(bench.coordinator.wants_roll_back());
  const auto& told = bench.inbox[0];
  const auto evicted = std::find_if(told.begin(), told.end(), [](const auto& sent) { return sent.has_evicted(); });
  ASSERT_NE(evicted, told.end());
  EXPECT_NE(evicted->evicted().reason().find("states of steps 2 to 3"), std::string::npos)
      << evicted->evicted().reason();

  bench.up(0, 3, 3);
  bench.link_all();
  EXPECT_EQ(bench.coordinator.steps_rolled_back(), 0u);
  EXPECT_EQ(bench.coordinator.committed(), Step(3));
  EXPECT_EQ(bench.contributors(), 1u) << "the others catch up";
}

TEST(Coordinator, AReplicaWhoseRanksHaveNoCheckpointInCommonIsSentBackOnceAndThenNamed) {
  Bench bench;
  bench.start();
  bench.steps(3);
  for (std::uint32_t r : {0u, 1u, 2u}) bench.down(r);
  for (std::uint32_t r : {1u, 2u}) bench.up(r, 2, 1);
  for (const std::uint64_t instance : {2, 3}) {
    bench.inbox.clear();
    bench.rank_up(0, 0, instance, 3);
    bench.rank_up(0, 1, instance, 2);
    bench.link_all();
    EXPECT_EQ(bench.evicted_anybody(), instance == 2);
  }
  EXPECT_TRUE(
      bench.waits_for("replica 0: its ranks came with the states of steps 2 to 3 (rank 1 with that of step 2, rank 0 "
                      "with that of step 3)"));
  EXPECT_EQ(bench.coordinator.wants_roll_back(), Step(1)) << "there is no better one";
}

// After a restart it is not whoever comes first who says what the job is like.
TEST(Coordinator, AMemberThatComesBackIsNotMeasuredByANewcomer) {
  Bench bench;
  bench.start();
  bench.down(2);
  bench.steps(1);
  Bench again(bench.log);
  again.incarnations = bench.incarnations;
  again.up(2, 2, 0, 5, 8);
  for (std::uint32_t r : {0u, 1u}) again.back(r, r);
  again.pass(600ms);
  const auto refused = [&](std::uint64_t node) {
    const auto& told = again.inbox[node];
    return std::any_of(told.begin(), told.end(), [](const auto& sent) { return sent.has_refused(); });
  };
  EXPECT_TRUE(refused(2));
  EXPECT_FALSE(refused(0) || refused(1));
  for (std::uint32_t r : {0u, 1u}) again.reduced(r);
  EXPECT_EQ(again.coordinator.committed().value, bench.coordinator.committed().value + 1);
}

TEST(Coordinator, WhatAMixedReplicaBringsIsNotWaitedForWhereAnotherHasALaterState) {
  Bench bench;
  for (std::uint32_t r : {1u, 2u}) bench.up(r, 1, 3);
  bench.rank_up(0, 0, 1, 3);
  bench.rank_up(0, 1, 1, 0);
  bench.link_all();
  EXPECT_EQ(bench.contributors(), 2u);
  EXPECT_EQ(bench.coordinator.members().size(), 3u);
}

// ---- a whole job starts again from its checkpoint

TEST(Coordinator, AFreshLogGoesOnWithTheSamplesThatTheCheckpointHasLeft) {
  Bench bench;
  for (std::uint32_t r : {0u, 1u, 2u}) bench.bring(r, 8, {{0, 225}, {240, 255}});
  bench.link_all();
  ASSERT_EQ(bench.contributors(), 3u);
  EXPECT_EQ(bench.coordinator.committed(), Step(8));
  EXPECT_EQ(*bench.coordinator.ledger().batch_of(ReplicaId(0)), (Batch{{225, 235}})) << "what waited goes out first";
  EXPECT_EQ(*bench.coordinator.ledger().batch_of(ReplicaId(1)), (Batch{{235, 240}, {255, 260}}));
  EXPECT_EQ(*bench.coordinator.ledger().batch_of(ReplicaId(2)), (Batch{{260, 270}}));
  bench.steps(2);
  const Audit once = audit(trained_by_step(bench.log));
  EXPECT_EQ(once.samples, 300u);
  EXPECT_EQ(once.once, 300u);
  EXPECT_EQ(once.lost + once.repeated, 0u);
  EXPECT_EQ(rolled_back(bench.log).steps, 0u);
  const auto& plan = bench.inbox[0].back().plan();
  EXPECT_EQ(Samples(plan.trained(), kMostSamples).text(), "0-299") << "for the next checkpoint";

  Bench again(bench.log);  // its own restart
  EXPECT_EQ(again.coordinator.committed(), Step(10));
  EXPECT_EQ(again.coordinator.ledger().held(), bench.coordinator.ledger().held());
}

TEST(Coordinator, AKeptLogGoesOnByItselfAndTakesNoOtherJobsCheckpoint) {
  Bench bench;
  bench.start();
  bench.steps(2);
  for (std::uint32_t r : {0u, 1u, 2u}) bench.down(r);
  bench.inbox.clear();
  bench.bring(0, 2, {{0, 50}}, 2);
  EXPECT_NE(bench.refused(0).find("its checkpoint of step 2 says that samples 0-49 are trained, and by this "
                                  "coordinator's log 0-59 are: it is another job's checkpoint"),
            std::string::npos)
      << bench.refused(0);
  EXPECT_NE(bench.refused(0).find("--log-directory"), std::string::npos);
  for (std::uint32_t r : {0u, 1u, 2u}) bench.bring(r, 2, {{0, 60}}, 3);
  bench.link_all();
  EXPECT_EQ(bench.contributors(), 3u);
  EXPECT_EQ(bench.coordinator.committed(), Step(2));
  bench.steps(1);
  EXPECT_EQ(audit(trained_by_step(bench.log)).once, 90u);
}

TEST(Coordinator, ReplicasThatBringOtherSamplesAtOneStepAreRefused) {
  Bench bench;
  bench.bring(0, 8, {{0, 240}});
  bench.bring(1, 8, {{0, 230}});
  EXPECT_NE(bench.refused(1).find("its checkpoint of step 8 says that samples 0-229 are trained, and that of replica 0 "
                                  "rank 0, which came first, says 0-239: start all ranks of all replicas from one"),
            std::string::npos)
      << bench.refused(1);
  bench.inbox.clear();
  bench.bring(2, 8, {{0, 10}, {20, 30}, {40, 50}, {60, 70}, {80, 90}});
  EXPECT_NE(bench.refused(2).find("says that samples 50 of those below 90 are trained"), std::string::npos)
      << bench.refused(2);
  bench.bring(1, 7, {{0, 210}}, 2);  // an older checkpoint of the same job
  bench.bring(2, 8, {{0, 240}});
  bench.link_all();
  EXPECT_EQ(bench.contributors(), 2u);
  EXPECT_EQ(bench.coordinator.members().size(), 3u) << "it catches up";
  EXPECT_EQ(bench.coordinator.ledger().trained().text(), "0-239");
}

TEST(Coordinator, ACheckpointThatDoesNotSayWhichSamplesAreTrainedIsRefused) {
  Bench bench;
  bench.bring(0, 8, {});
  EXPECT_NE(bench.refused(0).find("the state of step 8 and does not say which samples are trained"), std::string::npos)
      << bench.refused(0);
  bench.bring(1, 0, {{0, 10}});
  EXPECT_NE(bench.refused(1).find("state of step 0 and says that samples 0-9 are trained"), std::string::npos)
      << bench.refused(1);
}

// While it waited to be admitted nobody needed its checkpoint; then all who contributed were lost.
TEST(Coordinator, WhoWaitedWithAnotherJobsCheckpointIsNoStart) {
  Bench bench;
  bench.start();
  bench.steps(2);
  bench.down(2);
  bench.bring(2, 1, {{0, 25}}, 2);
  ASSERT_EQ(bench.refused(2), "") << "it would have caught up";
  for (std::uint32_t r : {0u, 1u}) bench.down(r);
  for (std::uint32_t r : {0u, 1u}) bench.up(r, 2, 0);
  bench.link_all();
  EXPECT_EQ(bench.coordinator.wants_roll_back(), Step(0)) << "and not step 1";
  EXPECT_TRUE(bench.waits_for("replica 2: its checkpoint of step 1 says that other samples are trained"));
}

TEST(Coordinator, BehindTheCheckpointThatItBeganWithItTakesTheSamplesOfAnEarlierOne) {
  Bench bench;
  bench.all_come(1, 8);
  bench.steps(2);
  Bench told(bench.log, {.roll_back_to = Step(5)});
  told.nobody_comes_back();
  told.all_come(2, 5);
  ASSERT_EQ(told.contributors(), 3u);
  EXPECT_EQ(told.coordinator.committed(), Step(5));
  EXPECT_EQ(*told.coordinator.ledger().batch_of(ReplicaId(0)), (Batch{{150, 160}}));
  told.steps(1);
  std::vector<proto::LogRecord> all = bench.log;
  all.insert(all.end(), told.log.begin(), told.log.end());
  EXPECT_EQ(audit(trained_by_step(all)).once, 180u);
  EXPECT_EQ(rolled_back(all).steps, 5u);
  EXPECT_EQ(rolled_back(all).samples, 150u);
  Bench again(all);
  EXPECT_EQ(again.coordinator.ledger().held(), told.coordinator.ledger().held());
}

// Checkpoints of what was given up lie about: going on from there would take back the operator's word.
TEST(Coordinator, NothingGoesOnFromAStepThatWasRolledBack) {
  Bench first;
  first.start();
  first.steps(3);
  Bench bench(first.log, {.roll_back_to = Step(1)});
  bench.nobody_comes_back();
  bench.all_come(2, 1);
  ASSERT_EQ(bench.coordinator.committed(), Step(1));
  for (std::uint32_t r : {0u, 1u, 2u}) bench.down(r, 2);
  bench.all_come(3, 3);
  EXPECT_EQ(bench.contributors(), 0u);
  EXPECT_EQ(bench.coordinator.committed(), Step(1));
  EXPECT_TRUE(
      bench.waits_for("replica 2: it has come with the state of step 3, and step 1 is the last that is committed"));

  bench.down(0, 3);
  bench.up(0, 4, 1);
  bench.link_all();
  EXPECT_EQ(bench.contributors(), 1u) << "the others catch up";
  EXPECT_EQ(bench.coordinator.members().size(), 3u);
}

// Everything was lost, and the log was put back from a backup that is older than the checkpoints.
TEST(Coordinator, AStateThatIsLaterThanALogWithoutARollBackIsSaidToBeOfAWholerLog) {
  Bench backup;
  backup.start();
  backup.steps(1);
  Bench bench(backup.log);
  bench.nobody_comes_back();
  bench.all_come(2, 3);
  EXPECT_EQ(bench.contributors(), 0u);
  EXPECT_TRUE(bench.waits_for("nothing was ever rolled back: the log is an older copy, or the state is another job's"));
  EXPECT_TRUE(bench.waits_for("Put the whole log back; or, to go on from step 3, start the coordinator with a new"));

  bench.down(0, 2);
  bench.up(0, 3, 1);
  bench.link_all();
  EXPECT_EQ(bench.contributors(), 1u) << "somebody has the state of the log's last step";
  const auto alarms = bench.coordinator.alarms();
  ASSERT_EQ(alarms.size(), 2u);
  EXPECT_NE(alarms.front().find("replica 1 has come with the state of step 3, and catches up from step 1"),
            std::string::npos)
      << alarms.front();
  EXPECT_NE(alarms.front().find("the log is an older copy"), std::string::npos) << alarms.front();
}

TEST(Coordinator, AVersionThatIsNoStepIsRefused) {
  Bench bench;
  proto::FromNode message;
  auto& up = *message.mutable_rank_up();
  up.set_replica(2);
  up.set_instance(200);
  up.set_plan_hash(9);
  up.set_version(std::uint64_t{1} << 61);
  bench.send(2, message);
  EXPECT_NE(bench.refusal(2).find("steps are numbered up to"), std::string::npos) << bench.refusal(2);
}

}  // namespace
}  // namespace rejoin::membership
