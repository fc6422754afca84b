// What a trainer's plans mean to it.
#include "membership/rank.h"

#include <gtest/gtest.h>

#include <utility>

namespace rejoin::membership {
namespace {

proto::Plan plan_of(std::uint64_t epoch, std::uint64_t committed, bool finished = false) {
  proto::Plan plan;
  plan.set_epoch(epoch);
  plan.set_committed(committed);
  plan.set_step(committed + 1);
  plan.set_finished(finished);
  auto& member = *plan.add_members();
  member.set_replica(0);
  member.set_incarnation(7);
  return plan;
}

struct RankOfAPlan : testing::Test {
  Rank rank{ReplicaId(0)};
  RankOfAPlan() {
    rank.on_registered(Incarnation(7));
    EXPECT_EQ(rank.on_plan(plan_of(3, 10)), Rank::Meaning::new_epoch);
  }
};

TEST_F(RankOfAPlan, TheLastStepIsCommittedAndFinishes) {
  EXPECT_EQ(rank.on_plan(plan_of(3, 11, true)), Rank::Meaning::finished);
  EXPECT_EQ(rank.on_plan(plan_of(3, 11, true)), Rank::Meaning::nothing);
}

TEST_F(RankOfAPlan, AJobThatIsFinishedWithTheStepBeforeIsCutShort) {
  EXPECT_EQ(rank.on_plan(plan_of(3, 10)), Rank::Meaning::nothing) << "a restarted coordinator repeats it";
  EXPECT_EQ(rank.on_plan(plan_of(3, 10, true)), Rank::Meaning::cut_short);
  EXPECT_EQ(rank.on_plan(plan_of(3, 10, true)), Rank::Meaning::nothing);
}

TEST_F(RankOfAPlan, AnOlderPlanSaysNothingOfTheEnd) {
  EXPECT_EQ(rank.on_plan(plan_of(2, 10, true)), Rank::Meaning::nothing);
  EXPECT_EQ(rank.on_plan(plan_of(3, 9, true)), Rank::Meaning::nothing);
}

TEST_F(RankOfAPlan, WhoLeadsThePlanTellsAndWithoutThatTheFirstContributorDoes) {
  EXPECT_TRUE(rank.leads());
  auto plan = plan_of(4, 10);
  plan.set_leader(1);
  EXPECT_EQ(rank.on_plan(plan), Rank::Meaning::new_epoch);
  EXPECT_FALSE(rank.leads()) << "who led the step is lost: nobody does";
  plan = plan_of(4, 11);
  plan.set_leader(0);
  EXPECT_EQ(rank.on_plan(plan), Rank::Meaning::committed);
  EXPECT_TRUE(rank.leads());
}

TEST(Rank, BelievesNoPlanOfThePast) {
  Rank rank(ReplicaId(0));
  rank.on_registered(Incarnation(5));
  const auto plan = [](std::uint64_t epoch, std::uint64_t committed) {
    proto::Plan made;
    made.set_epoch(epoch);
    made.set_committed(committed);
    made.set_step(committed + 1);
    auto& member = *made.add_members();
    member.set_incarnation(5);
    return made;
  };
  EXPECT_EQ(rank.on_plan(plan(2, 5)), Rank::Meaning::new_epoch);
  rank.on_reduced();
  EXPECT_EQ(rank.on_plan(plan(2, 6)), Rank::Meaning::committed);
  for (const auto& [epoch, committed] : {std::pair{2, 6}, {2, 5}, {1, 9}}) {
    EXPECT_EQ(rank.on_plan(plan(epoch, committed)), Rank::Meaning::nothing);
    EXPECT_EQ(rank.epoch(), Epoch(2));
    EXPECT_EQ(rank.step(), Step(7));
  }
}

// Its state may be the last one.
TEST(Rank, WhoIsOutForNowIsNotEvictedAndReducesItsStepAgainInANewEpoch) {
  Rank rank(ReplicaId(0));
  rank.on_registered(Incarnation(5));
  const auto plan = [](std::uint64_t epoch, bool out_for_now) {
    proto::Plan made;
    made.set_epoch(epoch);
    made.set_committed(5);
    made.set_step(6);
    (out_for_now ? made.add_suspended() : made.add_members())->set_incarnation(5);
    return made;
  };
  EXPECT_EQ(rank.on_plan(plan(2, false)), Rank::Meaning::new_epoch);
  rank.on_reduced();
  EXPECT_EQ(rank.on_plan(plan(3, true)), Rank::Meaning::nothing);
  EXPECT_TRUE(rank.suspended());
  EXPECT_EQ(rank.on_plan(plan(4, false)), Rank::Meaning::new_epoch);
  EXPECT_FALSE(rank.reduced());
}

}  // namespace
}  // namespace rejoin::membership
