// What a standby was started with, and what it makes of the store's log.
#include <gtest/gtest.h>

#include "membership/tests/lone_coordinator.h"

namespace rejoin::membership {
namespace {

TEST(ReplicatedCoordinator, AStandbysWordToRollBackEndsWhenTheJobGoesOn) {
  Alone job;
  job.options.job.roll_back_to = Step(0);
  job.let_other_lead();
  job.write(2, [](proto::LogEntry& entry) { entry.add_records()->mutable_committed()->set_step(1); });
  job.start();
  job.pass(kQuiet);
  EXPECT_NE(job.one->unheeded_word(), "");
  job.write(3, [](proto::LogEntry& entry) { entry.add_records()->mutable_committed()->set_step(2); });
  job.pass(kQuiet);
  EXPECT_EQ(job.one->unheeded_word(), "");
}

}  // namespace
}  // namespace rejoin::membership
