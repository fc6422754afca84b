#include "membership/announcer.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {
namespace {

using namespace std::chrono_literals;

constexpr TimePoint kMorning{100s};

RankSet both_ranks() {
  RankSet ranks;
  ranks.add(0, 2);
  return ranks;
}

// A job of replicas of two ranks, each behind its own node, of the same number as the replica.
struct Told {
  Announcer announcer;
  Announcer::Nodes nodes;
  Replicas replicas;

  explicit Told(std::uint32_t there, std::uint32_t of = 4) : announcer(of, 2, 1s) {
    for (std::uint32_t number = 0; number < there; ++number) {
      nodes[NodeId(number)].hosts = both_ranks();
      ReplicaState& replica = replicas[ReplicaId(number)];
      replica.incarnation = Incarnation(number + 1);
      replica.registered = 2;
      replica.ranks.resize(2);
      for (auto& rank : replica.ranks) rank.node = NodeId(number), rank.texts = RankTexts({"a", "s", "", "", "n"});
    }
  }
};

TEST(Announcer, NodesThatHostTheSameRanksGetOneMessageWithAllOfTheirPeers) {
  Told job(3);
  job.nodes[NodeId(2)].hosts = RankSet(1);
  const auto messages = job.announcer.all(job.nodes, job.replicas);
  ASSERT_EQ(messages.size(), 2u);
  for (const auto& [nodes, message] : messages) {
    const bool of_both = nodes.size() == 2;
    EXPECT_EQ(message.peers().peers_size(), of_both ? 6 : 3);
    EXPECT_EQ(RankSet(message.peers().complete(), 2).size(), of_both ? 2u : 1u);
  }
}

TEST(Announcer, AReplicaThatHasNotComeWhollyIsNotNamed) {
  Told job(3);
  job.replicas.at(ReplicaId(1)).registered = 1;
  const auto messages = job.announcer.all_peers({NodeId(0)}, both_ranks(), job.replicas);
  ASSERT_EQ(messages.size(), 1u);
  for (const auto& peer : messages[0].second.peers().peers()) EXPECT_NE(peer.replica(), 1u);
  EXPECT_EQ(messages[0].second.peers().peers_size(), 4);
}

TEST(Announcer, NewsOfARankGoToNodesThatHostItsPeersAndAreNotLeftOut) {
  Told job(4);
  job.nodes[NodeId(1)].hosts = RankSet(0);
  const auto messages =
      job.announcer.news(ReplicaId(0), job.replicas.at(ReplicaId(0)), RankSet(1), job.nodes, {NodeId(3)});
  ASSERT_EQ(messages.size(), 1u);
  const auto& [nodes, message] = messages[0];
  EXPECT_EQ(nodes, (std::vector{NodeId(0), NodeId(2)}));
  ASSERT_EQ(message.peers().peers_size(), 1);
  EXPECT_EQ(message.peers().peers(0).rank(), 1u);
  EXPECT_EQ(message.peers().peers(0).address(), "a");
  EXPECT_TRUE(message.peers().complete().empty());
}

TEST(Announcer, WhatIsPendingIsTakenOnceAndGoesWithItsConnection) {
  Told job(3);
  for (auto node : {NodeId(0), NodeId(1), NodeId(2)}) job.announcer.add_pending(node, RankSet(0), kMorning);
  job.announcer.add_pending(NodeId(1), RankSet(1), kMorning);
  job.announcer.add_pending_plan(NodeId(2), kMorning);
  job.announcer.forget(NodeId(0));
  const auto pending = job.announcer.take_pending(kMorning);
  ASSERT_EQ(pending.of_ranks.size(), 2u);
  EXPECT_EQ(pending.of_ranks.at(both_ranks()), std::vector{NodeId(1)});
  EXPECT_EQ(pending.of_ranks.at(RankSet(0)), std::vector{NodeId(2)});
  EXPECT_EQ(pending.of_plan, std::vector{NodeId(2)});
  EXPECT_TRUE(job.announcer.take_pending(kMorning).of_ranks.empty());
}

TEST(Announcer, WhoHasBeenToldAllHasOnlyThePlanPending) {
  Told job(2);
  job.announcer.add_pending(NodeId(0), both_ranks(), kMorning);
  job.announcer.add_pending_plan(NodeId(0), kMorning);
  (void)job.announcer.all(job.nodes, job.replicas);
  const auto pending = job.announcer.take_pending(kMorning);
  EXPECT_TRUE(pending.of_ranks.empty());
  EXPECT_EQ(pending.of_plan, std::vector{NodeId(0)});
}

TEST(Announcer, OfManyThatComeTheFirstAreToldAtOnceAndTheOthersWithATickWhenNoMoreCome) {
  Told few(2), many(2, 1000);
  many.announcer.add_pending(NodeId(0), both_ranks(), kMorning);
  EXPECT_TRUE(many.announcer.flushes_at_once(kMorning));
  (void)many.announcer.take_pending(kMorning);
  (void)few.announcer.take_pending(kMorning);
  many.announcer.add_pending(NodeId(1), both_ranks(), kMorning + 1ms);
  EXPECT_TRUE(few.announcer.flushes_at_once(kMorning + 1ms));
  EXPECT_FALSE(many.announcer.flushes_at_once(kMorning + 1ms));
  EXPECT_FALSE(many.announcer.flushes_with_tick(kMorning + 2ms, false)) << "more may come";
  EXPECT_TRUE(many.announcer.flushes_with_tick(kMorning + 20ms, false));
  EXPECT_FALSE(many.announcer.flushes_with_tick(kMorning + 20ms, true));
  EXPECT_TRUE(many.announcer.flushes_with_tick(kMorning + 250ms, true)) << "they have waited for long";
}

// Its address may change while it runs: its own daemon says so, over the same connection or another one.
TEST(Coordinator, OthersHearOfTheAddressThatARunningMemberHasByNow) {
  Bench bench;
  const auto up = [&](std::uint32_t replica, std::uint64_t node, const std::string& address,
                      std::uint64_t incarnation) {
    for (std::uint32_t number = 0; number < 2; ++number) {
      proto::FromNode message;
      auto& rank = *message.mutable_rank_up();
      rank.set_replica(replica);
      rank.set_rank(number);
      rank.set_instance(10 * replica + number + 1);
      rank.set_incarnation(incarnation);
      rank.set_plan_hash(9);
      rank.set_address(address);
      rank.set_stream_address(address);
      bench.send(node, message);
    }
  };
  const auto told = [&](std::uint64_t node, std::uint32_t replica) {
    std::map<std::uint32_t, std::string> last;  // by rank
    for (const auto& message : bench.inbox[node])
      for (const auto& peer : message.peers().peers())
        if (peer.replica() == replica) last[peer.rank()] = peer.address() + " " + peer.stream_address();
    return last;
  };
  using Addresses = std::map<std::uint32_t, std::string>;
  up(0, 0, "a", 0);
  up(1, 1, "b", 0);
  ASSERT_EQ(told(0, 1), (Addresses{{0, "b b"}, {1, "b b"}}));
  const auto registered = std::ranges::find_if(bench.inbox[1], &proto::ToNode::has_registered);
  ASSERT_NE(registered, bench.inbox[1].end());
  const auto incarnation = registered->registered().incarnation();
  up(1, 1, "c", incarnation);
  EXPECT_EQ(told(0, 1), (Addresses{{0, "c c"}, {1, "c c"}}));
  up(1, 7, "d", incarnation);
  EXPECT_EQ(told(0, 1), (Addresses{{0, "d d"}, {1, "d d"}}));
  up(2, 9, "e", 0);
  EXPECT_EQ(told(9, 1), (Addresses{{0, "d d"}, {1, "d d"}})) << "who comes later";
}

}  // namespace
}  // namespace rejoin::membership
