// What goes wrong for one joiner, or is short, and must neither go on for ever nor harm others: damaged slices, little
// room for gradients, daemons that stand still.
#include "catchup/tests/cluster.h"
#include "device/tests/fake_control.h"

namespace rejoin::catchup {
namespace {

// All that one source writes is damaged on its way; what it says, and its digests, are right.
struct DamagedLink : Cluster {
  Replica* bad = nullptr;

  explicit DamagedLink(std::uint32_t tensors) : Cluster(3) { model = model_of(tensors); }
  void flip() const {
    for (const auto& slice : bad->owner->manifest().slices())
      bad->owner->column(slice.range.tensor, 0)[3] ^= std::byte{0x40};
  }
  void pump_damaged() {
    flip();
    fabric.step();
    flip();
    clock.advance(std::chrono::microseconds(1));
    for (auto& r : replicas)
      for (const auto& completed : r->service->poll(clock.now())) r->caught_up |= completed.key.replica == r->id;
  }
  CatchUpProgress progress(const Replica& joiner) const {
    return *joiner.service->progress({joiner.id, RankId(0)}, clock.now());
  }
};

TEST(CatchUpTrouble, WhoseSlicesComeDamagedIsAskedForFewAndOthersForTheRest) {
  for (const std::size_t sources : {2, 3}) {
    for (std::size_t which = 0; which < sources; ++which) {
      SCOPED_TRACE(fmt::format("source {} of {}", which, sources));
      DamagedLink cluster(300);
      for (std::size_t i = 0; i < sources; ++i) cluster.add(true);
      cluster.train(1);
      cluster.bad = cluster.replicas[which].get();
      Replica& joiner = cluster.add(false);
      cluster.catch_up(joiner);
      for (int i = 0; i < 600 && !joiner.caught_up; ++i) {
        for (int events = 0; events < 200; ++events) cluster.pump_damaged();
        if (i % 20 != 19) continue;
        ++cluster.step;
        for (auto& r : cluster.replicas) r->update(Step(cluster.step));
      }
      ASSERT_TRUE(joiner.caught_up);
      EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
      EXPECT_LT(cluster.progress(joiner).refetched, 40u);
    }
  }
}

// A firewall, say, or a wrong address of its source's daemon.
TEST(CatchUpTrouble, WhoReachesNoSourceSaysWhichAndWhyAndNoMoreWhenItDoes) {
  Cluster cluster(7);
  Replica& source = cluster.add(true);
  cluster.train(1);
  Replica& joiner = cluster.add(false);
  const auto unreached = [&] {
    return joiner.service->progress({joiner.id, RankId(0)}, cluster.clock.now())->unreached;
  };
  const auto right = std::exchange(source.address, {"nobody is here"});
  const auto pass = [&](Duration time) {
    for (const auto until = cluster.clock.now() + time; cluster.clock.now() < until; cluster.pump(1))
      cluster.clock.advance(std::chrono::milliseconds(10));
  };
  cluster.catch_up(joiner);
  pass(deadlines::kUnreachableSource.of(deadlines::kSilence) - std::chrono::milliseconds(100));
  EXPECT_EQ(unreached(), "");
  pass(std::chrono::milliseconds(300));
  EXPECT_TRUE(unreached().starts_with("it has reached none of its sources for 10 s: replica 0 at nobody is here: "))
      << unreached();
  EXPECT_EQ(unreached().find("no answer yet"), std::string::npos) << unreached();
  source.address = right;
  cluster.catch_up(joiner);
  cluster.train_until_caught_up(joiner, 200, 200);
  ASSERT_TRUE(joiner.caught_up);
  EXPECT_EQ(unreached(), "");

  // The way there may be lost later, too.
  Replica& later = cluster.add(false);
  cluster.catch_up(later);
  const auto of_later = [&] { return later.service->progress({later.id, RankId(0)}, cluster.clock.now()); };
  for (int i = 0; i < 100'000 && of_later()->slices == 0; ++i) cluster.pump(1);
  ASSERT_GT(of_later()->slices, 0u);
  cluster.fabric.kill(*source.on_fabric);
  source.daemon_stopped = true;
  pass(std::chrono::seconds(30));
  ASSERT_FALSE(later.caught_up);
  EXPECT_NE(of_later()->unreached.find("replica 0 at "), std::string::npos) << of_later()->unreached;
}

// With a limit of the stream a slice is sent some steps after it was asked for, and what comes is of a version after
// these.
TEST(CatchUpTrouble, ASliceThatIsSentLateNeedsNoMoreThanTwoStepsOfKeptGradients) {
  constexpr std::uint64_t elements = 500'000, tensors = 12;
  Cluster cluster(5, false);
  std::vector<local::Tensor> all;
  for (std::uint64_t t = 0; t < tensors; ++t)
    all.push_back({.name = fmt::format("t{}", t), .count = elements, .columns = 1, .elementwise = false});
  cluster.model = *local::Manifest::make(std::move(all));
  cluster.limit = 2.7e6;  // a slice takes three steps
  Replica& source = cluster.add(true);
  cluster.train(1);
  const std::uint64_t budget = 2 * elements * sizeof(float);
  Replica& joiner = cluster.add(false, budget);
  cluster.catch_up(joiner);
  for (int steps = 0; steps < 100 && !joiner.caught_up; ++steps) {
    for (int i = 0; i < 25; ++i) {
      cluster.clock.advance(std::chrono::milliseconds(10));
      cluster.pump(8);
    }
    ++cluster.step;
    for (auto& r : cluster.replicas) r->update(Step(cluster.step));
    ASSERT_LE(joiner.gradient_log->bytes(), budget);
  }
  ASSERT_TRUE(joiner.caught_up);
  EXPECT_TRUE(cluster.same_bits(joiner, source));
  EXPECT_LE(source.service->bytes_served(), (tensors + 4) * elements * sizeof(float)) << "few are sent twice";
}

struct KeptGradients : testing::Test {
  using State = local::SliceState;
  Cluster cluster{1};
  Replica* joiner = nullptr;
  std::atomic<std::uint64_t>* statuses = nullptr;

  void of(std::uint32_t tensors, std::uint64_t budget) {
    std::vector<local::Tensor> all;
    for (std::uint32_t t = 0; t < tensors; ++t)
      all.push_back({.name = fmt::format("t{}", t), .count = 1000, .columns = 1});
    cluster.model = *local::Manifest::make(std::move(all));
    joiner = &cluster.add(false, budget);
    statuses = joiner->owner->page().slice_statuses();
  }
  void put(std::uint32_t slice, local::SliceStatus status) const { statuses[slice].store(status.packed()); }
};

TEST_F(KeptGradients, ThoseOfTheLastUpdateAreOfTheBudgetToo) {
  constexpr std::uint64_t budget = 10 * 4000;
  of(20, budget);
  for (std::uint32_t i = 0; i < 10; ++i) put(i, local::SliceStatus::requested(1));
  joiner->update(Step(1));
  EXPECT_EQ(joiner->gradient_log->bytes(), budget);
  for (std::uint32_t i = 0; i < 10; ++i) put(i, {State::arrived, 0});
  for (std::uint32_t i = 10; i < 20; ++i) put(i, local::SliceStatus::requested(1));
  joiner->begin_update(Step(2));
  std::uint64_t given = 0;
  for (const auto& update : joiner->updates)
    if (update.step == Step(1)) given += update.gradient.size();
  EXPECT_EQ(given, budget);
  EXPECT_EQ(joiner->gradient_log->bytes(), budget) << "and nothing else is kept beside them";
  joiner->end_update();
  for (std::uint32_t i = 10; i < 20; ++i) {
    EXPECT_EQ(joiner->status(i).state, State::requested) << "what comes may be of a later step";
    put(i, {State::arrived, 1});
  }
  joiner->update(Step(3));
  for (std::uint32_t i = 0; i < 10; ++i) EXPECT_EQ(joiner->status(i).version(), 3u);
  for (std::uint32_t i = 10; i < 20; ++i) EXPECT_EQ(joiner->status(i).state, State::abandoned) << "it is a gap";
}

TEST_F(KeptGradients, WhereOneSliceHasTheBudgetItsOldestGoAndAGapIsFound) {
  of(1, 2 * 4000);
  for (const std::uint64_t comes : {2, 1}) {
    put(0, local::SliceStatus::requested(1));
    for (const std::uint64_t step : {1, 2, 3, 4}) joiner->update(Step(step));
    ASSERT_EQ(joiner->status(0).state, State::requested);
    put(0, {State::arrived, comes});
    joiner->begin_update(Step(5));
    EXPECT_EQ(joiner->updates.size(), comes == 2 ? 3u : 0u) << "steps 3 and 4 are there";
    joiner->end_update();
    EXPECT_EQ(joiner->status(0).state, comes == 2 ? State::current : State::abandoned);
  }
}

TEST(CatchUpTrouble, AGpuWithoutRoomForAGradientCostsTheSliceAtMostAndNotTheSession) {
  const device::fake::Control fake(device::cuda_library().c_str());
  if (fake.set_options == nullptr) GTEST_SKIP() << "a real GPU has room";
  Cluster cluster(1, true, {.on_gpu = true});
  cluster.model = model_of(1);
  Replica& joiner = cluster.add(false);
  joiner.owner->page().slice_statuses()[0].store(local::SliceStatus::requested(1).packed());
  const auto gradient = *cluster.device->allocate(4000);
  fake.set_options({.full = true});
  const auto begun = joiner.gradient_log->begin(
      Step(1), false, 1, [&](auto, auto, auto count) { return BytesView(gradient.bytes).first(count * 4); });
  fake.set_options({});
  ASSERT_TRUE(begun) << begun.error().message;
  EXPECT_EQ(joiner.gradient_log->bytes(), 0u);
  joiner.gradient_log->end(Step(1), false);
}

TEST(CatchUpTrouble, MemoryThatCanNotBeRegisteredIsToldOfSeldom) {
  Cluster cluster(5);
  cluster.add(true);
  cluster.train(1);
  Replica& joiner = cluster.add(false);
  cluster.fabric.refuse_memory(*joiner.on_fabric, 1'000'000);
  testing::internal::CaptureStdout();
  for (int i = 0; i < 100; ++i) {
    cluster.catch_up(joiner);
    cluster.clock.advance(std::chrono::milliseconds(10));
    cluster.pump(3);
  }
  const std::string log = testing::internal::GetCapturedStdout();
  std::size_t lines = 0;
  for (std::size_t at = 0; (at = log.find("can't catch up yet", at)) != log.npos; ++at) ++lines;
  EXPECT_EQ(lines, 1u);
  cluster.fabric.refuse_memory(*joiner.on_fabric, 0);
  for (int i = 0; i < 10; ++i) {  // a plan with each step keeps it from nothing
    cluster.catch_up(joiner);
    cluster.clock.advance(std::chrono::milliseconds(10));
    cluster.train(3);
  }
  cluster.train_until_caught_up(joiner, 200, 20);
  EXPECT_TRUE(joiner.caught_up);
}

// What is on its way to them is never taken, and all that a contributor can pin is theirs.
TEST(CatchUpTrouble, DaemonsThatStandStillKeepNobodyElseFromCatchingUp) {
  for (const bool whole : {false, true}) {
    SCOPED_TRACE(whole ? "one slice takes all pins" : "a slice takes some");
    Cluster cluster(5, false);
    const std::uint64_t elements = whole ? 5'500'000 : 1'500'000;  // of 12 bytes
    cluster.model = *local::Manifest::make({{.name = "a", .count = elements, .columns = 3, .elementwise = false},
                                            {.name = "b", .count = elements, .columns = 3, .elementwise = false},
                                            {.name = "c", .count = 700'000, .columns = 3}});
    cluster.add(true);
    cluster.train(1);
    Replica& stands = cluster.add(false);
    cluster.catch_up(stands);
    for (int i = 0; i < 1000 && cluster.replicas[0]->service->bytes_served() == 0; ++i) cluster.pump(1);
    stands.daemon_stopped = true;
    cluster.fabric.stop(*stands.on_fabric);
    Replica& joiner = cluster.add(false);
    cluster.catch_up(joiner);
    const TimePoint start = cluster.clock.now();
    for (int i = 0; i < 300 && !joiner.caught_up; ++i) {
      cluster.pump(100);
      cluster.clock.advance(std::chrono::milliseconds(100));
    }
    ASSERT_TRUE(joiner.caught_up);
    EXPECT_LT(cluster.clock.now() - start, 2 * deadlines::kUnacknowledged.of(deadlines::kSilence));
  }
}

TEST(CatchUpTrouble, ASourceThatWasPausedItselfHoldsThatAgainstNobody) {
  Cluster cluster(5);
  Replica& source = cluster.add(true);
  cluster.train(1);
  Replica& joiner = cluster.add(false);
  cluster.catch_up(joiner);
  for (int i = 0; i < 1000 && source.service->bytes_served() == 0; ++i) cluster.pump(1);
  ASSERT_EQ(source.service->serving(), 1u);
  cluster.clock.advance(std::chrono::minutes(1));
  for (int i = 0; i < 200 && !joiner.caught_up; ++i) {
    cluster.pump(20);
    ASSERT_EQ(source.service->serving(), 1u);
  }
  EXPECT_TRUE(joiner.caught_up);
}

}  // namespace
}  // namespace rejoin::catchup
