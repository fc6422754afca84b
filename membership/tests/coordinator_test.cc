// How a job starts, commits, loses and takes back replicas.
#include "base/text.h"
#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {
namespace {

TEST(Coordinator, StartsWhenAllReplicasHaveRegisteredAndAreConnected) {
  Bench bench;
  bench.up(0);
  bench.up(1);
  EXPECT_FALSE(bench.coordinator.started());
  bench.up(2);
  EXPECT_FALSE(bench.coordinator.started());
  bench.link_all();
  ASSERT_TRUE(bench.coordinator.started());
  EXPECT_EQ(bench.contributors(), 3u);
}

TEST(Coordinator, WhoDiffersAtTheStartCatchesUpFromTheMostAdvanced) {
  Bench bench;
  bench.up(0, 1, 7, 5);
  bench.up(1, 1, 3, 4);
  bench.up(2, 1, 7, 5);
  bench.link_all();
  ASSERT_TRUE(bench.coordinator.started());
  EXPECT_EQ(bench.coordinator.committed(), Step(7));
  EXPECT_EQ(bench.contributors(), 2u);
  EXPECT_TRUE(bench.coordinator.members()[1].catching_up);
}

TEST(Coordinator, ALostReplicaIsAWarningAndOneThatLeavesIsNot) {
  Bench bench;
  bench.start();
  EXPECT_EQ(bench.warnings, "");
  bench.down(0);
  EXPECT_NE(bench.warnings.find("replica 0 is out: "), std::string::npos) << bench.warnings;
  bench.warnings.clear();
  proto::FromNode message;
  auto& gone = *message.mutable_rank_down();
  gone.set_replica(1);
  gone.set_instance(100);
  gone.set_ended(true);
  gone.set_left(true);
  gone.set_reason("it was asked to");
  bench.send(1, message);
  EXPECT_EQ(bench.warnings, "");
  EXPECT_NE(bench.news.find("replica 1 is out: rank 0 has left: it was asked to"), std::string::npos) << bench.news;
}

TEST(Coordinator, CommitsWhenEveryRankOfEveryMemberHasReduced) {
  Bench bench;
  bench.start();
  bench.reduced(0);
  bench.reduced(1);
  EXPECT_EQ(bench.coordinator.committed(), Step(0));
  bench.reduced(2);
  EXPECT_EQ(bench.coordinator.committed(), Step(1));
  EXPECT_TRUE(bench.log.back().has_committed());
}

TEST(Coordinator, ALostMemberMeansTheSameStepInTheNextEpochAndItsSamplesAgainLater) {
  Bench bench;
  bench.start();
  bench.reduced(0);
  const Epoch before = bench.coordinator.epoch();
  bench.down(1);
  EXPECT_EQ(bench.coordinator.epoch(), before.next());
  EXPECT_EQ(bench.coordinator.committed(), Step(0));
  EXPECT_EQ(bench.contributors(), 2u);
  bench.reduced(0);
  bench.reduced(2);
  EXPECT_EQ(bench.coordinator.committed(), Step(1));
  EXPECT_EQ(*bench.coordinator.ledger().batch_of(ReplicaId(0)), (Batch{{10, 20}}));
}

const proto::Plan& last_plan(Bench& bench, std::uint64_t node) {
  const auto& told = bench.inbox[node];
  return std::find_if(told.rbegin(), told.rend(), [](const auto& message) { return message.has_plan(); })->plan();
}

// Its leader is lost in the step, in which some ranks of the others may have begun and others not.
TEST(Coordinator, WhoLeadsAStepIsToldAlikeInAllItsEpochsAlsoByACoordinatorThatIsStartedInIt) {
  Bench bench;
  bench.start();
  EXPECT_EQ(last_plan(bench, 1).leader(), 0u);
  bench.steps(1);
  bench.down(0);
  const auto leads_still = [](Bench& its) {
    const auto& plan = last_plan(its, 1);
    EXPECT_EQ(plan.step(), 2u);
    return plan.has_leader() && plan.leader() == 0;
  };
  EXPECT_TRUE(leads_still(bench));
  for (const auto& log : {bench.log, std::vector{bench.coordinator.snapshot()}}) {
    Bench restarted(log);
    restarted.incarnations = bench.incarnations;
    restarted.back(1, 1), restarted.back(2, 2);
    EXPECT_TRUE(leads_still(restarted));
  }
  bench.reduced(1), bench.reduced(2);
  EXPECT_EQ(last_plan(bench, 1).step(), 3u);
  EXPECT_EQ(last_plan(bench, 1).leader(), 1u);
}

std::map<std::uint32_t, std::uint64_t> weights(Bench& bench) {
  std::map<std::uint32_t, std::uint64_t> weights;
  for (const auto& member : last_plan(bench, 0).members()) {
    weights[member.replica()] = member.weight();
    EXPECT_EQ(member.weight(), samples_of(batch_of(member)));
  }
  return weights;
}

// The survivors take the samples of those who are lost, from the next step on, and give them back when these have
// caught up; a coordinator that starts from the log at any time goes on with the same.
TEST(Coordinator, AConstantBatchIsSharedByThoseWhoContribute) {
  using Weights = std::map<std::uint32_t, std::uint64_t>;
  Bench bench({}, {.constant_batch = true});
  const auto recovered_alike = [&] {
    Bench other(bench.log, {.constant_batch = true});
    EXPECT_EQ(other.coordinator.ledger(), bench.coordinator.ledger());
    Coordinator from_snapshot(bench.config);
    EXPECT_TRUE(from_snapshot.recover({bench.coordinator.snapshot()}, bench.now));
    EXPECT_EQ(from_snapshot.ledger(), bench.coordinator.ledger());
  };
  bench.start();
  EXPECT_EQ(weights(bench), (Weights{{0, 10}, {1, 10}, {2, 10}}));
  bench.down(1);
  EXPECT_EQ(weights(bench), (Weights{{0, 10}, {2, 10}})) << "they have begun";
  recovered_alike();
  bench.reduced(0), bench.reduced(2);
  EXPECT_EQ(weights(bench), (Weights{{0, 16}, {2, 14}})) << "in units of one for each of two ranks";
  recovered_alike();
  bench.up(1, 2);
  bench.link_all();
  bench.reduced(0), bench.reduced(2);
  EXPECT_EQ(weights(bench), (Weights{{0, 16}, {1, 0}, {2, 14}}));
  for (std::uint32_t rank : {0u, 1u}) bench.stand(1, rank, true);
  recovered_alike();
  bench.reduced(0), bench.reduced(2), bench.reduced(1);
  EXPECT_EQ(weights(bench), (Weights{{0, 10}, {1, 10}, {2, 10}}));
  recovered_alike();
  bench.steps(1);
  recovered_alike();
  const auto committed = bench.log.back().committed();
  for (const auto& member : committed.members()) EXPECT_EQ(member.weight(), 10u);
  Coordinator without(JobConfig{.replicas = 3, .ranks = 2, .batch = 10, .id = 77});
  const auto refused = without.recover(bench.log, bench.now);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("with --constant-batch"), std::string::npos) << refused.error().message;
}

// So that shards which divide a replica's ranks and its batch divide every share.
TEST(Coordinator, SamplesAreSharedInUnitsThatRanksAndBatchHaveInCommonAndALogSaysInWhich) {
  const auto unit = [](std::uint32_t ranks, std::uint64_t batch) {
    return JobConfig{.replicas = 3, .ranks = ranks, .batch = batch}.dealing().unit;
  };
  EXPECT_EQ(unit(8, 4), 4u);
  EXPECT_EQ(unit(4, 6), 2u);
  EXPECT_EQ(unit(2, 10), 2u);
  EXPECT_EQ(unit(3, 10), 1u);
  Bench bench({}, {.constant_batch = true});
  bench.start();
  auto log = bench.log;
  const auto recovered = [&](std::uint32_t told) {
    log.front().mutable_job()->set_unit(told);
    Coordinator other(bench.config);
    const auto done = other.recover(log, bench.now);
    return done ? std::to_string(other.ledger().unit()) : done.error().message;
  };
  EXPECT_EQ(log.front().job().unit(), 2u);
  EXPECT_EQ(recovered(5), "5");
  EXPECT_EQ(recovered(0), "2") << "an older log";
  EXPECT_EQ(recovered(3), "the log's unit, 3, does not divide its batch");
}

TEST(Coordinator, AReplicaComesBackAsCatchingUpAndContributesWhenAllItsRanksAreReady) {
  Bench bench;
  bench.start();
  bench.down(1);
  bench.up(1, 2);
  bench.link_all();
  EXPECT_EQ(bench.coordinator.members().size(), 2u) << "admission waits for the step boundary";
  bench.reduced(0);
  bench.reduced(2);
  ASSERT_EQ(bench.coordinator.members().size(), 3u);
  EXPECT_EQ(bench.contributors(), 2u);
  for (std::uint32_t rank : {0u, 1u}) {
    bench.reduced(0), bench.reduced(2), bench.reduced(1);
    EXPECT_EQ(bench.contributors(), 2u);
    bench.stand(1, rank, true);
  }
  bench.reduced(0), bench.reduced(2), bench.reduced(1);
  EXPECT_EQ(bench.contributors(), 3u);
}

TEST(Coordinator, StaleReportsOfAnEarlierEpochDecideNothing) {
  Bench bench;
  bench.start();
  proto::FromNode stale;
  stale.mutable_reduced()->set_replica(0);
  stale.mutable_reduced()->set_epoch(bench.coordinator.epoch().value);
  stale.mutable_reduced()->set_step(1);
  stale.mutable_reduced()->set_incarnation(bench.incarnations[0]);
  for (std::uint32_t rank : {0u, 1u}) RankSet(rank).to(stale.mutable_reduced()->mutable_ranks());
  bench.down(1);
  bench.send(0, stale);
  bench.reduced(2);
  EXPECT_EQ(bench.coordinator.committed(), Step(0));
}

TEST(Coordinator, AnotherPlanOrAPlaceOutsideTheJobIsRefusedWithTheReason) {
  Bench bench;
  bench.start();
  bench.down(1);
  bench.up(1, 2, 0, 5, /*plan=*/10);
  bench.pass(600ms);
  EXPECT_NE(bench.refusal(1).find("tensors or buckets differ from those of rank 1 of replicas 0, 2"),
            std::string::npos);
  bench.up(7);
  EXPECT_TRUE(bench.inbox[7].back().has_refused());
}

// A record that is too large for the log would end the coordinator.
TEST(Coordinator, WhatAPeerSaysIsTheReasonIsCutBeforeItGoesIntoTheLog) {
  std::string endless = "x";  // so that the limits are within a character
  while (endless.size() < 1 * MiB) endless += "ä";
  Bench bench;
  for (std::uint32_t replica = 0; replica < 3; ++replica)
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      auto up = Bench::introduction(replica, rank, 1);
      up.mutable_rank_up()->set_settings(endless);
      bench.send(replica, up);
    }
  bench.link_all();
  ASSERT_EQ(bench.contributors(), 3u);
  proto::FromNode accusation, gone;
  auto& a = *accusation.mutable_accusation();
  a.set_epoch(bench.coordinator.epoch().value);
  a.set_suspect(2);
  a.set_what(endless);
  bench.send(0, accusation);
  bench.pass(300ms);
  ASSERT_EQ(bench.contributors(), 2u);
  auto& down = *gone.mutable_rank_down();
  down.set_replica(1);
  down.set_instance(100);
  down.set_reason(endless);
  down.set_ended(true);
  bench.send(1, gone);
  ASSERT_EQ(bench.contributors(), 1u);
  for (const auto& record : bench.log) {
    EXPECT_LT(record.ByteSizeLong(), 5 * KiB);
    EXPECT_TRUE(is_utf8(record.epoch().reason()) && is_utf8(record.declared().settings()));
  }
  EXPECT_NE(bench.log.back().epoch().reason().find("without replica 1: rank 0: xää"), std::string::npos);
}

// A relay says of each rank that its daemon is silent; the ring of an epoch with one of them in it could not work.
TEST(Coordinator, ReplicasThatAreSilentTogetherAreOutInOneEpoch) {
  Bench bench;
  bench.start();
  const auto before = bench.coordinator.epoch().value;
  for (std::uint32_t replica : {0u, 1u})
    for (std::uint32_t rank : {0u, 1u}) {
      proto::FromNode silent;
      auto& down = *silent.mutable_rank_down();
      down.set_replica(replica);
      down.set_rank(rank);
      down.set_instance(100 + rank);
      down.set_reason("its daemon did not come back in time");
      bench.send(replica, silent);
    }
  bench.keep(bench.coordinator.on_tick(bench.now += bench.config.silence / 16));
  EXPECT_EQ(bench.coordinator.epoch().value, before + 1);
  bench.expect_alone(2);
}

TEST(Coordinator, ADaemonHasItsSilenceToComeBackBeforeItsReplicaIsOut) {
  Bench bench;
  bench.start();
  bench.keep(bench.coordinator.on_node_lost(NodeId(1), bench.now));
  bench.pass(900ms, {0, 2});
  EXPECT_EQ(bench.coordinator.members().size(), 3u);
  bench.pass(200ms, {0, 2});
  EXPECT_EQ(bench.coordinator.members().size(), 2u);
}

// Found by the simulator: it was heard again over the same connection, and its ranks were never registered again.
TEST(Coordinator, ANodeThatWasSilentMustConnectAnew) {
  Bench bench;
  bench.start();
  for (int i = 0; i < 30; ++i) {
    bench.now += bench.config.silence / 16;
    for (std::uint64_t node : {0, 1}) {
      proto::FromNode heartbeat;
      heartbeat.mutable_heartbeat();
      bench.send(node, heartbeat);
    }
    bench.keep(bench.coordinator.on_tick(bench.now));
  }
  EXPECT_EQ(bench.closed, std::vector<std::uint64_t>{2});
}

// Found by the simulator: joiners were sent to the address of a daemon that was no more.
TEST(Coordinator, ARankThatNeverHeardItsAnswerIsKnownByItsNewDaemonsAddress) {
  Bench bench;
  const auto up = [&](std::uint32_t number, std::uint64_t node, const std::string& address) {
    proto::FromNode message;
    auto& rank = *message.mutable_rank_up();
    rank.set_rank(number);
    rank.set_instance(77);
    rank.set_plan_hash(9);
    rank.set_stream_address(address);
    rank.set_passes_on(address == "new");
    bench.send(node, message);
  };
  up(0, 0, "old");
  up(0, 5, "new");
  up(1, 6, "other");
  const auto& peers = bench.inbox[5].back().peers().peers();
  ASSERT_EQ(peers.size(), 1);
  EXPECT_EQ(peers[0].stream_address(), "new");
  EXPECT_TRUE(peers[0].passes_on());
}

}  // namespace
}  // namespace rejoin::membership
