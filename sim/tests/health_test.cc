// Nothing is wrong with some replicas: they stay, and go on soon.
#include "sim/tests/simulated.h"

namespace rejoin::sim {
namespace {

using namespace std::chrono_literals;

struct Healthy : Quiet {};

Fault of(FaultKind kind, std::uint64_t seed, Duration at, Duration lasting) {
  return {.at = at, .kind = kind, .replica = static_cast<std::uint32_t>(seed) % 3, .lasting = lasting, .detail = seed};
}

TEST_F(Healthy, WhoeverStandsStillForLessThanASilenceStays) {
  std::uint64_t stalls = 0;
  for (const auto kind : {FaultKind::hang_trainer, FaultKind::stop_daemon})
    for (const Duration lasting : {60ms, 150ms})
      for (std::uint64_t seed = 0; seed < 4; ++seed) {
        const std::vector<Fault> faults{of(kind, seed, 1s, lasting), of(kind, seed + 1, 2500ms, lasting)};
        Outcome outcome = play({.seed = seed, .replicas = 3, .ranks = 2, .faults = faults});
        EXPECT_TRUE(holds(outcome)) << "seed " << seed << ", " << to_string(kind);
        EXPECT_EQ(outcome.counts["trainer gave up"], 0u) << "seed " << seed << ", " << to_string(kind);
        stalls += outcome.counts["stall of less than a silence"];
      }
  EXPECT_GT(stalls, 10u);
}

// When the coordinator comes back one hangs, or is gone: the others wait for a silence, or not at all.
TEST_F(Healthy, TheOthersGoOnSoonAfterATakeoverWithoutWhoIsNotThere) {
  std::uint64_t due = 0;
  for (const auto kind : {FaultKind::hang_trainer, FaultKind::stop_daemon, FaultKind::power_loss, FaultKind::stay_away})
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      const std::vector<Fault> faults{of(FaultKind::kill_coordinator, seed, 1s, {}), of(kind, seed, 1005ms, 2900ms)};
      Outcome outcome = play({.seed = seed, .replicas = 3, .ranks = 2, .coordinators = 1, .faults = faults});
      EXPECT_TRUE(holds(outcome)) << "seed " << seed << ", " << to_string(kind);
      due += outcome.counts["commits are due soon"];
    }
  EXPECT_GT(due, 4u);
}

}  // namespace
}  // namespace rejoin::sim
