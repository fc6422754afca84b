#include "sim/fault.h"

#include <algorithm>
#include <array>
#include <random>

namespace rejoin::sim {

namespace {

constexpr std::array<std::string_view, kFaultKinds> kFaultNames{
    "kill_trainer", "hang_trainer",      "slow_trainer",     "kill_replica",    "kill_all",
    "kill_daemon",  "power_loss",        "kill_coordinator", "crash_in_append", "disk_full",
    "partition",    "one_way_partition", "cut_ring",         "cut_stream",      "damage",
    "pause",        "lose_rail",         "slow_link",        "damage_at_rest"};

constexpr std::array<std::string_view, kPlants> kPlantNames{
    "none",         "commit_without_vote", "apply_without_commit", "apply_twice", "skip_a_piece", "forget_a_decision",
    "wrong_batch",  "touch_the_input",     "damage_after_proof",   "deaf_rank",   "early_proof",  "stale_write",
    "keep_too_much"};

}  // namespace

std::string_view to_string(FaultKind kind) { return kFaultNames[static_cast<std::size_t>(kind)]; }
std::string_view to_string(Plant plant) { return kPlantNames[static_cast<std::size_t>(plant)]; }

std::string to_string(const Fault& fault) {
  return fmt::format("{:.6f} s: {} of replica {} rank {}{}", seconds(fault.at), to_string(fault.kind), fault.replica,
                     fault.rank,
                     fault.lasting > Duration{} ? fmt::format(" for {:.1f} ms", milliseconds(fault.lasting)) : "");
}

Result<Plant> parse_plant(std::string_view name) {
  const auto found = std::find(kPlantNames.begin(), kPlantNames.end(), name);
  if (found != kPlantNames.end()) return static_cast<Plant>(found - kPlantNames.begin());
  return fail(ErrorCode::invalid_argument, "no planted bug '{}'; there are: {}", name, fmt::join(kPlantNames, ", "));
}

std::vector<Fault> draw_faults(std::uint64_t seed, std::uint32_t replicas, std::uint32_t ranks, Duration end) {
  std::mt19937_64 random(seed * 0x9e3779b97f4a7c15 + 1);
  // Which kinds this seed knows, and how often: some seeds are calm, some know one kind only, some know all.
  std::array<std::uint64_t, kFaultKinds> weights{};
  for (auto& weight : weights) weight = random() % 3 == 0 ? 1 + random() % 8 : 0;
  if (seed % 4 == 0) weights.fill(1);
  if (std::all_of(weights.begin(), weights.end(), [](auto weight) { return weight == 0; })) weights[0] = 1;
  std::uint64_t total = 0;
  for (auto weight : weights) total += weight;
  const std::array<Duration, 5> gaps{std::chrono::milliseconds(20), std::chrono::milliseconds(60),
                                     std::chrono::milliseconds(150), std::chrono::milliseconds(400),
                                     std::chrono::milliseconds(1000)};
  const Duration gap = gaps[random() % gaps.size()];
  std::vector<Fault> faults;
  for (Duration at{};;) {
    at += Duration(static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(2 * gap.count())));
    if (at >= end) return faults;
    std::uint64_t drawn = random() % total;
    std::size_t kind = 0;
    for (; drawn >= weights[kind]; ++kind) drawn -= weights[kind];
    const std::uint64_t longest = random() % 2 == 0 ? 40 : 600;
    faults.push_back({.at = at,
                      .kind = static_cast<FaultKind>(kind),
                      .replica = static_cast<std::uint32_t>(random() % replicas),
                      .rank = static_cast<std::uint32_t>(random() % ranks),
                      .lasting = std::chrono::milliseconds(1 + random() % longest)});
  }
}

}  // namespace rejoin::sim
