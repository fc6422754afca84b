// Which of two processes of a node has a place.
#include <gtest/gtest.h>

#include "control.pb.h"
#include "membership/node.h"

namespace rejoin::membership {
namespace {

// After a restart of the daemon a second process may come before the one that has the place.
TEST(Node, APlaceIsForWhomTheCoordinatorHasRegisteredLast) {
  Node node{"node", std::chrono::seconds(1), 1};
  const TimePoint now{std::chrono::seconds(1)};
  proto::FromNode message;
  auto& second = *message.mutable_rank_up();
  second.set_instance(9);
  (void)node.on_rank_message(RankConnection(1), message, now);
  proto::RankUp first;
  first.set_instance(1);
  EXPECT_EQ(node.gone_for(RankConnection(1), first), Node::Gone::ended) << "neither is registered";
  first.set_incarnation(5);
  first.set_job(7);
  EXPECT_EQ(node.gone_for(RankConnection(1), first), Node::Gone::silent);
  proto::ToNode answer;
  auto& registered = *answer.mutable_registered();
  registered.set_instance(9);
  registered.set_incarnation(6);
  registered.set_job(7);
  (void)node.on_coordinator_message(answer, now);
  EXPECT_EQ(node.gone_for(RankConnection(1), first), Node::Gone::ended) << "it has lost its place to the other";
  first.set_incarnation(8);
  EXPECT_EQ(node.gone_for(RankConnection(1), first), Node::Gone::silent);
  first.set_job(3);
  EXPECT_EQ(node.gone_for(RankConnection(1), first), Node::Gone::ended) << "another job's numbers say nothing";
  first.set_instance(9);
  EXPECT_EQ(node.gone_for(RankConnection(1), first), Node::Gone::replaced);
}

}  // namespace
}  // namespace rejoin::membership
