// Who has a place in the job, of those who are heard through relays.
#include "membership/relay.h"
#include "membership/tests/rivals.h"

namespace rejoin::membership {
namespace {

// A relay that had stopped following this coordinator follows it again: what ended meanwhile nobody says.
TEST(Coordinator, WhomARelayDoesNotSpeakForAgainIsGoneAfterASilenceAlsoWhereItsConnectionStayed) {
  for (const bool spoken_for : {false, true}) {
    Rivals job;
    proto::FromNode hello;
    hello.mutable_hello()->set_node("relay");
    hello.mutable_hello()->set_relay(true);
    job.send(1, hello);
    for (std::uint32_t rank : {0u, 1u}) job.send(1, Rivals::of(1, rank, 1, 501));
    job.second();
    EXPECT_TRUE(job.asked());
    job.inbox.clear();
    job.send(1, hello);
    job.second();
    EXPECT_FALSE(job.asked()) << "it could not answer";
    if (spoken_for)
      for (std::uint32_t rank : {0u, 1u}) job.send(1, Rivals::of(1, rank, 1, 501));
    job.pass(900ms, {0, 1, 2, 9});
    EXPECT_EQ(job.asked(), spoken_for);
    EXPECT_FALSE(job.registered()) << "the first may come back";
    job.pass(300ms, {0, 1, 2, 9});
    EXPECT_EQ(job.registered(), !spoken_for);
  }
}

// It is asked where they stand, and has forgotten nobody.
TEST(Coordinator, ARelayThatIsAskedToIntroduceItselfAgainSpeaksForItsRanksMeanwhile) {
  Bench bench;
  bench.start();
  const std::uint64_t behind = 11;
  Relay relay("relay", bench.config.silence);
  const auto says = [&](const Relay::Actions& actions) {
    for (const auto& message : actions.to_coordinator) bench.send(behind, message);
  };
  says(relay.on_coordinator_up(bench.now));
  for (std::uint32_t r : {1u, 2u}) bench.back(r, behind);  // which node 1 and 2 have said of themselves before
  bench.keep(bench.coordinator.on_node_lost(NodeId(1), bench.now));
  ASSERT_TRUE(bench.inbox[behind].back().has_introduce());
  says(relay.on_coordinator_message(bench.inbox[behind].back(), bench.now));
  for (std::uint32_t r : {1u, 2u})
    for (const auto& rank : bench.coordinator.replicas().at(ReplicaId(r)).ranks) EXPECT_TRUE(rank.connected_node);
}

// What a relay says when a daemon has not come back to it in time.
proto::FromNode not_back(std::uint32_t replica, std::uint32_t rank, std::uint64_t instance = 1) {
  proto::FromNode message;
  auto& down = *message.mutable_rank_down();
  down.set_replica(replica);
  down.set_rank(rank);
  down.set_instance(instance * 100 + rank);
  down.set_reason("its daemon did not come back in time");
  return message;
}

TEST(Coordinator, WhoHasGoneToAnotherRelayIsNotSilentBecauseItDidNotComeBackToTheFirst) {
  for (const bool last : {false, true}) {
    Bench bench;
    bench.start();
    bench.steps(1);
    if (last) bench.down(0), bench.down(2);
    const std::uint64_t before = 1, next = 11;
    bench.back(1, next);
    const auto epoch = bench.coordinator.epoch();
    for (std::uint32_t rank : {0u, 1u}) bench.send(before, not_back(1, rank));
    bench.pass(3s, {0, before, 2, next});
    EXPECT_EQ(bench.coordinator.epoch(), epoch);
    EXPECT_EQ(bench.contributors(), last ? 1u : 3u);
    EXPECT_TRUE(bench.coordinator.blocked_on().empty());
    bench.send(next, not_back(1, 0));
    bench.pass(bench.config.silence / 16, {0, before, 2, next});
    if (last) EXPECT_EQ(bench.coordinator.blocked_on(), std::vector{ReplicaId(1)});
    else EXPECT_EQ(bench.contributors(), 2u) << "that is where it was";
  }
}

// It is no member, and nobody would tell it that it is no longer registered.
TEST(Coordinator, WhoWaitsForItsAdmissionStaysRegisteredWhereItHasGoneToAnotherRelay) {
  Bench bench;
  bench.start();
  bench.steps(1);
  bench.down(1);
  bench.up(1, 2);
  bench.back(1, 11, 2);
  for (std::uint32_t rank : {0u, 1u}) bench.send(1, not_back(1, rank, 2));
  bench.link_all();
  for (std::uint32_t rank : {0u, 1u}) bench.stand(1, rank, false, 11);
  for (auto replica : {0u, 2u}) bench.reduced(replica);
  EXPECT_EQ(bench.coordinator.members().size(), 3u);
}

// Found by the property of random faults: a relay that had not noticed spoke for it, and what its next one had said was
// not said again.
TEST(Coordinator, WhereARankStandsIsSaidByTheRelayThatItIsBehindNow) {
  Bench bench;
  for (std::uint32_t r : {0u, 1u, 2u}) bench.up(r);
  bench.back(1, 11);
  for (std::uint32_t r : {0u, 2u})
    for (std::uint32_t rank : {0u, 1u}) bench.stand(r, rank, false);
  bench.stand(1, 1, false, 11);
  const auto all = bench.incarnations;
  bench.incarnations.erase(2);
  bench.stand(1, 1, false);  // as of before there was replica 2
  bench.incarnations = all;
  bench.stand(1, 0, false, 11);
  EXPECT_EQ(bench.contributors(), 3u);
}

// … which says it once, also where the rank was heard through the other one meanwhile.
TEST(Coordinator, WhatARelayHasSaidOfARankCountsWhenItIsHeardThroughThatAgain) {
  Bench bench;
  for (std::uint32_t r : {0u, 1u, 2u}) bench.up(r);
  bench.back(1, 11);
  bench.back(1, 1);  // which it had said before
  for (std::uint32_t rank : {0u, 1u}) {
    for (std::uint32_t r : {0u, 2u}) bench.stand(r, rank, false);
    bench.stand(1, rank, false, 11);
  }
  EXPECT_EQ(bench.contributors(), 0u);
  bench.back(1, 11);
  EXPECT_EQ(bench.contributors(), 3u);
}

TEST(Coordinator, WhoseReplicaIsOutHearsItWhereverItStands) {
  Rivals job;
  for (std::uint64_t node : {12, 1}) job.back_with(1, 1, node, 1);  // what it has said before is heard last
  job.down(1, 1, 0);
  for (std::uint64_t node : {12, 1})
    EXPECT_TRUE(std::ranges::any_of(job.inbox[node], [](const auto& sent) { return sent.has_evicted(); })) << node;
}

TEST(Coordinator, WhoAsksForAPlaceSaysSoAgainWhenTheRelayThatItHasLeftTakesItForSilent) {
  Rivals job;
  job.second();
  job.send(10, Rivals::of(1, 0, 2, 509));  // as it had said before
  job.send(10, not_back(1, 0, 2));
  EXPECT_TRUE(std::ranges::any_of(job.inbox[9], [](const auto& sent) { return sent.has_introduce(); }));
}

TEST(Coordinator, WhoAsksForAPlaceThroughAnotherRelayIsNotForgottenBecauseItDidNotComeBackToTheFirst) {
  Rivals job;
  job.second();
  job.send(10, Rivals::of(1, 0, 2, 509));
  job.send(9, not_back(1, 0, 2));
  job.down(1, 1, 0);
  EXPECT_TRUE(job.Bench::registered(10));
}

// What it sent through the one that it has left was heard last.
TEST(Coordinator, WhoWasHeardThroughTwoRelaysSaysWhereItStandsWhenItIsSilentInOne) {
  Bench bench;
  bench.start();
  const std::uint64_t before = 1, next = 11;
  bench.back(1, next);
  bench.back(1, before);
  bench.inbox.clear();
  for (std::uint32_t rank : {0u, 1u}) bench.send(before, not_back(1, rank));
  ASSERT_TRUE(bench.inbox.contains(next));
  EXPECT_TRUE(bench.inbox[next].back().has_introduce());
  bench.pass(500ms, {0, before, 2, next});
  bench.back(1, next);
  bench.pass(3s, {0, before, 2, next});
  EXPECT_EQ(bench.contributors(), 3u);
}

}  // namespace
}  // namespace rejoin::membership
