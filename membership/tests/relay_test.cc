// What a relay passes on of what ranks say of others and of themselves.
#include "membership/relay.h"

#include <gtest/gtest.h>

namespace rejoin::membership {
namespace {

using namespace std::chrono_literals;

struct Ranks {
  Relay relay{"relay", 1600ms};
  TimePoint now = TimePoint{} + 1h;

  Ranks() {
    relay.on_coordinator_up(now);
    for (std::uint64_t rank = 0; rank < 8; ++rank) {
      proto::FromNode hello;
      hello.mutable_hello()->set_node("daemon");
      relay.on_node_message(NodeId(rank), hello, now);
    }
    proto::ToNode plan;
    plan.mutable_plan()->set_epoch(3);
    relay.on_coordinator_message(plan, now);
  }
  // How many messages go up for this one.
  std::size_t send(std::uint32_t rank, std::uint32_t suspect, bool excused, std::uint64_t epoch = 3) {
    proto::FromNode message;
    auto& accusation = *message.mutable_accusation();
    accusation.set_replica(1);
    accusation.set_rank(rank);
    accusation.set_epoch(epoch);
    accusation.set_suspect(suspect);
    accusation.set_only_waiting(true);
    accusation.set_excused(excused);
    return relay.on_node_message(NodeId(rank), message, now).to_coordinator.size();
  }
};

TEST(Relay, OfRanksThatWaitForAnotherReplicaTheFirstSpeaksForAll) {
  Ranks ranks;
  EXPECT_EQ(ranks.send(0, 2, false), 1u);
  EXPECT_EQ(ranks.send(1, 2, false), 0u);
  ranks.now += 1s;
  EXPECT_EQ(ranks.send(0, 2, false), 0u);
  EXPECT_EQ(ranks.send(0, 2, false, 2), 0u) << "of an epoch that is over";
}

// Whoever hears of it no more judges: so it is passed on for as long as it is said, but not of each rank.
TEST(Relay, WhatAReplicaSaysOfItselfIsPassedOnAgainAndAgainOfAnyRank) {
  Ranks ranks;
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(ranks.send(0, 1, true), 1u) << i;
    for (std::uint32_t rank = 1; rank < 8; ++rank) EXPECT_EQ(ranks.send(rank, 1, true), 0u) << rank;
    EXPECT_EQ(ranks.send(3, 1, false), 1u) << "another thing, " << i;
    ranks.now += 100ms;
  }
}

// Of all of a replica's ranks, which are behind several daemons: not known where one of them doesn't say.
TEST(Relay, ReportsTheLongestThatAReplicasRanksHaveComputed) {
  Ranks ranks;
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    proto::FromNode message;
    auto& up = *message.mutable_rank_up();
    up.set_replica(1);
    up.set_rank(rank);
    up.set_instance(rank + 1);
    up.set_incarnation(5);
    (void)ranks.relay.on_node_message(NodeId(rank), message, ranks.now);
  }
  const auto reported = [&](std::uint64_t step, const std::vector<std::uint64_t>& us) {
    std::vector<proto::FromNode> up;
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      EXPECT_TRUE(up.empty());
      proto::FromNode message;
      auto& reduced = *message.mutable_reduced();
      reduced.set_replica(1);
      reduced.set_incarnation(5);
      reduced.set_epoch(3);
      reduced.set_step(step);
      reduced.set_compute_us(us[rank]);
      RankSet(rank).to(reduced.mutable_ranks());
      up = ranks.relay.on_node_message(NodeId(rank), message, ranks.now).to_coordinator;
    }
    return up.at(0).reduced().compute_us();
  };
  EXPECT_EQ(reported(1, {4000, 9000, 5000}), 9000u);
  EXPECT_EQ(reported(2, {4000, 3000, 2000}), 4000u);
  EXPECT_EQ(reported(3, {4000, 0, 2000}), 0u);
}

}  // namespace
}  // namespace rejoin::membership
