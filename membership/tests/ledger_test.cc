#include "membership/ledger.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace rejoin::membership
