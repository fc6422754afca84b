// Connections to coordinators that what lies between forgets, without either end being told.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "sim/tests/simulated.h"

namespace rejoin::sim {
namespace {

// For ever, or for less than a silence: a new one is made in time.
TEST(Forgotten, AControlConnectionThatIsForgottenCostsNobodyAPlace) {
  spdlog::set_level(spdlog::level::off);
  std::uint64_t forgotten = 0;
  for (const auto lasting : {60, 150})
    for (const std::uint32_t coordinators : {1, 3})
      for (std::uint64_t seed = 0; seed < 6; ++seed) {
        const Fault fault{.at = std::chrono::seconds(1),
                          .kind = FaultKind::forget_control,
                          .replica = 1,
                          .lasting = std::chrono::milliseconds(lasting),
                          .detail = seed};
        const std::string what = fmt::format("{} coordinators, {} ms, seed {}", coordinators, lasting, seed);
        Outcome outcome =
            play({.seed = seed, .replicas = 3, .ranks = 2, .coordinators = coordinators, .faults = {{fault}}});
        ASSERT_TRUE(holds(outcome)) << what;
        EXPECT_EQ(outcome.counts["trainer gave up"], 0u) << what;
        EXPECT_EQ(outcome.counts["epoch begun"], 1u) << what;
        forgotten += outcome.counts["fault: forget_control"];
      }
  EXPECT_EQ(forgotten, 24u);
}

}  // namespace
}  // namespace rejoin::sim
