// Who is put out where all that is said comes through relays.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "sim/random.h"
#include "sim/shape.h"
#include "sim/tests/simulated.h"

namespace rejoin::sim {
namespace {

struct Relays : Quiet {};

// A fault of this replica alone, at the next promotion.
Fault hang_at_promotion(std::uint32_t replica, std::uint64_t detail) {
  while (Random(detail).one_in(4) || Random(detail + 1).one_in(2)) ++detail;
  return {.at = std::chrono::seconds(2),
          .moment = Moment::promoted,
          .kind = FaultKind::hang_compute,
          .replica = replica,
          .lasting = std::chrono::seconds(3),
          .detail = detail};
}

// In the order in which they are put out behind the last fault.
std::vector<std::string> put_out(const Outcome& outcome) {
  std::vector<std::string> all;
  bool hangs = false;
  for (const auto& line : outcome.trace) {
    hangs |= line.find("FAULT hang_compute") != std::string::npos;
    const auto reason = line.find("(without replica ");
    if (hangs && reason != std::string::npos) all.push_back(line.substr(reason + 9));
  }
  return all;
}

// Replica 0 has come back, and has more patience in its first steps than the others: some of them wait for it, which
// waits for the one that hangs.
TEST_F(Relays, ANewcomerThatWaitsWithPatienceIsNotPutOutForTheOneThatHangs) {
  std::set<std::uint32_t> relays;
  std::size_t found = 0;
  for (std::uint64_t seed = 0; found < 12 && seed < 200; ++seed) {
    const Shape shape = Shape::of(seed);
    if (shape.relays == 0 || shape.upgrade || shape.evaluates || shape.long_updates) continue;
    const std::uint32_t hung = 1 + found % 2;
    const Fault away{.at = std::chrono::seconds(1), .kind = FaultKind::stay_away, .lasting = std::chrono::seconds(1)};
    const Outcome outcome =
        play({.seed = seed, .replicas = 3, .faults = {{away, hang_at_promotion(hung, seed)}}, .trace = true});
    EXPECT_TRUE(holds(outcome)) << "seed " << seed;
    const auto out = put_out(outcome);
    if (out.empty()) continue;
    relays.insert(shape.relays), ++found;
    EXPECT_EQ(out[0].find(fmt::format("replica {}: ", hung)), 0u) << fmt::format("seed {}: {}", seed, out[0]);
  }
  EXPECT_EQ(relays.size(), 3u);
  EXPECT_EQ(found, 12u);
}

}  // namespace
}  // namespace rejoin::sim
