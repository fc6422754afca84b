#include "membership/ledger.h"

#include <gtest/gtest.h>

#include "control.pb.h"

namespace rejoin::membership {
namespace {

TEST(Ledger, BatchesAreDisjointAndFollowEachOther) {
  Ledger ledger(10);
  ledger.assign({ReplicaId(0), ReplicaId(1)});
  EXPECT_EQ(*ledger.batch_of(ReplicaId(0)), (Batch{{0, 10}}));
  EXPECT_EQ(*ledger.batch_of(ReplicaId(1)), (Batch{{10, 20}}));
  ledger.assign({ReplicaId(0), ReplicaId(1)});
  EXPECT_EQ(*ledger.batch_of(ReplicaId(0)), (Batch{{0, 10}})) << "a batch held is kept";
}

TEST(Ledger, WhatALostReplicaHeldIsHandedOutFirst) {
  Ledger ledger(10);
  ledger.assign({ReplicaId(0), ReplicaId(1), ReplicaId(2)});
  ledger.hand_back(ReplicaId(1));
  ledger.commit(Step(1));
  ledger.assign({ReplicaId(0), ReplicaId(2)});
  EXPECT_EQ(*ledger.batch_of(ReplicaId(0)), (Batch{{10, 20}}));
  EXPECT_EQ(*ledger.batch_of(ReplicaId(2)), (Batch{{30, 40}}));
}

TEST(Ledger, RollingBackHandsOutTheVoidStepsAgain) {
  Ledger ledger(10);
  for (std::uint64_t step = 1; step <= 3; ++step) {
    ledger.assign({ReplicaId(0)});
    ledger.commit(Step(step));
  }
  ledger.roll_back(Step(1));
  ledger.assign({ReplicaId(0), ReplicaId(1), ReplicaId(2)});
  EXPECT_EQ(*ledger.batch_of(ReplicaId(0)), (Batch{{10, 20}}));
  EXPECT_EQ(*ledger.batch_of(ReplicaId(1)), (Batch{{20, 30}}));
  EXPECT_EQ(*ledger.batch_of(ReplicaId(2)), (Batch{{30, 40}}));
}

// A replica that went on alone has trained samples in another order than the job will.
TEST(Ledger, WhatIsRolledBackGoesOutInOrder) {
  Ledger ledger(10);
  ledger.assign({ReplicaId(0), ReplicaId(1)});
  ledger.hand_back(ReplicaId(0));
  ledger.commit(Step(1));
  ledger.assign({ReplicaId(1)});
  ledger.commit(Step(2));
  ledger.roll_back(Step(0));
  ledger.assign({ReplicaId(0), ReplicaId(1), ReplicaId(2)});
  EXPECT_EQ(*ledger.batch_of(ReplicaId(0)), (Batch{{0, 10}}));
  EXPECT_EQ(*ledger.batch_of(ReplicaId(1)), (Batch{{10, 20}}));
  EXPECT_EQ(*ledger.batch_of(ReplicaId(2)), (Batch{{20, 30}}));
}

// Samples are handed out in the order in which members came, which is that of their numbers only at first.
TEST(Ledger, KeepsAStepInOneRangeWhoeverHeldWhatOfIt) {
  Ledger ledger(10);
  for (std::uint64_t step = 1; step <= 100; ++step) {
    ledger.assign({ReplicaId(3), ReplicaId(0), ReplicaId(2), ReplicaId(1)});
    ledger.commit(Step(step));
  }
  proto::LogRecord_Snapshot_Ledger snapshot;
  ledger.to(snapshot);
  ASSERT_EQ(snapshot.steps_size(), 100);
  for (const auto& step : snapshot.steps()) EXPECT_EQ(step.trained_size(), 1) << step.step();
}

TEST(LedgerAudit, CountsLostAndRepeatedSamples) {
  const Audit good = audit({{1, {{0, 10}, {10, 20}}}, {2, {{20, 30}}}});
  EXPECT_EQ(good.samples, 30u);
  EXPECT_EQ(good.once, 30u);
  EXPECT_EQ(good.lost + good.repeated, 0u);
  const Audit bad = audit({{1, {{0, 10}}}, {2, {{5, 12}}}, {3, {{20, 30}}}});
  EXPECT_EQ(bad.lost, 8u);
  EXPECT_EQ(bad.repeated, 5u);
  EXPECT_EQ(bad.once, 17u);
}

TEST(Ledger, KnowsWhatWasTrainedUpToEachOfItsSteps) {
  Ledger ledger(10);
  for (std::uint64_t step = 1; step <= 3; ++step) {
    ledger.assign({ReplicaId(0), ReplicaId(1)});
    if (step == 2) ledger.hand_back(ReplicaId(0));
    ledger.commit(Step(step));
  }
  EXPECT_EQ(ledger.trained_at(Step(0))->text(), "");
  EXPECT_EQ(ledger.trained_at(Step(1))->text(), "0-19");
  EXPECT_EQ(ledger.trained_at(Step(2))->text(), "0-19, 30-39");
  EXPECT_EQ(ledger.trained_at(Step(3))->text(), "0-49");
  EXPECT_EQ(ledger.trained(), *ledger.trained_at(Step(3)));
  EXPECT_FALSE(ledger.trained_at(Step(4)));
  ledger.roll_back(Step(2));
  EXPECT_EQ(ledger.trained().text(), "0-19, 30-39");
  EXPECT_FALSE(ledger.trained_at(Step(3)));
}

TEST(Ledger, GoesOnFromACheckpointAsIfItHadTrainedAllBefore) {
  Ledger before(10), after(10);
  before.assign({ReplicaId(0), ReplicaId(1)});
  before.hand_back(ReplicaId(0));
  before.commit(Step(1));
  after.go_on_from(Step(1), before.trained());
  for (auto* ledger : {&before, &after}) ledger->assign({ReplicaId(0), ReplicaId(1)});
  EXPECT_EQ(after.held(), before.held());
  for (auto* ledger : {&before, &after}) ledger->commit(Step(2));
  EXPECT_EQ(after.trained(), before.trained());
  EXPECT_FALSE(after.trained_at(Step(0))) << "it does not reach back so far";
}

}  // namespace
}  // namespace rejoin::membership
