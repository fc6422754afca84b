// Whom a joiner is to fetch from, and how far away each is.
#include <gtest/gtest.h>

#include "daemon/streams.h"

namespace rejoin::daemon {
namespace {

// Replica 0 catches up at this node, from replicas 1 to 4.
struct Joining {
  membership::Node node;
  std::map<std::uint32_t, std::string> locations{{1, "dc/r1/h1"}, {2, "dc/r1/h2"}, {3, "dc/r2/h1"}, {4, ""}};
  proto::RankUp registered;  // as the coordinator hears it

  explicit Joining(const std::string& location) : node("node0", std::chrono::seconds(1), 7, location) {
    const TimePoint now{std::chrono::seconds(1)};
    (void)node.on_coordinator_up(now);
    proto::FromNode up;
    up.mutable_rank_up()->set_instance(5);
    const auto told = node.on_rank_message(membership::RankConnection(1), up, now);
    registered = told.to_coordinator.at(0).rank_up();
    proto::ToNode answer, peers, plan;
    answer.mutable_registered()->set_instance(5);
    answer.mutable_registered()->set_incarnation(9);
    membership::RankSet(0).to(peers.mutable_peers()->mutable_complete());
    plan.mutable_plan()->set_epoch(1);
    for (std::uint32_t replica = 0; replica < 5; ++replica) {
      auto& member = *plan.mutable_plan()->add_members();
      member.set_replica(replica);
      member.set_incarnation(replica == 0 ? 9 : replica);
      member.set_catching_up(replica == 0);
      if (replica == 0) continue;
      auto& peer = *peers.mutable_peers()->add_peers();
      peer.set_replica(replica);
      peer.set_incarnation(replica);
      peer.set_stream_address(stream_address("tcp", "10.0.0.1:1"));
      peer.set_location(locations.at(replica));
    }
    for (const auto* message : {&answer, &peers, &plan}) (void)node.on_coordinator_message(*message, now);
  }
  std::map<std::uint32_t, std::size_t> distances(const std::string& here) const {
    std::map<std::uint32_t, std::size_t> all;
    const auto streams = streams_of(node, "tcp", Location::parse(here).value_or(Location()));
    EXPECT_EQ(streams.size(), 1u);
    EXPECT_TRUE(streams.at(0).catching_up);
    for (const auto& source : streams.at(0).sources) all[source.replica.value] = source.distance;
    return all;
  }
};

TEST(Streams, SourcesAreAsFarAwayAsTheirNodesSayAndOneThatSaysNothingIsFarthest) {
  const Joining joining("dc/r1/h1");
  EXPECT_EQ(joining.registered.location(), "dc/r1/h1");
  EXPECT_EQ(joining.distances("dc/r1/h1"), (std::map<std::uint32_t, std::size_t>{{1, 0}, {2, 1}, {3, 2}, {4, 3}}));
}

TEST(Streams, WhereTheNodeItselfSaysNothingAllSourcesAreAlike) {
  const Joining joining("");
  EXPECT_EQ(joining.registered.location(), "");
  EXPECT_EQ(joining.distances(""), (std::map<std::uint32_t, std::size_t>{{1, 0}, {2, 0}, {3, 0}, {4, 0}}));
}

}  // namespace
}  // namespace rejoin::daemon
