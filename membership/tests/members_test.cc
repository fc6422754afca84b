#include "membership/members.h"

#include <gtest/gtest.h>

namespace rejoin::membership {
namespace {

constexpr ReplicaId kA(0), kB(1), kC(7);

Members three(std::uint32_t ranks) {
  Members members(ranks);
  for (auto replica : {kC, kA, kB}) members.add({.replica = replica, .incarnation = Incarnation(replica.value + 1)});
  return members;
}

RankSet first(std::uint32_t ranks) {
  RankSet set;
  set.add(0, ranks);
  return set;
}

TEST(Members, AreFoundAfterOthersHaveGoneOrTheOrderHasChanged) {
  Members members = three(1);
  EXPECT_EQ(members.find(kB)->incarnation, Incarnation(2));
  members.erase(kC);
  EXPECT_EQ(members.find(kC), nullptr);
  EXPECT_EQ(members.find(kB)->incarnation, Incarnation(2));
  members.order_by({{kA, 1}, {kB, 0}});
  EXPECT_EQ(members[0].replica, kB);
  EXPECT_EQ(members.find(kA), &members[1]);
  EXPECT_EQ(members.take().size(), 2u);
  EXPECT_TRUE(members.empty());
  EXPECT_EQ(members.find(kA), nullptr);
}

TEST(Members, HaveAllReducedWhenEachHasOnAllOfItsRanks) {
  Members members = three(2);
  for (auto replica : {kA, kB}) members.add_reduced(*members.find(replica), first(2));
  members.add_reduced(*members.find(kC), first(1));
  members.add_reduced(*members.find(kC), first(1));  // told twice
  EXPECT_FALSE(members.all_reduced());
  members.add_reduced(*members.find(kC), RankSet(1));
  EXPECT_TRUE(members.all_reduced());
  members.begin_step();
  EXPECT_FALSE(members.all_reduced());
  EXPECT_TRUE(members.find(kA)->reduced.empty());
}

TEST(Members, WhoHasGoneIsNotWaitedForAndWhoHasComeIs) {
  Members members = three(2);
  for (auto replica : {kA, kB}) members.add_reduced(*members.find(replica), first(2));
  members.erase(kC);
  EXPECT_TRUE(members.all_reduced());
  members.erase(kB);
  EXPECT_TRUE(members.all_reduced());
  members.add({.replica = kB});
  EXPECT_FALSE(members.all_reduced());
  members.order_by({{kA, 1}, {kB, 0}});
  EXPECT_FALSE(members.all_reduced());
  members.add_reduced(*members.find(kB), first(2));
  EXPECT_TRUE(members.all_reduced());
}

}  // namespace
}  // namespace rejoin::membership
