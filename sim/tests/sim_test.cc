// The simulated cluster keeps its invariants under random faults.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "base/sanitized.h"
#include "sim/tests/simulated.h"

namespace rejoin::sim {
namespace {

constexpr std::uint64_t kSeeds = kSanitized ? 8 : 140;

struct Simulated : Quiet {};

TEST_F(Simulated, TheInvariantsHoldUnderFaultsOfEveryKind) {
  std::map<std::string, std::uint64_t> counts;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Outcome outcome = play({.seed = seed, .faults = {}});
    ASSERT_TRUE(holds(outcome)) << "rejoin-sim --seed " << seed;
    for (const auto& [what, count] : outcome.counts) counts[what] += count;
  }
  if (kSeeds < 100) return;  // too few for those that are rarely drawn
  for (std::size_t kind = 0; kind < kFaultKinds; ++kind)
    EXPECT_GT(counts[fmt::format("fault: {}", to_string(static_cast<FaultKind>(kind)))], 0u);
  for (const char* what :
       {"promoted", "rolled back", "rank found silent", "trainer gave up", "epoch begun", "step foretold",
        "shares changed", "passed on by a joiner", "bytes that coding saved", "job finished", "left the finished job"})
    EXPECT_GT(counts[what], 0u) << what;
}

TEST_F(Simulated, OtherShapesHoldToo) {
  for (const auto& [replicas, ranks] : {std::pair{2u, 1u}, {1u, 2u}, {5u, 1u}, {4u, 3u}})
    for (std::uint64_t seed = 0; seed < std::max<std::uint64_t>(1, kSeeds / 10); ++seed) {
      const Outcome outcome = play({.seed = seed, .replicas = replicas, .ranks = ranks, .faults = {}});
      ASSERT_TRUE(holds(outcome)) << "rejoin-sim --seed " << seed << " --replicas " << replicas << " --ranks " << ranks;
    }
}

// Where replicas are in four rooms, and say so, or are found there by their round trips.
TEST_F(Simulated, RingsGoFromRoomToRoomAsRarelyAsTheyCan) {
  std::map<std::string, std::uint64_t> counts;
  std::set<bool> measured;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    if (!Shape::of(seed).located || Shape::of(seed).upgrade) continue;
    measured.insert(Shape::of(seed).measured);
    Outcome undisturbed = play({.seed = seed, .faults = std::vector<Fault>{}});
    ASSERT_TRUE(holds(undisturbed)) << "seed " << seed;
    EXPECT_EQ(undisturbed.counts["rooms crossed"], undisturbed.counts["rooms to cross"]) << "seed " << seed;
    const Outcome outcome = play({.seed = seed, .faults = {}});
    for (const auto& [what, count] : outcome.counts) counts[what] += count;
  }
  // An epoch that begins before all are back after a coordinator's restart keeps the order that it finds.
  EXPECT_LE(counts["rooms crossed"] * 20, counts["rooms to cross"] * 21);
  if (kSeeds < 100) return;
  EXPECT_LT(counts["rooms to cross"] * 10, counts["rooms crossed by number"] * 9);
  EXPECT_EQ(measured.size(), 2u) << "some say where they are, and some measure it";
}

TEST_F(Simulated, EverythingFollowsFromTheSeed) {
  for (std::uint64_t seed = 4; seed < (kSanitized ? 5 : 8); ++seed) {
    const Outcome once = play({.seed = seed, .faults = {}});
    (void)play({.seed = seed + 100, .faults = {}});  // what ran before must not matter
    const Outcome again = play({.seed = seed, .faults = {}});
    EXPECT_EQ(once.trace_hash, again.trace_hash);
    EXPECT_EQ(once.events, again.events);
  }
}

}  // namespace
}  // namespace rejoin::sim
