// What the audit says of logs, written by hand: such as decisions make them, and some that none should ever write.
#include "daemon/log_audit.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "membership/ledger.h"

namespace rejoin::daemon {
namespace {

using membership::Batch;

// A log written by hand; batches of ten samples.
struct Written {
  std::vector<proto::LogRecord> records;
  std::uint64_t epochs = 0, committed = 0;

  Written() { records.emplace_back().mutable_job()->set_batch(10); }
  void epoch(const std::vector<std::uint32_t>& contributors) {
    auto& begun = *records.emplace_back().mutable_epoch();
    begun.set_epoch(++epochs);
    begun.set_step(committed + 1);
    for (auto replica : contributors) begun.add_members()->set_replica(replica);
  }
  void commit(const std::map<std::uint32_t, Batch>& trained) {
    auto& record = *records.emplace_back().mutable_committed();
    record.set_step(++committed);
    record.set_epoch(epochs);
    for (const auto& [replica, batch] : trained) {
      auto& member = *record.add_members();
      member.set_replica(replica);
      for (const auto& range : batch) {
        auto& added = *member.add_batch();
        added.set_begin(range.begin);
        added.set_end(range.end);
      }
    }
  }
  void roll_back(std::uint64_t version) {
    auto& record = *records.emplace_back().mutable_rolled_back();
    record.set_from(committed);
    record.set_version(version);
    committed = version;
  }
  void go_on_from(std::uint64_t version, const Batch& trained) {
    roll_back(version);
    for (const auto& range : trained) {
      auto& added = *records.back().mutable_rolled_back()->add_trained();
      added.set_begin(range.begin);
      added.set_end(range.end);
    }
  }
  LogAudit audit(std::optional<Step> last_step = std::nullopt) const {
    LogAuditor auditor;
    for (const auto& record : records) auditor.take(record);
    return auditor.result(last_step);
  }
};

void expect(const LogAudit& audit, std::uint64_t samples, std::uint64_t once, std::uint64_t lost,
            std::uint64_t to_be_trained) {
  EXPECT_EQ(audit.samples, samples);
  EXPECT_EQ(audit.once, once);
  EXPECT_EQ(audit.lost, lost);
  EXPECT_EQ(audit.to_be_trained, to_be_trained);
  EXPECT_EQ(audit.repeated, 0u);
}

TEST(LogAudit, WhatALostReplicaHeldIsToBeTrainedAgainUntilItIs) {
  Written log;
  log.epoch({0, 1, 2});
  log.commit({{0, {{0, 10}}}, {1, {{10, 20}}}, {2, {{20, 30}}}});
  log.epoch({0, 2});
  log.commit({{0, {{30, 40}}}, {2, {{50, 60}}}});
  expect(log.audit(), 60, 50, 0, 10);
  EXPECT_EQ(log.audit().committed, 2u);
  EXPECT_EQ(log.audit().epochs, 2u);
  log.commit({{0, {{40, 50}}}, {2, {{60, 70}}}});
  expect(log.audit(), 70, 70, 0, 0);
}

TEST(LogAudit, WhatAReplicaHeldThatIsLostInTheLastStepIsLeftOver) {
  Written log;
  log.epoch({0, 1});
  log.commit({{0, {{0, 10}}}, {1, {{10, 20}}}});
  log.epoch({1});
  log.commit({{1, {{30, 40}}}});
  expect(log.audit(Step(3)), 40, 30, 0, 10);
  EXPECT_EQ(log.audit(Step(3)).left_over, 0u) << "it goes out again in the next step";
  expect(log.audit(Step(2)), 40, 30, 0, 0);
  EXPECT_EQ(log.audit(Step(2)).left_over, 10u);
}

TEST(LogAudit, WhatFindsNoRoomInTheLastStepsIsLeftOver) {
  Written log;
  log.epoch({0, 1, 2, 3});
  log.commit({{0, {{0, 10}}}, {1, {{10, 20}}}, {2, {{20, 30}}}, {3, {{30, 40}}}});
  log.epoch({3});
  log.commit({{3, {{70, 80}}}});
  log.commit({{3, {{40, 50}}}});
  expect(log.audit(Step(3)), 80, 60, 0, 0);
  EXPECT_EQ(log.audit(Step(3)).left_over, 20u);
  EXPECT_EQ(log.audit(Step(4)).to_be_trained, 20u);
}

// A replica that is alone has held the samples of all, and they go out again when it is lost.
TEST(LogAudit, OfAConstantBatchWhoIsLostMayHaveHeldAllOfIt) {
  Written log;
  auto& job = *log.records.front().mutable_job();
  job.set_replicas(3);
  job.set_ranks(1);
  job.set_constant_batch(true);
  log.epoch({0, 1, 2});
  log.commit({{0, {{0, 10}}}, {1, {{10, 20}}}, {2, {{20, 30}}}});
  log.epoch({2});
  log.commit({{2, {{50, 60}}}});
  log.commit({{2, {{30, 50}, {60, 70}}}});
  expect(log.audit(), 70, 70, 0, 0);
  log.epoch({1});
  log.commit({{1, {{100, 110}}}});
  expect(log.audit(Step(4)), 110, 80, 0, 0);
  EXPECT_EQ(log.audit(Step(4)).left_over, 30u);
}

TEST(LogAudit, WhereReplicasShareBySpeedWhoIsLostMayHaveHeldMoreThanABatch) {
  Written log;
  log.epoch({0, 1});
  log.commit({{0, {{0, 10}}}, {1, {{10, 20}}}});
  auto& balance = *log.records.back().mutable_committed()->mutable_balance();
  balance.set_at_least(500);
  balance.set_at_most(1500);
  log.commit({{0, {{20, 30}}}, {1, {{30, 40}}}});
  log.epoch({1});
  log.commit({{1, {{55, 60}}}});  // and 0 had 15
  expect(log.audit(Step(3)), 60, 45, 0, 0);
  EXPECT_EQ(log.audit(Step(3)).left_over, 15u);
}

// No more is left over than those who were lost can have held.
TEST(LogAudit, WhatNobodyHeldInTheLastStepsIsLost) {
  Written log;
  log.epoch({0, 1});
  log.commit({{0, {{0, 10}}}, {1, {{10, 20}}}});
  log.epoch({1});
  log.commit({{1, {{50, 60}}}});
  expect(log.audit(Step(2)), 60, 30, 20, 0);
  EXPECT_EQ(log.audit(Step(2)).left_over, 10u);
  // Nobody was lost, and its last step passes samples over.
  Written quiet;
  quiet.epoch({0, 1});
  quiet.commit({{0, {{0, 10}}}, {1, {{10, 20}}}});
  quiet.commit({{0, {{30, 40}}}, {1, {{40, 50}}}});
  expect(quiet.audit(Step(2)), 50, 40, 10, 0);
  EXPECT_EQ(quiet.audit(Step(2)).left_over, 0u);
}

TEST(LogAudit, StepsThatWereRolledBackBeforeTheLogWasCompactedAreCounted) {
  Written log;
  log.records.clear();
  auto& snapshot = *log.records.emplace_back().mutable_snapshot();
  snapshot.mutable_job()->set_batch(10);
  snapshot.set_committed(5);
  snapshot.set_steps_rolled_back(3);
  snapshot.mutable_ledger()->set_next(50);
  snapshot.mutable_ledger()->set_from(5);
  auto& trained = *snapshot.mutable_ledger()->add_trained();
  trained.set_end(50);
  log.committed = 5;
  log.epoch({0});
  log.commit({{0, {{50, 60}}}});
  log.commit({{0, {{60, 70}}}});
  log.roll_back(6);
  LogAuditor auditor;
  for (const auto& record : log.records) auditor.take(record);
  EXPECT_EQ(auditor.rolled_back().steps, 4u);
  EXPECT_EQ(auditor.rolled_back().before, 3u);
  EXPECT_EQ(auditor.rolled_back().samples, 10u);
}

TEST(LogAudit, WhatIsRolledBackIsToBeTrainedAgainAndNotForgotten) {
  Written log;
  log.epoch({0});
  for (std::uint64_t step = 0; step < 5; ++step) log.commit({{0, {{10 * step, 10 * step + 10}}}});
  log.roll_back(1);
  expect(log.audit(), 50, 10, 0, 40);
  log.epoch({0, 1});
  log.commit({{0, {{10, 20}}}, {1, {{20, 30}}}});
  expect(log.audit(), 50, 30, 0, 20);
  expect(log.audit(Step(2)), 30, 30, 0, 0);  // the job ends before it comes to them again
  // The batch that was handed out when all were lost comes back, too.
  log.commit({{0, {{30, 40}}}, {1, {{40, 50}}}});
  log.commit({{0, {{50, 60}}}, {1, {{60, 70}}}});
  expect(log.audit(), 70, 70, 0, 0);
}

TEST(LogAudit, WhatNewSamplesHaveOvertakenIsLost) {
  Written log;
  log.epoch({0, 1});
  log.commit({{0, {{0, 10}}}, {1, {{10, 20}}}});
  log.epoch({0});
  log.commit({{0, {{20, 30}}}});
  // Its replica was lost with the samples 30 to 40; here a ledger forgets them.
  log.commit({{0, {{40, 50}}}});
  expect(log.audit(), 50, 40, 0, 10);
  for (std::uint64_t step = 5; step < 9; ++step) log.commit({{0, {{10 * step, 10 * step + 10}}}});
  expect(log.audit(), 90, 80, 10, 0);
  // They were not: late is not lost.
  log.commit({{0, {{30, 40}}}});
  expect(log.audit(), 90, 90, 0, 0);
}

TEST(LogAudit, WhoeverHoldsThemMayBeLostAgainAndAgain) {
  Written log;
  log.epoch({0, 1});
  log.commit({{0, {{0, 10}}}, {1, {{10, 20}}}});
  for (std::uint64_t step = 2; step < 20; ++step) {  // 30 to 40 go to replica 1 each time, and it is lost each time
    log.epoch({0});
    log.commit({{0, {{step == 2 ? 20 : 10 * step + 10, step == 2 ? 30 : 10 * step + 20}}}});
    log.epoch({0, 1});
  }
  expect(log.audit(), 210, 200, 0, 10);
}

TEST(LogAudit, WhatWasTrainedBeforeTheCheckpointCountsOnceAndItsGapsAreToBeTrained) {
  Written log;
  log.go_on_from(8, {{0, 70}, {80, 90}});
  expect(log.audit(), 90, 80, 0, 10);
  EXPECT_EQ(log.audit().checkpoint, 8u);
  EXPECT_EQ(log.audit().before_checkpoint, 80u);
  log.epoch({0});
  log.commit({{0, {{70, 80}}}});
  log.commit({{0, {{90, 100}}}});
  expect(log.audit(), 100, 100, 0, 0);
  expect(log.audit(Step(10)), 100, 100, 0, 0);
}

TEST(LogAudit, SamplesThatStartAgainBehindACheckpointAreRepeatedAndThoseItSkipsAreLost) {
  Written repeating, skipping;
  for (auto* log : {&repeating, &skipping}) {
    log->go_on_from(8, {{0, 80}});
    log->epoch({0});
  }
  repeating.commit({{0, {{0, 10}}}});
  EXPECT_EQ(repeating.audit().repeated, 10u);
  skipping.commit({{0, {{80, 90}}}});
  for (std::uint64_t at = 100; at < 150; at += 10) skipping.commit({{0, {{at, at + 10}}}});
  EXPECT_EQ(skipping.audit().lost, 10u);
}

TEST(LogAudit, OfALongLogItKeepsFewStepsAndSaysTheSame) {
  constexpr std::uint64_t kept = 8;
  for (std::uint32_t seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    const auto up_to = [&](std::uint64_t most) { return random() % (most + 1); };
    Written log;
    log.epoch({0, 1});
    std::uint64_t next = 0, oldest = 0;
    membership::TrainedSteps few(kept);
    for (int i = 0; i < 300; ++i) {
      if (up_to(20) == 0) log.epoch({0, 1});
      // No ledger deals so: samples that are passed over, and some that are trained once more.
      next += up_to(9) == 0 ? 3 : 0;
      const std::uint64_t again = up_to(9) == 0 ? std::min<std::uint64_t>(next, up_to(200)) : 0;
      log.commit({{0, {{next - again, next - again + 10}}}, {1, {{next + 10, next + 20}}}});
      next += 20;
      oldest = std::max(oldest, log.committed - std::min(log.committed, kept));
      if (up_to(30) == 0) log.roll_back(oldest + up_to(log.committed - oldest));
    }
    LogAuditor all(~std::uint64_t{0}), bounded(kept);
    for (const auto& record : log.records) all.take(record), bounded.take(record), few.take(record);
    EXPECT_LE(few.by_step().size(), kept + 1);
    EXPECT_EQ(few.rolled_back().samples, all.rolled_back().samples) << seed;
    for (const std::optional<Step> last : {std::optional<Step>(), std::optional(Step(log.committed))}) {
      const LogAudit one = bounded.result(last), other = all.result(last);
      EXPECT_EQ(one.once, other.once) << seed;
      EXPECT_EQ(one.repeated, other.repeated) << seed;
      EXPECT_EQ(one.lost, other.lost) << seed;
      EXPECT_EQ(one.samples, other.samples) << seed;
      EXPECT_EQ(one.left_over, other.left_over) << seed;
      EXPECT_EQ(one.to_be_trained, other.to_be_trained) << seed;
    }
  }
}

}  // namespace
}  // namespace rejoin::daemon
