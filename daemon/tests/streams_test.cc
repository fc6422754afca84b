// Whom a joiner's stream asks, as the plan says.
#include "daemon/streams.h"

#include <gtest/gtest.h>

namespace rejoin::daemon {
namespace {

constexpr std::uint64_t kJob = 7;

// The daemon of replica 2's rank 0, which catches up, in a job of two contributors and more joiners.
struct JoiningRank {
  membership::Node node{"n", std::chrono::seconds(2), 1};
  proto::ToNode plan, peers;
  Location here;

  JoiningRank() {
    plan.mutable_plan()->set_job(kJob);
    plan.mutable_plan()->set_epoch(3);
    peers.mutable_peers()->set_job(kJob);
    proto::FromNode up;
    auto& rank = *up.mutable_rank_up();
    rank.set_replica(2);
    rank.set_instance(5);
    rank.set_incarnation(102);
    rank.set_job(kJob);
    rank.set_passes_on(true);
    (void)node.on_rank_message(membership::RankConnection(1), up, {});
    for (std::uint32_t replica = 0; replica < 2; ++replica) member(replica, false, true);
    member(2, true, true);
  }
  void member(std::uint32_t replica, bool catching_up, bool passes_on, const std::string& family = "tcp",
              const std::string& location = "") {
    auto& member = *plan.mutable_plan()->add_members();
    member.set_replica(replica);
    member.set_incarnation(100 + replica);
    member.set_catching_up(catching_up);
    auto& peer = *peers.mutable_peers()->add_peers();
    peer.set_replica(replica);
    peer.set_incarnation(100 + replica);
    peer.set_stream_address(stream_address(family, "here"));
    peer.set_passes_on(passes_on);
    peer.set_location(location);
  }
  LocalStream stream() {
    (void)node.on_coordinator_message(peers, {});
    (void)node.on_coordinator_message(plan, {});
    const auto streams = streams_of(node, "tcp", here);
    EXPECT_EQ(streams.size(), 1u);
    return streams.front();
  }
};

std::set<std::uint32_t> replicas_of(const std::set<catchup::SourceAddress>& sources) {
  std::set<std::uint32_t> replicas;
  for (const auto& source : sources) replicas.insert(source.replica.value);
  return replicas;
}

TEST(Streams, AJoinerAsksContributorsAndThoseJoinersThatSayThatTheyPassOn) {
  JoiningRank rank;
  rank.member(3, true, true);
  rank.member(4, true, false);  // of before
  rank.member(5, true, true);
  rank.member(6, true, true, "shm");  // it can't be reached
  const LocalStream stream = rank.stream();
  EXPECT_TRUE(stream.catching_up);
  EXPECT_EQ(stream.serves, Incarnation(102));
  EXPECT_EQ(replicas_of(stream.sources), (std::set<std::uint32_t>{0, 1}));
  EXPECT_EQ(replicas_of(stream.chain.fellows), (std::set<std::uint32_t>{3, 5}));
  EXPECT_EQ(stream.chain.own, 0u);
  EXPECT_EQ(stream.chain.of, 3u);
}

// What contributors near by have need not come from far away.
TEST(Streams, AJoinerAsksNoOtherJoinerThatIsFartherAwayThanAContributor) {
  JoiningRank rank;
  rank.here = *Location::parse("dc/a/h1");
  rank.member(3, true, true, "tcp", "dc/a/h2");
  rank.member(4, true, true, "tcp", "dc/b/h3");
  rank.member(5, true, true);  // nobody knows where
  rank.member(7, false, true, "tcp", "dc/a/h4");
  EXPECT_EQ(replicas_of(rank.stream().chain.fellows), (std::set<std::uint32_t>{3}));
  EXPECT_EQ(rank.stream().chain.of, 2u);
}

TEST(Streams, AContributorAsksNobodyAndServesAll) {
  JoiningRank rank;
  rank.member(3, true, true);
  rank.plan.mutable_plan()->mutable_members(2)->set_catching_up(false);
  const LocalStream stream = rank.stream();
  EXPECT_FALSE(stream.catching_up);
  EXPECT_EQ(stream.serves, Incarnation(102));
  EXPECT_TRUE(stream.chain.fellows.empty());
}

TEST(Streams, WhoIsNoMemberServesNobody) {
  JoiningRank rank;
  rank.plan.mutable_plan()->mutable_members(2)->set_incarnation(101);  // its life before
  EXPECT_FALSE(rank.stream().serves);
}

// A plan comes with each step; whom a rank fetches from changes with members, peers and ranks alone.
TEST(Streams, AreMadeAnewWhenWhatTheyFollowFromChangesAndNotWithEachPlan) {
  JoiningRank rank;
  Streams streams("tcp", rank.here);
  (void)rank.node.on_coordinator_message(rank.peers, {});
  const auto plan = [&] {
    (void)rank.node.on_coordinator_message(rank.plan, {});
    return streams.of(rank.node, false).front();
  };
  const auto first = plan();
  for (std::uint64_t step = 1; step <= 100; ++step) {
    rank.plan.mutable_plan()->set_committed(step);
    EXPECT_EQ(plan(), first);
  }
  EXPECT_EQ(streams.made(), 1u);

  rank.member(3, false, true);
  EXPECT_EQ(replicas_of(plan()->sources), (std::set<std::uint32_t>{0, 1})) << "its address is not known yet";
  (void)rank.node.on_coordinator_message(rank.peers, {});
  EXPECT_EQ(replicas_of(streams.of(rank.node, true).front()->sources), (std::set<std::uint32_t>{0, 1, 3}));
  rank.plan.mutable_plan()->mutable_members(0)->set_incarnation(110);
  EXPECT_EQ(replicas_of(plan()->sources), (std::set<std::uint32_t>{1, 3})) << "an earlier life of it is a peer";
  rank.plan.mutable_plan()->mutable_members(2)->set_catching_up(false);
  EXPECT_FALSE(plan()->catching_up);
  EXPECT_EQ(streams.made(), 5u);

  proto::FromNode other;
  other.mutable_rank_up()->set_instance(6);
  (void)rank.node.on_rank_message(membership::RankConnection(2), other, {});
  EXPECT_EQ(streams.of(rank.node, false).size(), 2u);
  (void)rank.node.on_rank_gone(membership::RankConnection(2), "killed", membership::Node::Gone::ended);
  EXPECT_EQ(streams.of(rank.node, false).size(), 1u);
  EXPECT_EQ(streams.made(), 7u);
}

}  // namespace
}  // namespace rejoin::daemon
