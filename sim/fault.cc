#include "sim/fault.h"

#include <algorithm>
#include <array>

#include "base/fail.h"
#include "sim/random.h"

namespace rejoin::sim {

namespace {

constexpr std::array<std::string_view, kFaultKinds> kFaultNames{"kill_trainer",
                                                                "hang_trainer",
                                                                "slow_trainer",
                                                                "kill_replica",
                                                                "kill_all",
                                                                "kill_daemon",
                                                                "power_loss",
                                                                "kill_coordinator",
                                                                "crash_in_append",
                                                                "disk_full",
                                                                "partition",
                                                                "one_way_partition",
                                                                "cut_ring",
                                                                "cut_stream",
                                                                "damage",
                                                                "pause",
                                                                "lose_rail",
                                                                "slow_link",
                                                                "damage_at_rest",
                                                                "stop_daemon",
                                                                "stop_coordinator",
                                                                "stop_some",
                                                                "stop_all",
                                                                "suspend_node",
                                                                "slow_disk",
                                                                "hang_compute",
                                                                "reset_control",
                                                                "reset_ring",
                                                                "reset_stream",
                                                                "black_hole",
                                                                "refuse_memory",
                                                                "drift",
                                                                "flip_reduced",
                                                                "flip_state",
                                                                "busy_trainer",
                                                                "lose_log",
                                                                "slow_digest",
                                                                "store_away",
                                                                "store_cut_off",
                                                                "cut_off_from_some",
                                                                "slow_memory",
                                                                "kill_some",
                                                                "lying_joiner",
                                                                "forget",
                                                                "forget_control",
                                                                "second_process",
                                                                "stop_introduction",
                                                                "other_job",
                                                                "older_log",
                                                                "kill_relay",
                                                                "stop_relay",
                                                                "store_read_only",
                                                                "store_set_back",
                                                                "stay_away",
                                                                "cut_off_all",
                                                                "stop_stream",
                                                                "cut_replica"};

constexpr std::array<std::string_view, kMoments> kMomentNames{"at once",        "commit",    "epoch",    "update",
                                                              "catch_up_begun", "caught_up", "promoted", "rank_up"};

constexpr std::array<std::string_view, kPlants> kPlantNames{"none",
                                                            "commit_without_vote",
                                                            "apply_without_commit",
                                                            "apply_twice",
                                                            "skip_an_update",
                                                            "forget_a_decision",
                                                            "wrong_batch",
                                                            "touch_the_input",
                                                            "damage_after_verification",
                                                            "deaf_rank",
                                                            "early_verification",
                                                            "stale_write",
                                                            "log_too_much",
                                                            "wrong_instance",
                                                            "no_audit",
                                                            "joiners_prove",
                                                            "append_without_comparison",
                                                            "send_before_durable",
                                                            "answer_unconfirmed",
                                                            "claim_without_majority",
                                                            "replay_from_a_gap",
                                                            "append_behind_a_gap"};

}  // namespace

std::string_view to_string(FaultKind kind) { return kFaultNames[static_cast<std::size_t>(kind)]; }
std::string_view to_string(Moment moment) { return kMomentNames[static_cast<std::size_t>(moment)]; }
std::string_view to_string(Plant plant) { return kPlantNames[static_cast<std::size_t>(plant)]; }

std::string to_string(const Fault& fault) {
  return fmt::format("{:.6f} s{}: {} of replica {} rank {}{}", seconds(fault.at),
                     fault.moment == Moment::at_once ? "" : fmt::format(", next {}", to_string(fault.moment)),
                     to_string(fault.kind), fault.replica, fault.rank,
                     fault.lasting > Duration{} ? fmt::format(" for {:.1f} ms", milliseconds(fault.lasting)) : "");
}

Result<FaultKind> parse_fault(std::string_view name) {
  const auto found = std::find(kFaultNames.begin(), kFaultNames.end(), name);
  if (found != kFaultNames.end()) return static_cast<FaultKind>(found - kFaultNames.begin());
  return fail(ErrorCode::invalid_argument, "no fault '{}'; there are: {}", name, fmt::join(kFaultNames, ", "));
}

Result<Plant> parse_plant(std::string_view name) {
  const auto found = std::find(kPlantNames.begin(), kPlantNames.end(), name);
  if (found != kPlantNames.end()) return static_cast<Plant>(found - kPlantNames.begin());
  return fail(ErrorCode::invalid_argument, "no planted bug '{}'; there are: {}", name, fmt::join(kPlantNames, ", "));
}

namespace {

// What lasts, from what nobody notices to several times every deadline.
Duration draw_lasting(FaultKind kind, Random& random) {
  using namespace std::chrono_literals;
  switch (kind) {
    case FaultKind::hang_trainer:
    case FaultKind::stop_daemon:
    case FaultKind::stop_coordinator:
    case FaultKind::stop_some:
    case FaultKind::stop_all:
    case FaultKind::suspend_node:
    case FaultKind::hang_compute:
    case FaultKind::busy_trainer:
    case FaultKind::slow_digest:
    case FaultKind::black_hole:
    case FaultKind::store_away:
    case FaultKind::store_cut_off:
    case FaultKind::store_read_only:
    case FaultKind::store_set_back:
    case FaultKind::cut_off_from_some:
    case FaultKind::slow_memory:
    case FaultKind::lying_joiner:
    case FaultKind::forget_control:
    case FaultKind::second_process:
    case FaultKind::stop_introduction:
    case FaultKind::other_job:
    case FaultKind::older_log:
    case FaultKind::stop_relay:
    case FaultKind::stop_stream:
    case FaultKind::slow_disk: return random.of_any_size(10us, 3s);
    case FaultKind::stay_away: return random.of_any_size(1s, 6s);
    case FaultKind::cut_replica: return random.of_any_size(300ms, 4s);
    case FaultKind::cut_off_all: return random.between(80ms, 1600ms);  // less than half a silence to eight
    case FaultKind::power_loss:  // sometimes a machine is away for so long that the others start without it
      return random.one_in(3) ? random.of_any_size(1s, 6s) : random.of_any_size(1ms, 300ms);
    default: return std::chrono::milliseconds(1 + random.pick(random.one_in(2) ? 40 : 600));
  }
}

}  // namespace

std::vector<Fault> draw_faults(std::uint64_t seed, std::uint32_t replicas, std::uint32_t ranks, Duration end,
                               std::optional<FaultKind> often) {
  // Which kinds this seed knows, and how often: some seeds are calm, some know one kind only, some know all.
  std::array<std::uint64_t, kFaultKinds> weights{};
  Random kinds(seed, "kinds of faults");
  for (auto& weight : weights) weight = kinds.one_in(4) ? 1 + kinds.pick(8) : 0;
  if (Random(seed, "all kinds of faults").one_in(4)) weights.fill(1);
  if (std::all_of(weights.begin(), weights.end(), [](auto weight) { return weight == 0; }))
    weights[kinds.pick(kFaultKinds)] = 1;
  std::uint64_t total = 0;
  for (auto weight : weights) total += weight;
  if (often) weights[static_cast<std::size_t>(*often)] += total, total *= 2;
  const std::array<Duration, 5> gaps{std::chrono::milliseconds(20), std::chrono::milliseconds(60),
                                     std::chrono::milliseconds(150), std::chrono::milliseconds(400),
                                     std::chrono::milliseconds(1000)};
  // When: at any time in some seeds; at one moment of the protocols in others, or at any of them now and then.
  Random moments(seed, "moments");
  const std::uint64_t mostly = moments.pick(4);
  const auto favourite = static_cast<Moment>(1 + moments.pick(kMoments - 1));
  const auto draw_moment = [&](Random& random) {
    const auto any = static_cast<Moment>(1 + random.pick(kMoments - 1));
    const bool now_and_then = random.one_in(3);
    if (mostly == 0) return Moment::at_once;
    return mostly == 1 ? favourite : now_and_then ? any : Moment::at_once;
  };
  Random random(seed, "faults");
  const Duration gap = gaps[random.pick(gaps.size())];
  std::vector<Fault> faults;
  for (Duration at{};;) {
    at += random.between({}, 2 * gap);
    if (at >= end) return faults;
    std::uint64_t drawn = random.pick(total);
    std::size_t kind = 0;
    for (; drawn >= weights[kind]; ++kind) drawn -= weights[kind];
    Fault fault{.at = at,
                .kind = static_cast<FaultKind>(kind),
                .replica = static_cast<std::uint32_t>(random.pick(replicas)),
                .rank = static_cast<std::uint32_t>(random.pick(ranks)),
                .lasting = draw_lasting(static_cast<FaultKind>(kind), random),
                .detail = random.next()};
    fault.moment = draw_moment(random);
    // Who is down is hit again.
    if (!faults.empty() && random.one_in(4)) fault.replica = faults.back().replica, fault.rank = faults.back().rank;
    faults.push_back(fault);
  }
}

}  // namespace rejoin::sim
