// What a trainer's plans mean to it.
#include "membership/rank.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace rejoin::membership
