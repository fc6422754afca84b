// Who holds the state while others are silent, and what a restart of the coordinator knows of it.
#include "membership/log.h"
#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {
namespace {

TEST(Coordinator, AfterALossOfEverybodyItDoesNotWaitForReplicasThatDoNotComeForLong) {
  Bench bench;
  bench.start();
  for (std::uint32_t r : {0u, 1u, 2u}) bench.down(r);
  for (std::uint32_t r : {0u, 1u}) bench.up(r, 2);
  bench.incarnations.erase(2);
  bench.link_all();
  bench.pass(10s);
  EXPECT_EQ(bench.contributors(), 0u);
  bench.pass(6s);
  EXPECT_EQ(bench.contributors(), 2u);
}

TEST(Coordinator, WhoWasStoppedHoldsThatAgainstNobody) {
  Bench bench;
  bench.start();
  bench.pass(1s);
  bench.now += 3500ms;  // this process was stopped; every node kept talking, and it is all queued
  bench.keep(bench.coordinator.on_tick(bench.now));
  bench.pass(2s);
  EXPECT_EQ(bench.contributors(), 3u);
  bench.steps(1);
  EXPECT_EQ(bench.coordinator.committed(), Step(1));
}

TEST(Coordinator, ALateTickThatComesBeforeAllThatIsQueuedJudgesNobody) {
  Bench bench;
  bench.start();
  bench.pass(1s);
  bench.now += 3500ms;
  bench.keep(bench.coordinator.on_tick(bench.now));
  for (std::uint64_t node : {0, 1, 2}) bench.keep(bench.coordinator.on_node_lost(NodeId(node), bench.now));
  bench.pass(900ms, {});
  EXPECT_EQ(bench.contributors(), 3u) << "they lost it while it was paused, and have their silence to come back";
}

TEST(Coordinator, TheLastHolderIsNeverOutForSilence) {
  Bench bench;
  bench.start();
  bench.steps(2);
  bench.down(1);
  bench.down(2);
  ASSERT_EQ(bench.contributors(), 1u);
  bench.pass(10s, {1, 2});  // node 0 is silent
  EXPECT_EQ(bench.contributors(), 1u);
  EXPECT_EQ(bench.coordinator.blocked_on(), std::vector{ReplicaId(0)});
  EXPECT_TRUE(bench.waits_for("replica 0: it is silent, and nobody else has the state of step 2"));
  bench.back(0, 10);
  bench.reduced(0, 10);
  EXPECT_EQ(bench.coordinator.committed(), Step(3));
}

TEST(Coordinator, WhenAllAreSilentNobodyIsOutAndTheFirstToComeBackGoesOn) {
  Bench bench;
  bench.start();
  bench.steps(1);
  bench.pass(5s, {});
  EXPECT_EQ(bench.contributors(), 3u);
  bench.back(1, 11);
  bench.pass(1100ms, {11});
  ASSERT_NO_FATAL_FAILURE(bench.expect_alone(1));
  bench.reduced(1, 11);
  EXPECT_EQ(bench.coordinator.committed(), Step(2));
}

TEST(Coordinator, AJoinerThatHasCaughtUpGoesOnAloneWhereEverybodyElseHasDied) {
  Bench bench;
  bench.start();
  bench.steps(2);
  bench.join_again({0, 2});
  ASSERT_EQ(bench.coordinator.members().size(), 3u);
  bench.caught_up(1);
  const Batch lost = *bench.coordinator.ledger().batch_of(ReplicaId(0));
  bench.down(0);
  EXPECT_EQ(bench.contributors(), 1u) << "replica 2";
  bench.down(2);
  ASSERT_NO_FATAL_FAILURE(bench.expect_alone(1));
  EXPECT_EQ(*bench.coordinator.ledger().batch_of(ReplicaId(1)), lost) << "samples of the step that is repeated";
  bench.reduced(1);
  EXPECT_EQ(bench.coordinator.committed(), Step(4));
  EXPECT_EQ(rolled_back(bench.log).steps, 0u);
}

// Its daemon was started again, and has yet to find out what the one before it knew.
TEST(Coordinator, ThatAJoinerHasCaughtUpIsNotForgottenWithItsDaemon) {
  Bench bench;
  bench.start();
  bench.steps(2);
  bench.join_again({0, 2});
  bench.caught_up(1);
  bench.back(1, 11, 2);
  for (std::uint32_t rank = 0; rank < bench.config.ranks; ++rank) bench.stand(1, rank, false);
  bench.down(0), bench.down(2);
  ASSERT_NO_FATAL_FAILURE(bench.expect_alone(1));
}

TEST(Coordinator, AJoinerWithHalfAStateStartsAgainWhereEverybodyElseHasDied) {
  Bench bench;
  bench.start();
  bench.steps(2);
  bench.join_again({0, 2});
  bench.stand(1, 0, true);
  bench.inbox[1].clear();
  bench.down(0), bench.down(2);
  EXPECT_EQ(bench.contributors(), 0u);
  ASSERT_FALSE(bench.inbox[1].empty());
  EXPECT_TRUE(std::any_of(bench.inbox[1].begin(), bench.inbox[1].end(), [](const auto& m) { return m.has_evicted(); }));
}

TEST(Coordinator, AJoinerThatHasCaughtUpGoesOnWhereTheLastContributorIsSilentOrHangs) {
  for (const bool hangs : {false, true}) {
    Bench bench;
    bench.start_with_a_joiner();
    ASSERT_EQ(bench.coordinator.members().size(), 2u);
    bench.caught_up(1);
    if (hangs) bench.accuse(1, 0);
    bench.pass(1500ms, hangs ? std::vector<std::uint64_t>{0, 1} : std::vector<std::uint64_t>{1});
    ASSERT_EQ(bench.coordinator.members().size(), 1u) << hangs;
    EXPECT_EQ(bench.coordinator.members()[0].replica, ReplicaId(1));
    ASSERT_EQ(bench.coordinator.suspended().size(), 1u) << "it may be taken back until the next commit";
    bench.reduced(1);
    EXPECT_EQ(bench.coordinator.committed(), Step(4));
  }
}

TEST(Coordinator, AJoinerThatHasCaughtUpIsNotOutForSilenceWhileNoContributorIsThere) {
  Bench bench;
  bench.start_with_a_joiner();
  bench.caught_up(1);
  bench.pass(5s, {});
  EXPECT_EQ(bench.coordinator.members().size(), 2u);
  bench.back(1, 11, 2);
  bench.caught_up(1);
  bench.pass(1100ms, {11});
  ASSERT_NO_FATAL_FAILURE(bench.expect_alone(1));
  bench.reduced(1, 11);
  EXPECT_EQ(bench.coordinator.committed(), Step(4));
}

// The contributor that waits for it has lost its daemon, and may be gone itself.
TEST(Coordinator, AJoinerThatHasCaughtUpIsNotOutForHangingWhileNoContributorIsThere) {
  Bench bench;
  bench.start_with_a_joiner();
  bench.caught_up(1);
  bench.accuse(0, 1);
  bench.keep(bench.coordinator.on_node_lost(NodeId(0), bench.now));
  bench.pass(500ms, {1});
  EXPECT_TRUE(bench.coordinator.suspended().empty());
  EXPECT_EQ(bench.coordinator.members().size(), 2u);
}

TEST(Coordinator, AJoinerMaySayAfterTheCoordinatorsRestartThatItHasCaughtUp) {
  for (const bool says : {true, false}) {
    Bench first;
    first.start_with_a_joiner();
    Bench bench(first.log);
    bench.lose_the_contributor_of(first);
    EXPECT_EQ(bench.contributors(), 0u);
    bench.back(1, 11, 2);
    for (std::uint32_t rank = 0; rank < bench.config.ranks; ++rank) bench.stand(1, rank, says);
    bench.pass(1500ms, {1, 11});
    ASSERT_EQ(bench.contributors(), says ? 1u : 0u);
    if (!says) continue;
    bench.reduced(1, 11);
    EXPECT_EQ(bench.coordinator.committed(), Step(4));
    EXPECT_EQ(rolled_back(bench.log).steps, 0u);
  }
}

TEST(Coordinator, AJoinerThatMayHaveCaughtUpIsWaitedForAfterTheCoordinatorsRestart) {
  for (const bool had : {true, false}) {
    Bench first;
    first.start_with_a_joiner();
    Bench bench(first.log);
    bench.lose_the_contributor_of(first);
    bench.back_with(1, 0, 11, 2);  // its other rank's daemon is silent for long
    bench.stand(1, 0, true, 11);
    bench.pass(10s, {11});
    EXPECT_EQ(bench.coordinator.blocked_on(), std::vector{ReplicaId(1)});
    EXPECT_TRUE(bench.waits_for("replica 1: it is silent"));
    bench.inbox[10].clear();  // replica 0 has lost a rank, and its other one heard of it
    EXPECT_FALSE(bench.evicted_anybody());
    bench.back_with(1, 1, 12, 2);
    bench.stand(1, 1, had, 12);
    bench.pass(500ms, {11, 12});
    ASSERT_EQ(bench.contributors(), had ? 1u : 0u);
    EXPECT_EQ(bench.evicted_anybody(), !had) << "with half a state it starts again";
    if (!had) continue;
    bench.reduced(1, 11);
    EXPECT_EQ(bench.coordinator.committed(), Step(4));
  }
}

TEST(Coordinator, AJoinerThatDoesNotComeBackAfterTheCoordinatorsRestartIsNoMember) {
  Bench first;
  first.start_with_a_joiner();
  Bench bench(first.log);
  bench.incarnations = first.incarnations;
  bench.back(0, 10);
  bench.pass(1500ms, {10});
  ASSERT_NO_FATAL_FAILURE(bench.expect_alone(0));
  EXPECT_EQ(bench.coordinator.members().size(), 1u);
}

// Nobody knows whether it had: it is given up at an operator's word, as a step that it may have is.
TEST(Coordinator, AJoinerThatOnlyMayHaveCaughtUpIsGivenUpAtAnOperatorsWord) {
  for (const bool told : {false, true}) {
    Bench first;
    first.start_with_a_joiner();
    Bench bench(first.log, {.roll_back_to = told ? std::optional<JobConfig::RollBack>(Step(0)) : std::nullopt});
    bench.lose_the_contributor_of(first);
    bench.pass(14s, {});
    EXPECT_EQ(bench.coordinator.blocked_on(), std::vector{ReplicaId(1)});
    bench.pass(3s, {});
    EXPECT_EQ(bench.coordinator.members().empty(), told);
  }
}

TEST(Coordinator, WhoIsOutForSilenceIsTakenBackWhenTheOthersDieBeforeTheNextCommit) {
  Bench bench;
  bench.start();
  bench.steps(1);
  const Batch its = *bench.coordinator.ledger().batch_of(ReplicaId(0));
  bench.pass(1500ms, {1, 2});
  ASSERT_EQ(bench.contributors(), 2u);
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  bench.inbox[0].clear();
  bench.down(1);
  bench.down(2);
  ASSERT_NO_FATAL_FAILURE(bench.expect_alone(0));
  EXPECT_EQ(*bench.coordinator.ledger().batch_of(ReplicaId(0)), its) << "its gradients are of these samples";
  bench.back(0, 10);
  bench.reduced(0, 10);
  EXPECT_EQ(bench.coordinator.committed(), Step(2));
}

TEST(Coordinator, AJoinerThatHasCaughtUpIsTakenBackWhereTheLastContributorIsSilentAfterIt) {
  for (const bool restarts : {false, true}) {
    Bench first;
    first.start_with_a_joiner();
    first.caught_up(1);
    first.pass(1500ms, {0, 2});
    ASSERT_EQ(first.coordinator.suspended().size(), 1u);
    EXPECT_EQ(first.coordinator.suspended()[0].replica, ReplicaId(1));
    Bench again(restarts ? first.log : std::vector<proto::LogRecord>{});
    Bench& bench = restarts ? again : first;
    bench.incarnations = first.incarnations;
    bench.inbox.clear();
    bench.pass(3s, {2});  // both are away
    EXPECT_EQ(bench.coordinator.blocked_on(), std::vector{ReplicaId(0)});
    bench.back(1, 11, 2);
    bench.pass(1100ms, {11});
    ASSERT_NO_FATAL_FAILURE(bench.expect_alone(1)) << restarts;
    EXPECT_FALSE(bench.evicted_anybody());
    bench.reduced(1, 11);
    EXPECT_EQ(bench.coordinator.committed(), Step(4));
  }
}

// The log knows that it has caught up, though it has not been heard since.
TEST(Coordinator, AJoinerThatHasCaughtUpIsNoneAfterTheCoordinatorsRestart) {
  Bench first;
  first.start_with_a_joiner();
  first.caught_up(1);
  Bench bench(first.log);
  bench.incarnations = first.incarnations;
  bench.back(0, 10);
  bench.pass(1500ms, {10});
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  bench.down(0);
  ASSERT_NO_FATAL_FAILURE(bench.expect_alone(1));
  EXPECT_EQ(bench.coordinator.blocked_on(), std::vector{ReplicaId(1)});
}

// Its state went with its process.
TEST(Coordinator, WhoIsOutForSilenceAndThenEndsIsNotTakenBack) {
  Bench bench;
  bench.start();
  bench.steps(1);
  bench.pass(1500ms, {0, 1});
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  bench.down(2);
  for (std::uint32_t r : {0u, 1u}) bench.down(r);
  EXPECT_TRUE(bench.coordinator.members().empty());
  EXPECT_TRUE(bench.coordinator.blocked_on().empty());
}

TEST(Coordinator, WhoIsOutForSilenceIsEvictedByTheCommitWithoutIt) {
  Bench bench;
  bench.start();
  bench.pass(1500ms, {1, 2});
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  bench.reduced(1);
  bench.reduced(2);
  EXPECT_EQ(bench.coordinator.committed(), Step(1));
  EXPECT_TRUE(bench.coordinator.suspended().empty());
  bench.back(0, 10);
  EXPECT_TRUE(bench.inbox[10].back().has_evicted());
}

TEST(Coordinator, WhoIsOutForNowIsKnownAfterTheCoordinatorsRestart) {
  Bench bench;
  bench.start();
  bench.steps(1);
  bench.pass(1500ms, {1, 2});
  Bench again(bench.log);
  again.incarnations = bench.incarnations;
  again.up(1, 7);
  again.up(2, 7);  // the other two were started again
  again.nobody_comes_back();
  ASSERT_EQ(again.contributors(), 1u);
  again.back(0, 10);
  again.reduced(0, 10);
  EXPECT_EQ(again.coordinator.committed(), Step(2));
}

TEST(Coordinator, WhoLeavesAFinishedJobMakesNoNewEpoch) {
  Bench bench({}, {.steps = 2});
  bench.start();
  bench.steps(2);
  ASSERT_TRUE(bench.coordinator.finished());
  const Epoch last = bench.coordinator.epoch();
  bench.accuse(0, 2, /*lost=*/true);
  bench.pass(3s, {0});
  EXPECT_EQ(bench.coordinator.epoch(), last);
}

TEST(Coordinator, WhoWasRegisteredBeforeTheFirstStartSurvivesTheCoordinatorsRestart) {
  Bench bench;
  bench.up(0);
  bench.up(1);
  Bench again(bench.log);
  again.incarnations = bench.incarnations;
  again.back(0, 0);
  again.back(1, 1);
  again.up(2);
  again.link_all();
  EXPECT_EQ(again.contributors(), 3u);
}

TEST(Coordinator, ALogWhoseSamplesDoNotFollowFromItsRecordsIsRefused) {
  Bench bench;
  bench.start();
  bench.steps(1);
  for (auto& record : bench.log)
    if (record.has_committed()) record.mutable_committed()->mutable_members(0)->mutable_batch(0)->set_begin(1);
  Coordinator other(bench.config);
  auto recovered = other.recover(bench.log, bench.now);
  ASSERT_FALSE(recovered);
  EXPECT_EQ(recovered.error().code, ErrorCode::corrupt);
}

TEST(Coordinator, AfterItsRestartNobodyIsAnnouncedBeforeAllMembersAreBack) {
  Bench bench;
  bench.start();
  Bench again(bench.log);
  again.incarnations = bench.incarnations;
  const auto back = [&](std::uint32_t replica) { again.back(replica, replica); };
  const auto announced = [&] {
    return std::any_of(again.inbox[0].begin(), again.inbox[0].end(), [](const auto& m) { return m.has_peers(); });
  };
  back(0);
  back(1);
  EXPECT_FALSE(announced()) << "replicas 0 and 1 would fence replica 2";
  back(2);
  EXPECT_TRUE(announced());
  EXPECT_EQ(again.coordinator.members().size(), 3u);
  for (std::uint32_t r : {0u, 1u, 2u}) again.reduced(r);
  EXPECT_EQ(again.coordinator.committed(), Step(1));
}

TEST(Coordinator, ALogOfAnotherJobIsRefused) {
  Bench bench;
  bench.start();
  proto::LogRecord job;
  job.mutable_job()->set_replicas(5);
  Coordinator other(bench.config);
  auto recovered = other.recover({job}, bench.now);
  ASSERT_FALSE(recovered);
  EXPECT_EQ(recovered.error().code, ErrorCode::mismatch);
}

}  // namespace
}  // namespace rejoin::membership
