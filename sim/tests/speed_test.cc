// Replicas of different speeds, which change: what they cost the others with equal batches, and with balanced ones.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "sim/tests/simulated.h"

namespace rejoin::sim {
namespace {

// Samples a second of four replicas, of which one computes at half the others' speed, and later another one.
struct Throughput {
  double before = 0, after = 0;
};
Throughput of_four(bool balance, double times) {
  std::uint64_t seed = 1;  // whose trainers do nothing but train, and all can be given shares
  for (Shape shape = Shape::of(seed); shape.evaluates || shape.long_updates || shape.constant_batch || shape.upgrade;)
    shape = Shape::of(++seed);
  constexpr Duration changes = std::chrono::seconds(60);
  const Outcome outcome = play({.seed = seed,
                                .replicas = 4,
                                .ranks = 1,
                                .coordinators = 1,
                                .batch = 12,  // sums of more are not exact in the model
                                .faults = std::vector<Fault>{},
                                .balance = balance,
                                .speeds = {{.replica = 3, .times = times},
                                           {.from = changes, .replica = 3, .times = 1},
                                           {.from = changes, .replica = 0, .times = times}},
                                .sample = std::chrono::milliseconds(25),
                                .run_for = Options::Long{.failures = 0, .samples = 18'000}});
  EXPECT_TRUE(holds(outcome));
  const auto between = [&](double from, double to) {
    const auto at = [&](double time) {
      return *std::ranges::find_if(outcome.committed, [&](const auto& row) { return row.at >= time; });
    };
    if (outcome.committed.empty() || outcome.committed.back().at < to) return 0.0;
    const auto first = at(from), last = at(to);
    return static_cast<double>(last.samples - first.samples) / (last.at - first.at);
  };
  return {between(20, 55), between(80, 115)};
}

// Its price is its own slowness, an eighth of what four can do, and not everybody's.
TEST(Speeds, AReplicaOfHalfTheSpeedCostsAnEighthAndNotHalfOfTheThroughput) {
  spdlog::set_level(spdlog::level::off);
  const Throughput alike = of_four(false, 1), equal = of_four(false, 2), balanced = of_four(true, 2);
  fmt::print(
      "samples a second of four replicas: {:.1f} where all are fast; one at half speed, then another one: {:.1f} and "
      "{:.1f} with equal batches, {:.1f} and {:.1f} with balanced ones\n",
      alike.before, equal.before, equal.after, balanced.before, balanced.after);
  for (const double with : {balanced.before, balanced.after}) {
    EXPECT_GT(with / alike.before, 0.84);
    EXPECT_LT(with / alike.before, 0.9) << "more than the four can do: 3.5 / 4, and what steps cost besides";
  }
  for (const double without : {equal.before, equal.after}) EXPECT_LT(without / alike.before, 0.55);
}

}  // namespace
}  // namespace rejoin::sim
