#include "catchup/planner.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace rejoin::catchup {
namespace {

TEST(Planner, AllSlicesAreAskedForOnceAndThoseOfALostSourceAgain) {
  Planner planner(10, 3);
  planner.on_source_up(ReplicaId(0));
  planner.on_source_up(ReplicaId(1));
  EXPECT_EQ(planner.next(ReplicaId(0)), (std::vector<std::uint32_t>{0, 1, 2}));
  EXPECT_EQ(planner.next(ReplicaId(1)), (std::vector<std::uint32_t>{3, 4, 5}));
  EXPECT_TRUE(planner.next(ReplicaId(0)).empty());
  EXPECT_TRUE(planner.on_arrived(ReplicaId(0), 1));
  EXPECT_FALSE(planner.on_arrived(ReplicaId(0), 3)) << "not asked of this source";
  planner.on_source_down(ReplicaId(1));
  EXPECT_EQ(planner.refetched(), 0u) << "none of them had arrived";
  std::set<std::uint32_t> rest;
  for (bool more = true; more;) {
    const auto next = planner.next(ReplicaId(0));
    more = !next.empty();
    for (auto slice : next) {
      rest.insert(slice);
      EXPECT_TRUE(planner.on_arrived(ReplicaId(0), slice));
    }
    for (auto slice : {0u, 2u}) planner.on_arrived(ReplicaId(0), slice);
  }
  EXPECT_TRUE(planner.all_arrived());
  planner.on_again(4);
  EXPECT_EQ(planner.refetched(), 1u);
}

TEST(Planner, WhoeverIsUpFirstLeavesTheOthersTheirShare) {
  Planner planner(12, 16);
  planner.on_source_up(ReplicaId(0));
  EXPECT_EQ(planner.next(ReplicaId(0), 3).size(), 4u);
  planner.on_source_up(ReplicaId(1));
  EXPECT_EQ(planner.next(ReplicaId(1), 3).size(), 4u);
  EXPECT_TRUE(planner.next(ReplicaId(0), 3).empty());
  EXPECT_EQ(planner.next(ReplicaId(0), 2).size(), 2u) << "the third one does not come";
  EXPECT_EQ(planner.next(ReplicaId(1), 2).size(), 2u);
  EXPECT_EQ(Planner(1000, 16).next(ReplicaId(0)).size(), 0u);
  Planner alone(3, 16);
  alone.on_source_up(ReplicaId(0));
  for (std::uint32_t arrived = 0; arrived < 3; ++arrived) {  // nobody else ever comes: it has the last one, too
    EXPECT_EQ(alone.next(ReplicaId(0), 5).size(), 1u);
    EXPECT_TRUE(alone.on_arrived(ReplicaId(0), arrived));
  }
  EXPECT_TRUE(alone.all_arrived());
}

TEST(Planner, NarrowsWhereGradientsPileUpAndWidensAgain) {
  Planner planner(1000, 16);
  planner.on_source_up(ReplicaId(0));
  EXPECT_EQ(planner.next(ReplicaId(0)).size(), 16u);
  for (int i = 0; i < 10; ++i) planner.narrow();
  EXPECT_EQ(planner.window(), 1u);
  for (std::uint32_t slice = 0; slice < 200; ++slice) {
    planner.on_arrived(ReplicaId(0), slice);
    planner.next(ReplicaId(0));
  }
  EXPECT_EQ(planner.window(), 16u);
}

}  // namespace
}  // namespace rejoin::catchup
