// A joiner ends with the same bits as everybody, within its bounds. What must hold: same-bits, no-stale-write,
// bounded-memory.
#include "catchup/tests/cluster.h"

namespace rejoin::catchup {
namespace {

INSTANTIATE_TEST_SUITE_P(Memory, CatchUp,
                         testing::Values(Memory{}, Memory{.on_gpu = true}, Memory{.scattered = true},
                                         Memory{.on_gpu = true, .scattered = true}),
                         [](const auto& i) {
                           return std::string(i.param.on_gpu ? "gpu" : "host") +
                                  (i.param.scattered ? "_scattered" : "");
                         });

TEST_P(CatchUp, AJoinerEndsWithTheSameBitsWhileEveryoneTrainsOn) {
  for (std::uint64_t seed = 1; seed <= seeds(); ++seed) {
    SCOPED_TRACE(seed);
    Cluster cluster(seed, seed % 2 == 0, memory);
    cluster.add(true), cluster.add(true);
    for (int i = 0; i < 3; ++i) cluster.train(1);
    Replica& joiner = cluster.add(false);
    cluster.catch_up(joiner);
    cluster.train_until_caught_up(joiner, 200, static_cast<int>(2 + seed));
    ASSERT_TRUE(joiner.caught_up);
    EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
    joiner.contributes = true;
    joiner.service->finish({joiner.id, RankId(0)});
    cluster.train(5);
    EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
    const auto progress = cluster.replicas[0]->service->bytes_served() + cluster.replicas[1]->service->bytes_served();
    EXPECT_GE(progress, joiner.owner->manifest().bytes());
  }
}

// Each column has its own type, and so has the gradient: bfloat16 weights with float32 masters, and the like.
TEST_P(CatchUp, ColumnsOfSeveralTypesArriveWithTheSameBits) {
  const std::uint64_t less = on_gpu ? 18 : 9;
  const auto bf16 = DataType::bfloat16, f32 = DataType::float32, f64 = DataType::float64;
  const auto compression = memory.scattered ? Compression::always : Compression::never;
  Cluster cluster(3, true, memory);
  cluster.compression = compression;
  cluster.model =
      *local::Manifest::make({{.name = "masters",
                               .type = bf16,
                               .count = 900'001 / less,
                               .columns = 4,
                               .moment_types = {f32, f32, f32},
                               .gradient_type = f32},
                              {.name = "narrow gradient", .count = 500'003 / less, .columns = 3, .gradient_type = bf16},
                              {.name = "whole",
                               .type = bf16,
                               .count = 300'001 / less,
                               .columns = 2,
                               .elementwise = false,
                               .moment_types = {f64}},
                              {.name = "most columns",
                               .type = DataType::float16,
                               .count = 700 / less,
                               .columns = 8,
                               .moment_types = {f64, f32, bf16, f32, DataType::int64, DataType::int32, bf16},
                               .gradient_type = f32}});
  cluster.add(true), cluster.add(true);
  cluster.train(1);
  Replica& joiner = cluster.add(false);
  cluster.catch_up(joiner);
  cluster.train_until_caught_up(joiner, 200, 4);
  ASSERT_TRUE(joiner.caught_up);
  EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
  EXPECT_EQ(joiner.service->progress({joiner.id, RankId(0)}, cluster.clock.now())->refetched, 0u);
  joiner.contributes = true;
  joiner.service->finish({joiner.id, RankId(0)});
  cluster.train(5);
  EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
}

// A step has been committed that the source's trainer has not applied yet, and the joiner starts where the source still
// is: what it could have at once lacks that step, which it has no gradients of.
TEST(CatchUpService, NothingIsTakenThatLacksAStepFromBeforeTheJoiner) {
  Cluster cluster(7);
  cluster.add(true);
  Replica& joiner = cluster.add(false);
  cluster.step = 1;
  cluster.catch_up(joiner);
  cluster.pump(20000);
  EXPECT_FALSE(joiner.caught_up);
  cluster.replicas[0]->update(Step(1));
  cluster.train_until_caught_up(joiner, 200, 20);
  ASSERT_TRUE(joiner.caught_up);
  EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
}

// Its checkpoint is from before the job was rolled back: no source will have so late a version for long.
TEST(CatchUpService, AJoinerThatComesWithALaterStepThanAnyIsNotKeptWaitingForThatStep) {
  Cluster cluster(7);
  cluster.add(true), cluster.add(true);
  cluster.train(1);
  Replica& joiner = cluster.add(false);
  joiner.owner->set_version(1000);
  cluster.catch_up(joiner);
  cluster.train_until_caught_up(joiner, 200, 20);
  ASSERT_TRUE(joiner.caught_up);
  EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
}

TEST_P(CatchUp, KeptGradientsStayWithinTheirBudgetAndItStillArrives) {
  Cluster cluster(4, true, memory);
  cluster.add(true);
  cluster.train(1);
  constexpr std::uint64_t budget = 3 * MiB;
  Replica& joiner = cluster.add(false, budget);
  cluster.catch_up(joiner);
  std::uint64_t most = 0;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (int i = 0; (on_gpu ? std::chrono::steady_clock::now() < deadline : i < 400) && !joiner.caught_up; ++i) {
    cluster.train(8);
    most = std::max(most, joiner.gradient_log->bytes());
  }
  ASSERT_TRUE(joiner.caught_up);
  EXPECT_LE(most, budget);
  EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
}

TEST(CatchUpService, ABudgetForHardlyMoreThanOneSliceIsEnough) {
  Cluster cluster(7);
  cluster.add(true);
  cluster.train(1);
  const auto& manifest = cluster.replicas[0]->owner->manifest();
  std::uint64_t largest = 0;
  for (const auto& slice : manifest.slices()) largest = std::max(largest, slice.range.count * 4);
  Replica& joiner = cluster.add(false, 2 * largest);
  cluster.catch_up(joiner);
  std::uint64_t most = 0;
  for (int i = 0; i < 3000 && !joiner.caught_up; ++i) {
    cluster.train(6);
    most = std::max(most, joiner.gradient_log->bytes());
  }
  ASSERT_TRUE(joiner.caught_up);
  EXPECT_LE(most, 2 * largest);
  EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
}

TEST_P(CatchUp, CodedSlicesArriveWithTheSameBits) {
  for (std::uint64_t seed = 1; seed <= seeds(); ++seed) {
    SCOPED_TRACE(seed);
    Cluster cluster(seed, seed % 2 == 0, memory);
    cluster.compression = Compression::always;
    cluster.add(true), cluster.add(true);
    cluster.train(1);
    Replica& joiner = cluster.add(false);
    cluster.catch_up(joiner);
    cluster.train_until_caught_up(joiner, 200, static_cast<int>(2 + seed));
    ASSERT_TRUE(joiner.caught_up);
    EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
    const auto progress = *joiner.service->progress({joiner.id, RankId(0)}, cluster.clock.now());
    // How well it codes depends on how long it was trained before it came.
    EXPECT_LT(progress.wire_bytes, progress.bytes / 20 * 19) << "little was coded";
  }
}

TEST(CatchUpService, TheStreamKeepsToItsLimit) {
  Cluster cluster(8);
  cluster.limit = 1e9;
  cluster.add(true);
  Replica& joiner = cluster.add(false);
  cluster.catch_up(joiner);
  const TimePoint start = cluster.clock.now();
  for (int i = 0; i < 2000 && !joiner.caught_up; ++i) {
    cluster.pump(20);
    cluster.clock.advance(std::chrono::microseconds(100));
    cluster.train(0);
  }
  ASSERT_TRUE(joiner.caught_up);
  const double took = seconds(cluster.clock.now() - start);
  const auto bytes = static_cast<double>(joiner.owner->manifest().bytes());
  EXPECT_LE(bytes, 1e9 * (took + 0.05) + static_cast<double>(local::kPartBytes));
  EXPECT_GE(bytes, 1e9 * took * 0.3);
}

// Its own training comes first on the link.
TEST(CatchUpService, WhileASourceExchangesGradientsItSendsOneSliceAfterAnother) {
  Cluster cluster(8);
  cluster.model = model_of(40);
  Replica &source = cluster.add(true), &joiner = cluster.add(false);
  const auto slices = [&] { return joiner.service->progress({joiner.id, RankId(0)}, cluster.clock.now())->slices; };
  source.owner->set_phase(local::Phase::reduce);
  cluster.clock.advance(std::chrono::milliseconds(20));
  cluster.catch_up(joiner);
  for (int i = 0; i < 1000 && slices() == 0; ++i) cluster.pump(1);
  cluster.pump(1000);
  EXPECT_EQ(slices(), 1u) << "and a pause in between";
  cluster.clock.advance(std::chrono::milliseconds(20));
  cluster.pump(1000);
  EXPECT_EQ(slices(), 2u);
  source.owner->set_phase(local::Phase::compute);
  cluster.pump(1000);
  EXPECT_EQ(slices(), 40u);
}

TEST(GradientLog, NoUpdateIsMadeThatLacksTheOneBefore) {
  for (const auto state : {local::SliceState::arrived, local::SliceState::current}) {
    Cluster cluster(1);
    cluster.model = model_of(1);
    Replica& joiner = cluster.add(false);
    const auto put = [&](std::uint64_t version) {
      joiner.owner->page().slice_statuses()[0].store(local::SliceStatus{state, version}.packed());
    };
    put(3);
    joiner.begin_update(Step(5));
    EXPECT_TRUE(joiner.updates.empty());
    joiner.end_update();
    EXPECT_FALSE(joiner.status(0).state == local::SliceState::current && joiner.status(0).version() == 5);
    put(5);
    joiner.begin_update(Step(6));
    EXPECT_EQ(joiner.updates.size(), 1u);
    joiner.end_update();
    EXPECT_EQ(joiner.status(0).version(), 6u);
  }
}

// As where there is a limit to what the process may have (ulimit -v): the slice is fetched again.
TEST(GradientLog, AGradientThatTheHostHasNoMemoryForIsNotKept) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer ends the process that asks for as much";
  Cluster cluster(1);
  cluster.model = model_of(2);
  Replica& joiner = cluster.add(false);
  const auto gradient_log = *GradientLog::make(*joiner.owner, ~std::uint64_t{0});
  auto* statuses = joiner.owner->page().slice_statuses();
  for (int slice : {0, 1}) statuses[slice].store(local::SliceStatus{local::SliceState::requested, 0}.packed());
  const Bytes small(16);
  std::size_t huge = 0;
  const auto gradient_of = [&](std::uint32_t tensor, std::uint64_t, std::uint64_t) {
    return BytesView(small.data(), tensor == 0 && huge != 0 ? huge : small.size());
  };
  for (std::uint64_t step = 1; step <= 2; ++step) {
    const auto updates = gradient_log->begin(Step(step), false, 1, gradient_of);
    ASSERT_TRUE(updates) << updates.error().message;
    EXPECT_TRUE(updates->empty());
    gradient_log->end(Step(step), false);
    EXPECT_EQ(gradient_log->bytes(), 32u) << "of each one; then of the other two, and of this one none";
    huge = std::size_t{1} << 62;
  }
}

}  // namespace
}  // namespace rejoin::catchup
