// What coding has lost counts as much as the trainer says, and once.
#include "ftar/feedback.h"

#include <cmath>
#include <limits>

#include "ftar/tests/ring_cluster.h"

namespace rejoin::ftar {
namespace {

struct Kept : testing::Test {
  static constexpr Range kAll{0, 64};
  std::unique_ptr<Coder> coder = make_host_coder();
  Feedback feedback = *Feedback::make(*coder, kAll.length);

  void reduce(std::uint64_t step, float lost, std::uint32_t divisor = 1) {
    feedback.begin(Step(step), divisor);
    std::memcpy(feedback.after(kAll), &lost, sizeof lost);
    feedback.on_done();
  }
  // What is added in a step that begins now; nothing: nothing is.
  std::optional<float> added(std::uint64_t step, std::uint32_t divisor = 1) {
    feedback.begin(Step(step), divisor);
    const std::byte* kept = feedback.before(kAll);
    if (kept == nullptr) return std::nullopt;
    float value = 0;
    std::memcpy(&value, kept, sizeof value);
    return value * feedback.times();
  }
};

TEST_F(Kept, IsScaledAsIsToldOfItsStep) {
  reduce(1, 8);
  feedback.scale(Step(1), 0.5f);
  feedback.scale(Step(1), 0.25f);  // the last one holds
  EXPECT_EQ(added(2), 2.0f);
  reduce(2, 3);
  EXPECT_EQ(added(3), 3.0f) << "nothing was told of step 2";
}

TEST_F(Kept, IsScaledAlikeInEachRetryAndWithEachDivisor) {
  reduce(1, 8, 4);
  feedback.scale(Step(1), 0.25f);
  for (int retry = 0; retry < 3; ++retry) {
    EXPECT_EQ(added(2, 4), 2.0f);
    EXPECT_EQ(added(2, 8), 4.0f) << "the mean is of twice as many";
    std::memset(feedback.after(kAll), 1, kAll.length);
  }
}

TEST_F(Kept, IsNotReadWhereItsStepCountsForNothing) {
  for (const float lost : {1.0f, INFINITY, -INFINITY, std::numeric_limits<float>::quiet_NaN()}) {
    reduce(1, lost);
    feedback.scale(Step(1), 0);
    for (int retry = 0; retry < 3; ++retry) EXPECT_EQ(added(2), std::nullopt);
    feedback.forget();
  }
  reduce(1, 1e30f, 1 << 20);
  feedback.scale(Step(1), std::numeric_limits<float>::denorm_min());
  EXPECT_EQ(added(2), std::nullopt) << "the factor is lost in the divisor";
}

TEST_F(Kept, CountsWholeWhateverIsToldOfOtherStepsOrTooLate) {
  feedback.scale(Step(1), 0);  // too early
  reduce(1, 8);
  for (const std::uint64_t step : {0, 2, 3}) feedback.scale(Step(step), 0);
  EXPECT_EQ(added(2), 8.0f);
  feedback.scale(Step(1), 0);  // too late
  feedback.scale(Step(2), 0);  // it is under way
  EXPECT_EQ(added(2), 8.0f);
  reduce(2, 5);
  feedback.scale(Step(2), 0);
  reduce(2, 6);  // after all it had not been committed
  EXPECT_EQ(added(3), 6.0f);
}

TEST_F(Kept, AndItsFactorAreForgottenTogether) {
  reduce(1, 8);
  feedback.scale(Step(1), 0.5f);
  feedback.forget();
  feedback.scale(Step(1), 0.5f);
  EXPECT_EQ(added(2), std::nullopt);
  reduce(2, 3);
  EXPECT_EQ(added(3), 3.0f);
}

TEST_F(Kept, CountsNoTimesThatAreNoNumber) {
  reduce(1, 8);
  for (const float factor : {-1.0f, INFINITY, std::numeric_limits<float>::quiet_NaN()})
    EXPECT_DEATH(feedback.scale(Step(1), factor), "what step 1 has lost is to count");
}

// ---- in a ring

struct FtarFeedback : FtarRing {
  // The results of the last of three steps. In the first one gradient is 1e15, and its members are told of it that it
  // counts so much; of the others nothing. `fails`: the second is repeated from its midst.
  std::vector<std::vector<float>> after_a_spike(Coding coding, std::optional<float> factor, bool fails = false,
                                                bool spike = true) const {
    Cluster cluster(5, {3000}, over);
    cluster.options.coding = coding;
    for (int i = 0; i < 3; ++i) cluster.add();
    cluster.enter(Epoch(1), cluster.ring_members());
    const auto reduce = [&](std::uint64_t step) {
      cluster.start(Step(step), ReduceOp::mean);
      EXPECT_TRUE(cluster.until([&] { return cluster.all_done(Step(step)); }));
    };
    const float usual = cluster.ranks[1]->input[0][40];
    if (spike) set(cluster, 1e15f);
    reduce(1);
    set(cluster, usual);
    for (auto& rank : cluster.ranks)
      if (factor) rank->communicator->scale_feedback(Step(1), *factor);
    for (std::uint64_t epoch = 2; fails && epoch < 4; ++epoch) {
      cluster.start(Step(2), ReduceOp::mean);
      for (auto moment = 100 * epoch; moment > 0; --moment) cluster.fabric.step(), cluster.pump();
      for (auto& rank : cluster.ranks) rank->outcomes.clear();
      cluster.enter(Epoch(epoch), cluster.ring_members());
    }
    reduce(2);
    cluster.expect_within(cluster.live(), 1, [](auto, auto) { return 1e30; });  // all have the same bits
    return cluster.ranks[0]->output;
  }
  // One of the inputs of a member in the middle.
  static void set(Cluster& cluster, float value) {
    Rank& rank = *cluster.ranks[1];
    rank.input[0][40] = value;
    if (!cluster.device) return;
    auto* const there = rank.inputs[0].bytes.data() + 40 * sizeof(float);
    EXPECT_TRUE(cluster.stream->copy(there, reinterpret_cast<const std::byte*>(&value), sizeof value));
    EXPECT_TRUE(cluster.stream->synchronize());
  }
  static double furthest(const std::vector<std::vector<float>>& one, const std::vector<std::vector<float>>& other) {
    double most = 0;
    for (std::size_t i = 0; i < one[0].size(); ++i)
      most = std::max(most, std::abs(static_cast<double>(one[0][i]) - static_cast<double>(other[0][i])));
    return most;
  }
};
INSTANTIATE_TEST_SUITE_P(Memory, FtarFeedback, testing::Values(Over::host, Over::gpu),
                         [](const auto& i) { return std::string(i.param == Over::gpu ? "gpu" : "host"); });

TEST_P(FtarFeedback, ASpikeThatWasClippedOrSkippedLeavesNoTraceInTheNextStep) {
  for (const Coding coding : {Coding::eight, Coding::four}) {
    // Of a step without a spike, of which nothing is kept.
    const auto calm = after_a_spike(coding, 0.0f, false, false);
    EXPECT_EQ(after_a_spike(coding, 0.0f), calm);
    EXPECT_EQ(after_a_spike(coding, 0.0f, true), calm);
    EXPECT_LT(furthest(after_a_spike(coding, 1e-20f), calm), 1e-4);
    EXPECT_EQ(after_a_spike(coding, 1e-20f, true), after_a_spike(coding, 1e-20f));
    EXPECT_GT(furthest(after_a_spike(coding, std::nullopt), calm), 1e9) << "where nothing is told it is there whole";
  }
}

}  // namespace
}  // namespace rejoin::ftar
