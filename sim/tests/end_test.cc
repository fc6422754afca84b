// Jobs that end, and trainers that leave in order.
#include "sim/tests/simulated.h"

namespace rejoin::sim {
namespace {

struct TheEnd : Quiet {};

// The fault happens as the last step is committed, or within 2 ms.
TEST_F(TheEnd, AllHaveTheStateOfTheLastStepAndGoWhateverFailsThen) {
  std::uint64_t finished = 0;
  for (const auto kind :
       {FaultKind::kill_coordinator, FaultKind::crash_in_append, FaultKind::kill_daemon, FaultKind::kill_replica,
        FaultKind::hang_trainer, FaultKind::reset_control, FaultKind::stop_all})
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      const Fault fault{.at = std::chrono::milliseconds(5),
                        .moment = Moment::commit,
                        .kind = kind,
                        .replica = 1,
                        .lasting = std::chrono::milliseconds(400),
                        .detail = seed};
      Outcome outcome = play({.seed = seed, .replicas = 3, .ranks = 2, .faults = {{fault}}, .steps = 1});
      ASSERT_TRUE(holds(outcome)) << "seed " << seed << ", " << to_string(kind);
      finished += outcome.counts["job finished"];
      EXPECT_GE(outcome.counts["left the finished job"], 6u);
    }
  EXPECT_EQ(finished, 28u);
}

}  // namespace
}  // namespace rejoin::sim
