// The data network of one replica, or between some, is cut, and the control network is whole.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "sim/tests/simulated.h"

namespace rejoin::sim {
namespace {

struct Cut : Quiet {};

// Seeds have different networks, links and ways of the cut; in larger jobs some cut off two together.
TEST_F(Cut, AReplicaThatIsCutFromAllOthersIsPutOutAloneAndTheOthersGoOn) {
  std::map<std::string, std::uint64_t> counts;
  for (const auto& [replicas, ranks] : {std::pair{3u, 1u}, {3u, 2u}, {5u, 1u}, {5u, 2u}})
    for (std::uint64_t seed = 0; seed < 2 * replicas; ++seed) {
      const Fault fault{.at = std::chrono::seconds(1),
                        .kind = FaultKind::cut_replica,
                        .replica = static_cast<std::uint32_t>(seed) % replicas,
                        .lasting = std::chrono::seconds(seed % 2 == 0 ? 2 : 4),
                        .detail = seed};
      Outcome outcome = play({.seed = seed, .replicas = replicas, .ranks = ranks, .faults = {{fault}}});
      EXPECT_TRUE(holds(outcome)) << fmt::format("{} replicas of {} ranks, seed {}", replicas, ranks, seed);
      for (const auto& [what, count] : outcome.counts) counts[what] += count;
    }
  EXPECT_GT(counts["replica cut from all others"], 10u);
  EXPECT_GT(counts["two replicas cut from all others"], 0u);
}

}  // namespace
}  // namespace rejoin::sim
