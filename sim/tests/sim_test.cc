// The simulated cluster keeps its invariants.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>
#include <stdlib.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <new>

#include "base/sanitized.h"
#include "sim/long_job.h"
#include "sim/scale.h"
#include "sim/world.h"

#ifndef REJOIN_SANITIZED  // whose own new is needed there
// The pieces of memory that a thread has taken by new, with the sizes that were asked for, while it counts them.
template <typename T>
struct Uncounted {
  using value_type = T;
  Uncounted() = default;
  template <typename Other>
  Uncounted(const Uncounted<Other>&) {}
  T* allocate(std::size_t count) { return static_cast<T*>(std::malloc(count * sizeof(T))); }
  void deallocate(T* gone, std::size_t) { std::free(gone); }
  bool operator==(const Uncounted&) const = default;
};
struct Counted {
  std::map<void*, std::size_t, std::less<>, Uncounted<std::pair<void* const, std::size_t>>> pieces;
  std::uint64_t bytes = 0;
};
static thread_local Counted* counted = nullptr;
void* operator new(std::size_t size) {
  void* const made = std::malloc(size);
  if (made == nullptr) throw std::bad_alloc();
  if (counted != nullptr) counted->bytes += counted->pieces[made] = size;
  return made;
}
void operator delete(void* gone) noexcept {
  if (counted != nullptr)
    if (const auto piece = counted->pieces.extract(gone); !piece.empty()) counted->bytes -= piece.mapped();
  std::free(gone);
}
void operator delete(void* gone, std::size_t) noexcept { operator delete(gone); }
#endif

namespace rejoin::sim {
namespace {

constexpr std::uint64_t kSeeds = kSanitized ? 12 : 140, kOften = kSanitized ? 5 : 40, kAFew = kSanitized ? 1 : 3;

struct Simulated : testing::Test {
  void SetUp() override { spdlog::set_level(spdlog::level::off); }
  // Four for a combination of faults; under sanitizers one of these, for the next combination the next.
  std::uint64_t turn = 0;
  std::vector<std::uint64_t> seeds() { return kSanitized ? std::vector{turn++ % 4} : std::vector{0ul, 1ul, 2ul, 3ul}; }
};

TEST_F(Simulated, TheInvariantsHoldUnderFaultsOfEveryKind) {
  std::map<std::string, std::uint64_t> counts;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Outcome outcome = play({.seed = seed, .faults = {}});
    ASSERT_FALSE(outcome.violation) << "rejoin-sim --seed " << seed << ": " << outcome.violation->invariant << ": "
                                    << outcome.violation->what;
    for (const auto& [what, count] : outcome.counts) counts[what] += count;
  }
  if (kSeeds < 100) return;  // too few for those that are rarely drawn
  for (std::size_t kind = 0; kind < kFaultKinds; ++kind)
    EXPECT_GT(counts[fmt::format("fault: {}", to_string(static_cast<FaultKind>(kind)))], 0u);
  for (const char* what : {"promoted", "rolled back", "rank found silent", "trainer gave up", "epoch begun",
                           "step foretold", "shares changed", "passed on by a joiner", "bytes that coding saved"})
    EXPECT_GT(counts[what], 0u) << what;
}

TEST_F(Simulated, OtherShapesHoldToo) {
  for (const auto& [replicas, ranks] : {std::pair{2u, 1u}, {1u, 2u}, {5u, 1u}, {4u, 3u}})
    for (std::uint64_t seed = 0; seed < kSeeds / 10; ++seed) {
      const Outcome outcome = play({.seed = seed, .replicas = replicas, .ranks = ranks, .faults = {}});
      ASSERT_FALSE(outcome.violation) << "rejoin-sim --seed " << seed << " --replicas " << replicas << " --ranks "
                                      << ranks << ": " << outcome.violation->invariant << ": "
                                      << outcome.violation->what;
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
    ASSERT_FALSE(undisturbed.violation) << "seed " << seed << ": " << undisturbed.violation->what;
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

// One fault, in the middle of the run, and what it may cost.
Outcome play_one(FaultKind kind, std::chrono::milliseconds lasting, std::uint64_t seed) {
  const Fault fault{.at = std::chrono::seconds(1), .kind = kind, .replica = 1, .lasting = lasting, .detail = seed};
  return play({.seed = seed, .replicas = 3, .ranks = 2, .faults = {{fault}}});
}

TEST_F(Simulated, WhoeverWasStoppedCostsNobodyAPlaceAndNoStep) {
  for (const auto kind : {FaultKind::stop_coordinator, FaultKind::stop_all, FaultKind::slow_disk, FaultKind::pause})
    for (const auto lasting : {60, 250, 3000})
      for (std::uint64_t seed = 0; seed < kAFew; ++seed) {
        Outcome outcome = play_one(kind, std::chrono::milliseconds(lasting), seed);
        ASSERT_FALSE(outcome.violation) << to_string(kind) << " for " << lasting << " ms, seed " << seed << ": "
                                        << outcome.violation->invariant << ": " << outcome.violation->what;
        EXPECT_EQ(outcome.counts["trainer gave up"], 0u) << to_string(kind) << " for " << lasting << " ms, " << seed;
        EXPECT_EQ(outcome.counts["rolled back"], 0u);
      }
}

// One of three coordinators that share a store, or their store: nobody is put out for that, no step is lost, and where
// the store answers others have taken over soon.
TEST_F(Simulated, ALostCoordinatorOrItsStoreCostsNobodyAPlace) {
  for (const auto kind : {FaultKind::kill_coordinator, FaultKind::stop_coordinator, FaultKind::store_away,
                          FaultKind::store_cut_off, FaultKind::crash_in_append})
    for (const auto lasting : {60, 250, 3000})
      for (std::uint64_t seed = 0; seed < (kSanitized ? 1 : 2 * kAFew); ++seed) {
        const Fault fault{.at = std::chrono::seconds(1),
                          .kind = kind,
                          .replica = 1,
                          .lasting = std::chrono::milliseconds(lasting),
                          .detail = seed};
        Outcome outcome = play({.seed = seed, .replicas = 3, .ranks = 2, .coordinators = 3, .faults = {{fault}}});
        const std::string what = fmt::format("{} for {} ms, seed {}", to_string(kind), lasting, seed);
        ASSERT_FALSE(outcome.violation) << what << ": " << outcome.violation->invariant << ": "
                                        << outcome.violation->what;
        EXPECT_EQ(outcome.counts["trainer gave up"], 0u) << what;
        EXPECT_EQ(outcome.counts["rolled back"], 0u) << what;
        // One of another release that takes over changes what all speak.
        if (!Shape::of(seed).upgrade) EXPECT_EQ(outcome.counts["epoch begun"], 1u) << what;
        if (kind == FaultKind::store_away || Shape::of(seed).evaluates || Shape::of(seed).long_updates) continue;
        double longest = 0;
        for (std::size_t i = 1; i < outcome.committed.size(); ++i)
          longest = std::max(longest, outcome.committed[i].at - outcome.committed[i - 1].at);
        EXPECT_LT(longest, 0.4) << what << ": two silences without a step";
      }
}

// Its checkpoints say what the log would have: which samples are trained. The checker compares.
TEST_F(Simulated, AJobWhoseLogIsLostGoesOnFromItsCheckpoints) {
  std::uint64_t from_checkpoints = 0;
  for (std::uint64_t seed = 0; seed < kOften; ++seed) {
    Outcome outcome = play_one(FaultKind::lose_log, {}, seed);
    ASSERT_FALSE(outcome.violation) << "seed " << seed << ": " << outcome.violation->invariant << ": "
                                    << outcome.violation->what;
    from_checkpoints += outcome.counts["rolled back"];
  }
  EXPECT_GT(from_checkpoints, kOften / 8);
}

TEST_F(Simulated, WhoEvaluatesBetweenStepsForManySilencesCostsNobodyAPlace) {
  std::uint64_t long_ones = 0;
  for (std::uint64_t seed = 0; long_ones < 5 && seed < 200; ++seed) {
    if (!Shape::of(seed).evaluates) continue;
    Outcome outcome = play({.seed = seed, .faults = std::vector<Fault>{}});
    ASSERT_FALSE(outcome.violation) << "seed " << seed << ": " << outcome.violation->invariant << ": "
                                    << outcome.violation->what;
    EXPECT_EQ(outcome.counts["trainer gave up"], 0u) << "seed " << seed;
    EXPECT_EQ(outcome.counts["epoch begun"], 1u) << "seed " << seed;
    long_ones += outcome.counts["evaluation of more than a silence"];
  }
  EXPECT_GE(long_ones, 5u);
}

TEST_F(Simulated, AConnectionThatIsResetOrForgottenCostsNobodyAPlace) {
  for (const auto kind : {FaultKind::reset_control, FaultKind::reset_ring, FaultKind::cut_ring, FaultKind::forget})
    for (const std::uint64_t seed : seeds()) {
      Outcome outcome = play_one(kind, std::chrono::milliseconds(1), seed);
      ASSERT_FALSE(outcome.violation) << to_string(kind) << ", seed " << seed << ": " << outcome.violation->what;
      EXPECT_EQ(outcome.counts["trainer gave up"], 0u) << to_string(kind) << ", seed " << seed;
    }
}

TEST_F(Simulated, OfATrainerThatHangsOnlyItsReplicaGoes) {
  for (const std::uint64_t seed : seeds()) {
    Outcome outcome = play_one(FaultKind::hang_compute, std::chrono::seconds(3), seed);
    ASSERT_FALSE(outcome.violation) << "seed " << seed << ": " << outcome.violation->what;
    EXPECT_LE(outcome.counts["trainer gave up"], 4u) << "seed " << seed << ": two may hang at once";
    EXPECT_GT(outcome.counts["trainer gave up"], 0u) << "seed " << seed;
  }
}

// A rank that starts and has much memory: nobody knows of it before it is registered.
TEST_F(Simulated, WhoseMemoryTakesManySilencesToBeRegisteredIsNotPutOut) {
  for (const auto lasting : {50, 300, 1000, 3000})
    for (std::uint64_t seed = 0; seed < kAFew; ++seed) {
      Outcome outcome = play_one(FaultKind::slow_memory, std::chrono::milliseconds(lasting), seed);
      const std::string what = fmt::format("{} ms, seed {}", lasting, seed);
      ASSERT_FALSE(outcome.violation) << what << ": " << outcome.violation->invariant << ": "
                                      << outcome.violation->what;
      EXPECT_EQ(outcome.counts["registration of more than a silence"], lasting > 200 ? 1u : 0u) << what;
      EXPECT_EQ(outcome.counts["trainer gave up"], 1u) << what << ": the other rank of its replica, which is evicted";
      EXPECT_EQ(outcome.counts["rank found silent"], 0u) << what;
      EXPECT_GT(outcome.counts["promoted"], 0u) << what;
    }
}

// As on a GPU that others keep busy, and behind a driver that stands.
TEST_F(Simulated, DigestsThatTakeLongCostNobodyAPlaceAndThoseThatDoNotComeTheirReplica) {
  for (const auto lasting : {30, 300, 3000})
    for (const std::uint64_t seed : seeds()) {
      Outcome outcome = play_one(FaultKind::slow_digest, std::chrono::milliseconds(lasting), seed);
      ASSERT_FALSE(outcome.violation) << "for " << lasting << " ms, seed " << seed << ": " << outcome.violation->what;
      const auto gave_up = outcome.counts["trainer gave up"];
      if (lasting < 500) EXPECT_EQ(gave_up, 0u) << "for " << lasting << " ms, seed " << seed;
      else EXPECT_TRUE(gave_up > 0 && gave_up <= 2) << "for " << lasting << " ms, seed " << seed << ": " << gave_up;
    }
}

// Of fault.detail: see World::happen().
constexpr std::uint64_t kWithinAStep = 0, kBetweenSteps = 4, kTooLong = 3;

TEST_F(Simulated, WhoSaysThatItIsBusyCostsNobodyAPlaceForAsLongAsItSaid) {
  for (const auto where : {kWithinAStep, kBetweenSteps})
    for (const auto lasting : {30, 250, 3000})
      for (const std::uint64_t seed : seeds()) {
        const Fault fault{.at = std::chrono::seconds(1),
                          .kind = FaultKind::busy_trainer,
                          .replica = 1,
                          .lasting = std::chrono::milliseconds(lasting),
                          .detail = where};
        Outcome outcome = play({.seed = seed, .replicas = 3, .ranks = 2, .faults = {{fault}}});
        ASSERT_FALSE(outcome.violation) << "for " << lasting << " ms, seed " << seed << ": " << outcome.violation->what;
        EXPECT_EQ(outcome.counts["trainer gave up"], 0u) << "for " << lasting << " ms, seed " << seed;
      }
}

TEST_F(Simulated, WhoIsBusyForLongerThanItSaidGoes) {
  turn = 1;
  for (const auto where : {kWithinAStep, kBetweenSteps})
    for (const std::uint64_t seed : seeds()) {
      Outcome outcome = play({.seed = seed,
                              .replicas = 3,
                              .ranks = 2,
                              .faults = {{{.at = std::chrono::seconds(1),
                                           .kind = FaultKind::busy_trainer,
                                           .replica = 1,
                                           .lasting = std::chrono::seconds(3),
                                           .detail = where + kTooLong}}}});
      ASSERT_FALSE(outcome.violation) << "seed " << seed << ": " << outcome.violation->what;
      EXPECT_EQ(outcome.counts["trainer gave up"], 2u) << "seed " << seed << ": its ranks";
    }
}

// A step in which somebody was busy would otherwise be what a step may take.
TEST_F(Simulated, ATrainerThatHangsIsFoundAsSoonAfterABusyStepAsBefore) {
  for (const std::uint64_t seed : seeds()) {
    std::vector<Fault> faults{{.at = std::chrono::seconds(1),
                               .kind = FaultKind::busy_trainer,
                               .replica = 1,
                               .lasting = std::chrono::milliseconds(500),
                               .detail = kWithinAStep},
                              {.at = std::chrono::milliseconds(1530),
                               .kind = FaultKind::hang_compute,
                               .replica = 0,
                               .lasting = std::chrono::milliseconds(2500),
                               .detail = 1}};
    Outcome outcome = play({.seed = seed, .replicas = 3, .ranks = 2, .faults = faults});
    ASSERT_FALSE(outcome.violation) << "seed " << seed << ": " << outcome.violation->what;
    EXPECT_GT(outcome.counts["trainer gave up"], 0u) << "seed " << seed;
  }
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

// One is out for its silence, and the others die, in many seeds before they have committed anything without it.
TEST_F(Simulated, WhoIsOutForNowIsTakenBackWhenTheOthersDie) {
  std::uint64_t survived = 0;
  for (std::uint64_t seed = 0; seed < kOften; ++seed) {
    std::vector<Fault> faults{
        {.at = std::chrono::seconds(1), .kind = FaultKind::hang_trainer, .lasting = std::chrono::milliseconds(400)}};
    for (const std::uint32_t replica : {1u, 2u})
      faults.push_back({.at = std::chrono::milliseconds(1050),
                        .moment = Moment::epoch,
                        .kind = FaultKind::kill_replica,
                        .replica = replica});
    Outcome outcome = play({.seed = seed, .replicas = 3, .faults = faults});
    ASSERT_FALSE(outcome.violation) << "seed " << seed << ": " << outcome.violation->invariant << ": "
                                    << outcome.violation->what;
    survived += outcome.counts["rolled back"] == 0;
  }
  EXPECT_GT(survived, kOften / 4);
}

// What reaches the coordinator for a step grows with replicas, not with ranks, but for two digests of each.
TEST(Scale, ManyMoreRanksAreNoMoreMessagesToTheCoordinator) {
  const ScaleResult few = measure_scale({.replicas = 6, .ranks = 16, .steps = 5});
  const ScaleResult many = measure_scale({.replicas = 6, .ranks = 512, .steps = 5});
  EXPECT_EQ(few.coordinator.messages, 12) << "a report of each replica, and a plan to each";
  EXPECT_EQ(many.coordinator.messages, 12);
  EXPECT_LT(many.coordinator.bytes, few.coordinator.bytes * 1.05 + 6 * 512 * 16);
  if (!kSanitized) EXPECT_LT(many.coordinator_bytes_per_rank, 210);
  const ScaleResult direct = measure_scale({.replicas = 6, .ranks = 512, .relays = false, .steps = 5});
  EXPECT_EQ(direct.coordinator.messages, 6 * 64 * 2) << "without relays, with nodes";
}

// Coordinator, relays and daemons' machines, while replicas are lost and come back.
#ifndef REJOIN_SANITIZED
TEST(Scale, NoMachineKeepsMoreAfterTenTimesTheSteps) {
  Counted all;
  counted = &all;
  const Kept kept =
      measure_kept({.replicas = 4, .ranks = 4, .ranks_per_node = 2, .steps = 400}, [&] { return all.bytes; });
  counted = nullptr;
  EXPECT_GT(kept.after_some, 8 * KiB) << "nothing is counted";
  EXPECT_LT(kept.after_many, kept.after_some + 2 * KiB) << "360 losses and 3,600 steps have left something behind";
}
#endif

// Its log, what recovery reads and the snapshot are no larger after many steps than after some.
TEST(LongJob, LeavesNoMoreBehindTheLongerItRuns) {
  constexpr std::uint64_t steps = kSanitized ? 10'000 : 300'000;  // the ledger keeps 65,536 one by one
  std::string directory = (std::filesystem::temp_directory_path() / "rejoin-sim-XXXXXX").string();
  ASSERT_NE(::mkdtemp(directory.data()), nullptr);
  std::map<std::uint64_t, LongJobState> states;
  const auto ran = run_long_job(
      {.replicas = 4, .steps = steps, .steps_between_losses = 300, .log_compact = 1 << 20, .directory = directory},
      [&](const LongJobState& state) { states[state.steps] = state; });
  std::filesystem::remove_all(directory);
  ASSERT_TRUE(ran) << ran.error().message;
  if (steps < 100'000) return;
  const auto &some = states.at(100'000), &many = states.at(steps);
  EXPECT_LT(many.log_bytes, some.log_bytes * 5 / 4);
  EXPECT_LT(many.snapshot_bytes, some.snapshot_bytes * 5 / 4);
  EXPECT_LT(many.heap_bytes, some.heap_bytes * 21 / 20);
}

}  // namespace
}  // namespace rejoin::sim
