// What a coordinator counts of its job's time.
#include <gtest/gtest.h>

#include "daemon/tests/made_up_job.h"

namespace rejoin::daemon {
namespace {

using namespace std::chrono_literals;

TEST(EffectiveTime, AJobThatStandsStillLosesTimeWhileItDoes) {
  TellsHistory job;
  job.begins(1, "ccc");
  job.steps(10);
  EXPECT_EQ(job.history.effective(job.now + 5s, true).lost, Duration{});  // a slow step
  EXPECT_EQ(job.history.effective(job.now + 30s, true).lost, Duration(29s));
  EXPECT_EQ(job.history.effective(job.now + 30s, false).lost, Duration{});  // it is finished
  EXPECT_EQ(job.history.steps_per_second(), 1.0);
}

TEST(EffectiveTime, WhatItCountsNeverFalls) {
  TellsHistory job;
  JobHistory::Effective last;
  const auto look = [&](bool running = true) {
    const auto next = job.history.effective(job.now, running);
    EXPECT_GE(next.total, last.total);
    EXPECT_GE(next.lost, last.lost);
    EXPECT_GE(next.replica_seconds, last.replica_seconds);
    last = next;
  };
  job.begins(1, "ccc");
  job.steps(10);
  job.now += 20s;
  look();
  job.begins(2, "c..");
  look();
  EXPECT_EQ(last.replica_seconds, 3 * 30);
  job.now += 5s;
  look();
  EXPECT_EQ(last.replica_seconds, 3 * 30 + 5);
  // Another one leads for a while, and commits a step.
  job.history.on_standby(job.now, true);
  job.history.on_records({commit(++job.step)}, {});
  job.now += 60s;
  job.history.on_lead(job.now);
  look();
  EXPECT_EQ(last.total, Duration(35s));
  EXPECT_EQ(last.lost, Duration(24s));
  job.steps(1);
  look();
  look(false);
  job.now += 60s;
  job.history.on_standby(job.now, false);
  look();
  EXPECT_EQ(last.total, Duration(36s));
}

}  // namespace
}  // namespace rejoin::daemon
