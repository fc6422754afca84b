// The checkers are alive: bugs that are built in on purpose are found. Whether they are does not depend on how the code
// is compiled, so that no sanitizer build has these.
#include <gtest/gtest.h>

#include "sim/tests/simulated.h"

namespace rejoin::sim {
namespace {

struct Planted : Quiet {};

// A joiner dies when it has caught up, its place is taken at once, and the report that it had caught up comes late.
TEST_F(Planted, ThatAnInstanceHasCaughtUpIsNotBelievedOfTheNextOne) {
  std::uint64_t found = 0;
  for (std::uint64_t seed = 0; found == 0 && seed < 400; ++seed) {
    if (!Shape::of(seed).slow_streams) continue;
    std::vector<Fault> faults;
    for (auto at = std::chrono::milliseconds(300); at < std::chrono::seconds(3); at += std::chrono::milliseconds(200)) {
      faults.push_back({.at = at, .kind = FaultKind::kill_trainer});
      faults.push_back({.at = at, .moment = Moment::caught_up, .kind = FaultKind::kill_trainer});
    }
    const Outcome sound = play({.seed = seed, .ranks = 1, .faults = faults});
    ASSERT_TRUE(holds(sound)) << "seed " << seed;
    const Outcome planted = play({.seed = seed, .ranks = 1, .plant = Plant::wrong_instance, .faults = faults});
    found += planted.violation && planted.violation->invariant == "same-bits";
  }
  EXPECT_GT(found, 0u) << "the planted bug was not found";
}

struct Bug {
  Plant plant;
  const char* invariant;
  std::optional<FaultKind> often = {};  // where few of the faults that are drawn show it
};
struct EachPlanted : Planted, testing::WithParamInterface<Bug> {};
INSTANTIATE_TEST_SUITE_P(
    Bugs, EachPlanted,
    testing::Values(Bug{Plant::commit_without_vote, "one-decision"}, Bug{Plant::apply_without_commit, "one-decision"},
                    Bug{Plant::forget_a_decision, "one-decision", FaultKind::kill_coordinator},
                    Bug{Plant::apply_twice, "same-bits"}, Bug{Plant::skip_an_update, "same-bits"},
                    Bug{Plant::damage_after_verification, "same-bits"}, Bug{Plant::early_verification, "same-bits"},
                    Bug{Plant::wrong_batch, "exactly-once"}, Bug{Plant::touch_the_input, "input-intact"},
                    Bug{Plant::stale_write, "no-stale-write", FaultKind::kill_trainer},
                    Bug{Plant::log_too_much, "bounded-memory"}, Bug{Plant::deaf_rank, "progress"},
                    Bug{Plant::no_audit, "no-drift", FaultKind::drift},
                    Bug{Plant::joiners_prove, "same-bits", FaultKind::kill_trainer},
                    Bug{Plant::append_without_comparison, "one-decision"},
                    Bug{Plant::send_before_durable, "one-decision"}, Bug{Plant::claim_without_majority, "progress"},
                    Bug{Plant::replay_from_a_gap, "no-garbage"},
                    Bug{Plant::append_behind_a_gap, "one-decision", FaultKind::store_set_back}),
    [](const auto& instance) { return std::string(to_string(instance.param.plant)); });

TEST_P(EachPlanted, IsFoundUnderTheNameOfTheInvariantThatItBreaks) {
  const auto [plant, invariant, often] = GetParam();
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    const Outcome outcome = play({.seed = seed, .plant = plant, .faults = {}, .often = often});
    if (outcome.violation && outcome.violation->invariant == invariant) return;  // it may break others first
  }
  FAIL() << to_string(plant) << " was not found as " << invariant << " in 150 seeds";
}

}  // namespace
}  // namespace rejoin::sim
