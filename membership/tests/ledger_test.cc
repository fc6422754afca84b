#include "membership/ledger.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <memory>

#include "control.pb.h"
#include "membership/ahead.h"
#ifdef REJOIN_SANITIZED
#include <sanitizer/allocator_interface.h>
#endif

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

std::vector<std::uint64_t> sizes_of(const Ledger& ledger, const std::vector<ReplicaId>& replicas) {
  std::vector<std::uint64_t> sizes;
  for (auto replica : replicas) sizes.push_back(samples_of(*ledger.batch_of(replica)));
  return sizes;
}

TEST(Ledger, AConstantNumberIsSharedAndTheFirstGetAUnitMore) {
  const ReplicaId a(0), b(1), c(2);
  Ledger ledger({.batch = 8, .together = 24, .unit = 1});
  ledger.assign({a, b, c});
  EXPECT_EQ(sizes_of(ledger, {a, b, c}), (std::vector<std::uint64_t>{8, 8, 8}));
  ledger.hand_back(b);
  ledger.assign({a, c});
  EXPECT_EQ(sizes_of(ledger, {a, c}), (std::vector<std::uint64_t>{8, 8})) << "in the step in which it is lost";
  ledger.commit(Step(1));
  ledger.assign({c, a});
  EXPECT_EQ(*ledger.batch_of(c), (Batch{{8, 16}, {24, 28}})) << "what was handed back goes out first";
  EXPECT_EQ(*ledger.batch_of(a), (Batch{{28, 40}}));
  Ledger in_fours({.batch = 8, .together = 24, .unit = 4}), in_ones({.batch = 5, .together = 20, .unit = 1});
  in_fours.assign({a, b, c, ReplicaId(3)});
  EXPECT_EQ(sizes_of(in_fours, {a, b, c, ReplicaId(3)}), (std::vector<std::uint64_t>{8, 8, 4, 4}));
  in_ones.assign({a, b, c});
  EXPECT_EQ(sizes_of(in_ones, {a, b, c}), (std::vector<std::uint64_t>{7, 7, 6}));
}

// The others have begun the step with what they hold, and one takes a lost one's place in it.
TEST(Ledger, WhoComesWithinAStepGetsWhatTheOthersLeaveOfAConstantNumberAndAtLeastAUnit) {
  const ReplicaId a(0), b(1), c(2), d(3);
  Ledger ledger({.batch = 8, .together = 24, .unit = 2});
  ledger.assign({a, b});
  EXPECT_EQ(sizes_of(ledger, {a, b}), (std::vector<std::uint64_t>{12, 12}));
  ledger.hand_back(a);
  ledger.assign({b, c});
  EXPECT_EQ(sizes_of(ledger, {b, c}), (std::vector<std::uint64_t>{12, 12}));
  EXPECT_EQ(*ledger.batch_of(c), (Batch{{0, 12}}));
  ledger.assign({b, c, d});
  EXPECT_EQ(sizes_of(ledger, {b, c, d}), (std::vector<std::uint64_t>{12, 12, 2}));
}

// Says what the next steps hand out, for as long as nobody comes or goes.
TEST(Ahead, SaysWhatTheLedgerThenHandsOut) {
  for (const Dealing& dealing : {Dealing{.batch = 10}, Dealing{.batch = 10, .together = 40, .unit = 1}}) {
    const std::vector<ReplicaId> four{ReplicaId(3), ReplicaId(0), ReplicaId(1), ReplicaId(2)},
        three{ReplicaId(3), ReplicaId(0), ReplicaId(2)};
    Ledger ledger(dealing);
    ledger.assign(four);
    ledger.commit(Step(1));
    ledger.assign(four);
    ledger.hand_back(ReplicaId(1));
    proto::Plan plan;
    for (const auto replica : three) plan.add_members()->set_replica(replica.value);
    auto& joiner = *plan.add_members();
    joiner.set_replica(1);
    joiner.set_catching_up(true);
    ledger.to(*plan.mutable_ahead());
    const auto of_joiner = Ahead(plan, ReplicaId(1)).batches(3);
    EXPECT_TRUE(of_joiner.empty());
    std::map<ReplicaId, std::vector<Batch>> said;
    for (const auto replica : three) said[replica] = Ahead(plan, replica).batches(5);
    for (std::uint64_t step = 2; step < 7; ++step) {
      ledger.commit(Step(step));
      ledger.assign(three);
      for (const auto replica : three) EXPECT_EQ(said[replica][step - 2], *ledger.batch_of(replica)) << step;
    }
  }
}

TEST(Ahead, EndsWhereThePlanDoesNotReachAndSaysNothingWithoutOne) {
  Samples trained;  // with so many gaps that a plan does not have all
  for (std::uint64_t i = 0; i < 50; ++i) trained.add(i * 20 + 10, i * 20 + 20);
  Ledger with_gaps(10);
  with_gaps.go_on_from(Step(50), trained);
  proto::Plan plan;
  plan.add_members()->set_replica(0);
  EXPECT_TRUE(Ahead(plan, ReplicaId(0)).batches(3).empty());
  with_gaps.to(*plan.mutable_ahead());
  EXPECT_TRUE(plan.ahead().more());
  EXPECT_EQ(Ahead(plan, ReplicaId(0)).batches(100).size(), 31u);
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

std::size_t heap() {
#ifdef REJOIN_SANITIZED
  return __sanitizer_get_current_allocated_bytes();
#else
  const auto info = ::mallinfo2();
  return info.uordblks + info.hblkhd;
#endif
}

// In whatever order a step's batches come together, and however many ranges that makes for a moment.
TEST(Ledger, WeighsWhatItsStepsWeighAndNotHowTheyCameTogether) {
  constexpr std::uint64_t members = 64, steps = 5000;
  std::vector<ReplicaId> in_order, far_apart;
  for (std::uint64_t i = 0; i < members; ++i) in_order.emplace_back(i);
  for (std::uint64_t i = 0; i < members; ++i) far_apart.emplace_back(i / 2 + i % 2 * members / 2);
  const auto weight = [&](const std::vector<ReplicaId>& contributors) {
    const std::size_t before = heap();
    const auto ledger = std::make_unique<Ledger>(10);
    for (std::uint64_t step = 1; step <= steps; ++step) {
      ledger->assign(contributors);
      ledger->commit(Step(step));
    }
    return heap() - before;
  };
  const std::size_t least = weight(in_order);
  ASSERT_GT(least, 0u);
  EXPECT_LT(weight(far_apart), least * 11 / 10);
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
