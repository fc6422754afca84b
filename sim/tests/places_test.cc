// One process for a place, who stands between a rank and the coordinator, and logs that are of another time or another
// job: one fault each, and what it may cost.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "sim/tests/simulated.h"

namespace rejoin::sim {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kOfPlaces = 20;

struct Places : Quiet {};

Outcome play_one(FaultKind kind, Duration lasting, std::uint64_t seed, std::uint64_t detail) {
  const Fault fault{.at = 1s, .kind = kind, .replica = 1, .lasting = lasting, .detail = detail};
  return play({.seed = seed, .replicas = 3, .ranks = 2, .faults = {{fault}}});
}

// Of fault.detail: see World::second_process().
bool stops_the_first(std::uint64_t detail) { return !Random(detail).one_in(3); }

TEST_F(Places, ASecondProcessIsRefusedWhileTheFirstLives) {
  std::uint64_t came = 0;
  for (std::uint64_t seed = 0; seed < kOfPlaces; ++seed) {
    if (stops_the_first(seed) || Shape::of(seed).upgrade) continue;
    Outcome outcome = play_one(FaultKind::second_process, 100ms, seed, seed);
    ASSERT_TRUE(holds(outcome)) << "seed " << seed;
    EXPECT_EQ(outcome.counts["the second process stays"], 0u) << "seed " << seed;
    EXPECT_EQ(outcome.counts["trainer gave up"], outcome.counts["second process"]) << "seed " << seed;
    EXPECT_EQ(outcome.counts["epoch begun"], 1u) << "seed " << seed;
    came += outcome.counts["second process"];
  }
  EXPECT_GT(came, 3u);
}

// Either may be the first to find the next daemon.
TEST_F(Places, ASecondProcessThatComesWhileTheDaemonIsAwayDoesNotGetThePlace) {
  std::uint64_t came = 0;
  for (std::uint64_t seed = 0; seed < 3 * kOfPlaces; ++seed) {
    if (stops_the_first(seed) || Shape::of(seed).upgrade) continue;
    const std::vector<Fault> faults{
        {.at = 1s, .kind = FaultKind::kill_daemon, .replica = 1},
        {.at = 1001ms, .kind = FaultKind::second_process, .replica = 1, .lasting = 100ms, .detail = seed}};
    Outcome outcome = play({.seed = seed, .replicas = 3, .ranks = 2, .faults = faults});
    ASSERT_TRUE(holds(outcome)) << "seed " << seed;
    EXPECT_EQ(outcome.counts["the second process stays"], 0u) << "seed " << seed;
    came += outcome.counts["second process"];
  }
  EXPECT_GT(came, 3u);
}

TEST_F(Places, WhoWasReplacedWhileItWasStoppedGoes) {
  std::uint64_t stayed = 0;
  for (std::uint64_t seed = 0; seed < kOfPlaces; ++seed) {
    if (!stops_the_first(seed)) continue;
    Outcome outcome = play_one(FaultKind::second_process, 2s, seed, seed);
    ASSERT_TRUE(holds(outcome)) << "seed " << seed;
    stayed += outcome.counts["the second process stays"];
  }
  EXPECT_GT(stayed, 3u);
}

TEST_F(Places, ADaemonThatStopsWithinItsIntroductionIsHeardWhenItGoesOn) {
  std::uint64_t stopped = 0;
  for (std::uint64_t seed = 0; seed < kOfPlaces; ++seed)
    for (const auto lasting : {50ms, 1000ms}) {
      Outcome outcome = play_one(FaultKind::stop_introduction, lasting, seed, seed);
      ASSERT_TRUE(holds(outcome)) << "seed " << seed;
      stopped += outcome.counts["stopped within an introduction"];
    }
  EXPECT_GT(stopped, 3u);
}

TEST_F(Places, ARelayThatIsBackWithinTheSilenceCostsNobodyAPlace) {
  std::uint64_t relays = 0;
  for (std::uint64_t seed = 0; seed < 3 * kOfPlaces; ++seed)
    for (const auto kind : {FaultKind::kill_relay, FaultKind::stop_relay}) {
      const Shape shape = Shape::of(seed);
      if (shape.relays == 0 || shape.upgrade) continue;
      Outcome outcome = play_one(kind, 60ms, seed, seed);
      const std::string what = fmt::format("{} with seed {}", to_string(kind), seed);
      ASSERT_TRUE(holds(outcome)) << what;
      EXPECT_EQ(outcome.counts["trainer gave up"], 0u) << what;
      EXPECT_EQ(outcome.counts["epoch begun"], 1u) << what;
      relays += shape.relays;
    }
  EXPECT_GT(relays, 3u);
}

TEST_F(Places, AnotherJobsCoordinatorCostsNobodyAPlace) {
  std::uint64_t came = 0;
  for (std::uint64_t seed = 0; seed < kOfPlaces; ++seed) {
    if (Shape::of(seed).upgrade) continue;
    Outcome outcome = play_one(FaultKind::other_job, 600ms, seed, seed);
    ASSERT_TRUE(holds(outcome)) << "seed " << seed;
    EXPECT_EQ(outcome.counts["trainer gave up"], 0u) << "seed " << seed;
    EXPECT_EQ(outcome.counts["epoch begun"], 1u) << "seed " << seed;
    came += outcome.counts["coordinator of another job"];
  }
  EXPECT_GT(came, 3u);
}

TEST_F(Places, AnOlderLogCostsNothingWhereTheWholeOneIsPutBack) {
  std::uint64_t whole = 0, older = 0;
  for (std::uint64_t seed = 0; seed < kOfPlaces; ++seed) {
    if (Shape::of(seed).upgrade) continue;
    Outcome outcome = play_one(FaultKind::older_log, 600ms, seed, seed);
    ASSERT_TRUE(holds(outcome)) << "seed " << seed;
    older += outcome.counts["went on from the older log"];
    if (outcome.counts["the whole log put back"] == 0) continue;
    ++whole;
    EXPECT_EQ(outcome.counts["trainer gave up"], 0u) << "seed " << seed;
    EXPECT_EQ(outcome.counts["rolled back"], 0u) << "seed " << seed;
    EXPECT_EQ(outcome.counts["epoch begun"], 1u) << "seed " << seed;
  }
  EXPECT_GT(whole, 3u);
  EXPECT_GT(older, 3u);
}

}  // namespace
}  // namespace rejoin::sim
