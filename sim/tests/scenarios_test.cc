// A fault or two in the middle of a run, and what they may cost. These and what sim_test.cc plays run the same code, so
// that no sanitizer build has these.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "sim/tests/simulated.h"

namespace rejoin::sim {
namespace {

constexpr std::uint64_t kOften = 40, kAFew = 3;

struct Scenario : Quiet {};

// One fault, in the middle of the run, and what it may cost.
Outcome play_one(FaultKind kind, std::chrono::milliseconds lasting, std::uint64_t seed) {
  const Fault fault{.at = std::chrono::seconds(1), .kind = kind, .replica = 1, .lasting = lasting, .detail = seed};
  return play({.seed = seed, .replicas = 3, .ranks = 2, .faults = {{fault}}});
}

TEST_F(Scenario, WhoeverWasStoppedCostsNobodyAPlaceAndNoStep) {
  for (const auto kind : {FaultKind::stop_coordinator, FaultKind::stop_all, FaultKind::slow_disk, FaultKind::pause})
    for (const auto lasting : {60, 250, 3000})
      for (std::uint64_t seed = 0; seed < kAFew; ++seed) {
        Outcome outcome = play_one(kind, std::chrono::milliseconds(lasting), seed);
        ASSERT_TRUE(holds(outcome)) << to_string(kind) << " for " << lasting << " ms, seed " << seed;
        EXPECT_EQ(outcome.counts["trainer gave up"], 0u) << to_string(kind) << " for " << lasting << " ms, " << seed;
        EXPECT_EQ(outcome.counts["rolled back"], 0u);
      }
}

// In the middle of a catch-up, and for longer than anybody waits: the other contributor is enough.
TEST_F(Scenario, AContributorsCatchUpThreadThatStandsStillKeepsNobodyOut) {
  std::uint64_t caught_up = 0;
  for (const auto at : {1000, 1001, 1002, 1005})
    for (std::uint64_t seed = 0; seed < kAFew; ++seed) {
      const Fault killed{.at = std::chrono::seconds(1), .kind = FaultKind::kill_trainer, .replica = 2};
      const Fault stands{.at = std::chrono::milliseconds(at),
                         .moment = at == 1000 ? Moment::at_once : Moment::catch_up_begun,
                         .kind = FaultKind::stop_stream,
                         .lasting = std::chrono::seconds(3),
                         .detail = seed};
      Outcome outcome = play({.seed = seed, .replicas = 3, .ranks = 1, .faults = {{killed, stands}}});
      ASSERT_TRUE(holds(outcome)) << "seed " << seed << ", " << at;
      caught_up += outcome.counts["caught up while a stream stood still"];
    }
  EXPECT_GT(caught_up, 0u);
}

// One of three coordinators that share a store, or their store: nobody is put out for that, no step is lost, and where
// the store answers others have taken over soon.
TEST_F(Scenario, ALostCoordinatorOrItsStoreCostsNobodyAPlace) {
  for (const auto kind : {FaultKind::kill_coordinator, FaultKind::stop_coordinator, FaultKind::store_away,
                          FaultKind::store_cut_off, FaultKind::crash_in_append})
    for (const auto lasting : {60, 250, 3000})
      for (std::uint64_t seed = 0; seed < (2 * kAFew); ++seed) {
        const Fault fault{.at = std::chrono::seconds(1),
                          .kind = kind,
                          .replica = 1,
                          .lasting = std::chrono::milliseconds(lasting),
                          .detail = seed};
        Outcome outcome = play({.seed = seed, .replicas = 3, .ranks = 2, .coordinators = 3, .faults = {{fault}}});
        const std::string what = fmt::format("{} for {} ms, seed {}", to_string(kind), lasting, seed);
        ASSERT_TRUE(holds(outcome)) << what;
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

// Its daemon tells whoever takes over, or the one that is started again, and all others are there.
TEST_F(Scenario, AReplicaThatEndsWithTheCoordinatorIsNotWaitedFor) {
  for (const auto coordinators : {1u, 3u})
    for (const auto apart : {-2, 0, 2, 20})
      for (std::uint64_t seed = 0; seed < kAFew; ++seed) {
        const Fault ends{.at = std::chrono::seconds(1),
                         .kind = FaultKind::stay_away,
                         .replica = 1,
                         .lasting = std::chrono::seconds(2)};
        const Fault killed{
            .at = ends.at + std::chrono::milliseconds(apart), .kind = FaultKind::kill_coordinator, .detail = seed};
        Outcome outcome =
            play({.seed = seed, .replicas = 3, .ranks = 2, .coordinators = coordinators, .faults = {{ends, killed}}});
        ASSERT_TRUE(holds(outcome)) << coordinators << ", " << apart << " ms, seed " << seed;
        EXPECT_EQ(outcome.counts["rolled back"], 0u);
      }
}

// No node has a way to any coordinator, and then one after the other has: whoever is first puts out nobody.
TEST_F(Scenario, CoordinatorsThatHearNobodyForAWhileCostNobodyAPlace) {
  for (const auto coordinators : {1u, 3u})
    for (const auto lasting : {400, 1600})
      for (std::uint64_t seed = 0; seed < kAFew; ++seed) {
        const Fault fault{.at = std::chrono::seconds(1),
                          .kind = FaultKind::cut_off_all,
                          .lasting = std::chrono::milliseconds(lasting),
                          .detail = seed};
        Outcome outcome =
            play({.seed = seed, .replicas = 3, .ranks = 2, .coordinators = coordinators, .faults = {{fault}}});
        const std::string what = fmt::format("for {} ms, seed {}, {} coordinators", lasting, seed, coordinators);
        ASSERT_TRUE(holds(outcome)) << what;
        EXPECT_EQ(outcome.counts["trainer gave up"], 0u) << what;
        if (!Shape::of(seed).upgrade) EXPECT_EQ(outcome.counts["epoch begun"], 1u) << what;
      }
}

// It answers who reads, and takes nothing: from nobody, or not from one of them, which so can't lead. How often they
// ask for the lead then, and what they log, is looked at in all runs.
TEST_F(Scenario, AStoreThatCanOnlyBeReadCostsNobodyAPlace) {
  std::uint64_t taken_over = 0;
  for (const auto lasting : {60, 250, 3000})
    for (std::uint64_t seed = 0; seed < (4 * kAFew); ++seed) {
      const Fault fault{.at = std::chrono::seconds(1),
                        .kind = FaultKind::store_read_only,
                        .replica = 1,
                        .lasting = std::chrono::milliseconds(lasting),
                        .detail = seed};
      Outcome outcome = play({.seed = seed, .replicas = 3, .ranks = 2, .coordinators = 3, .faults = {{fault}}});
      const std::string what = fmt::format("for {} ms, seed {}", lasting, seed);
      ASSERT_TRUE(holds(outcome)) << what;
      EXPECT_EQ(outcome.counts["trainer gave up"], 0u) << what;
      EXPECT_EQ(outcome.counts["rolled back"], 0u) << what;
      taken_over += outcome.counts["lead claimed"] > 1;
    }
  EXPECT_GT(taken_over, 0u) << "from a leader that alone can't write";
}

// It lacks the last of what its leader wrote, which puts a snapshot there. Where that one ends before, its operator
// puts the data back.
TEST_F(Scenario, AStoreThatIsSetBackUnderItsLeaderCostsNobodyAPlace) {
  std::map<std::string, std::uint64_t> counts;
  for (const bool killed : {false, true})
    for (const auto lasting : {60, 250})
      for (std::uint64_t seed = 0; seed < (2 * kAFew); ++seed) {
        Fault fault{.at = std::chrono::seconds(1),
                    .kind = FaultKind::store_set_back,
                    .replica = 1,
                    .lasting = std::chrono::milliseconds(lasting),
                    .detail = seed};
        std::vector<Fault> faults{fault};
        fault.at += std::chrono::milliseconds(seed % 3), fault.kind = FaultKind::kill_coordinator;
        if (killed) faults.push_back(fault);
        Outcome outcome = play({.seed = seed, .replicas = 3, .ranks = 2, .coordinators = 3, .faults = faults});
        const std::string what = fmt::format("{}, for {} ms, seed {}", killed, lasting, seed);
        ASSERT_TRUE(holds(outcome)) << what;
        EXPECT_EQ(outcome.counts["trainer gave up"], 0u) << what;
        EXPECT_EQ(outcome.counts["rolled back"], 0u) << what;
        if (!killed) EXPECT_EQ(outcome.counts["the store's data put back"], 0u) << what;
        for (const auto& [name, count] : outcome.counts) counts[name] += count;
      }
  EXPECT_GT(counts["store set back"], 12 * kAFew / 2);
  EXPECT_GT(counts["the store's data put back"], 0u);
}

// Its checkpoints say what the log would have: which samples are trained. The checker compares.
TEST_F(Scenario, AJobWhoseLogIsLostGoesOnFromItsCheckpoints) {
  std::uint64_t from_checkpoints = 0;
  for (std::uint64_t seed = 0; seed < kOften; ++seed) {
    Outcome outcome = play_one(FaultKind::lose_log, {}, seed);
    ASSERT_TRUE(holds(outcome)) << "seed " << seed;
    from_checkpoints += outcome.counts["rolled back"];
  }
  EXPECT_GT(from_checkpoints, kOften / 8);
}

// It begins as at its start, with a state that nobody holds alone: where one replica stays away and the other is
// started again, nothing is lost but the log.
TEST_F(Scenario, AJobWhoseLogIsLostLosesNoStepOfItWithItsLastContributor) {
  std::uint64_t gave_up = 0;
  for (std::uint64_t seed = 0; seed < kOften / 2; ++seed) {
    const auto at_epoch = [&](FaultKind kind, std::uint32_t replica, std::chrono::milliseconds lasting) {
      return Fault{.at = std::chrono::milliseconds(1031),
                   .moment = Moment::epoch,
                   .kind = kind,
                   .replica = replica,
                   .lasting = lasting,
                   .detail = seed};
    };
    const Fault lost{.at = std::chrono::milliseconds(1030), .kind = FaultKind::lose_log};
    Outcome outcome = play({.seed = seed,
                            .replicas = 2,
                            .ranks = 1,
                            .faults = {{lost, at_epoch(FaultKind::stay_away, 0, std::chrono::seconds(1)),
                                        at_epoch(FaultKind::second_process, 1, std::chrono::milliseconds(300)),
                                        at_epoch(FaultKind::partition, 1, std::chrono::milliseconds(300))}}});
    if (outcome.counts["rolled back"] > 0) continue;  // to a checkpoint
    ASSERT_TRUE(holds(outcome)) << "seed " << seed;
    gave_up += outcome.counts["trainer gave up"];
  }
  EXPECT_GT(gave_up, 0u);
}

TEST_F(Scenario, WhoEvaluatesBetweenStepsForManySilencesCostsNobodyAPlace) {
  std::uint64_t long_ones = 0;
  for (std::uint64_t seed = 0; long_ones < 5 && seed < 200; ++seed) {
    if (!Shape::of(seed).evaluates) continue;
    Outcome outcome = play({.seed = seed, .faults = std::vector<Fault>{}});
    ASSERT_TRUE(holds(outcome)) << "seed " << seed;
    EXPECT_EQ(outcome.counts["trainer gave up"], 0u) << "seed " << seed;
    EXPECT_EQ(outcome.counts["epoch begun"], 1u) << "seed " << seed;
    long_ones += outcome.counts["evaluation of more than a silence"];
  }
  EXPECT_GE(long_ones, 5u);
}

TEST_F(Scenario, AConnectionThatIsResetOrForgottenCostsNobodyAPlace) {
  for (const auto kind : {FaultKind::reset_control, FaultKind::reset_ring, FaultKind::cut_ring, FaultKind::forget})
    for (const std::uint64_t seed : {0, 1, 2, 3}) {
      Outcome outcome = play_one(kind, std::chrono::milliseconds(1), seed);
      ASSERT_TRUE(holds(outcome)) << to_string(kind) << ", seed " << seed;
      EXPECT_EQ(outcome.counts["trainer gave up"], 0u) << to_string(kind) << ", seed " << seed;
    }
}

TEST_F(Scenario, OfATrainerThatHangsOnlyItsReplicaGoes) {
  for (const std::uint64_t seed : {0, 1, 2, 3}) {
    Outcome outcome = play_one(FaultKind::hang_compute, std::chrono::seconds(3), seed);
    ASSERT_TRUE(holds(outcome)) << "seed " << seed;
    EXPECT_LE(outcome.counts["trainer gave up"], 4u) << "seed " << seed << ": two may hang at once";
    EXPECT_GT(outcome.counts["trainer gave up"], 0u) << "seed " << seed;
  }
}

// A rank that starts and has much memory: nobody knows of it before it is registered.
TEST_F(Scenario, WhoseMemoryTakesManySilencesToBeRegisteredIsNotPutOut) {
  for (const auto lasting : {50, 300, 1000, 3000})
    for (std::uint64_t seed = 0; seed < kAFew; ++seed) {
      Outcome outcome = play_one(FaultKind::slow_memory, std::chrono::milliseconds(lasting), seed);
      const std::string what = fmt::format("{} ms, seed {}", lasting, seed);
      ASSERT_TRUE(holds(outcome)) << what;
      EXPECT_EQ(outcome.counts["registration of more than a silence"], lasting > 200 ? 1u : 0u) << what;
      EXPECT_EQ(outcome.counts["trainer gave up"], 1u) << what << ": the other rank of its replica, which is evicted";
      EXPECT_EQ(outcome.counts["rank found silent"], 0u) << what;
      EXPECT_GT(outcome.counts["promoted"], 0u) << what;
    }
}

// As on a GPU that others keep busy, and behind a driver that stands.
TEST_F(Scenario, DigestsThatTakeLongCostNobodyAPlaceAndThoseThatDoNotComeTheirReplica) {
  for (const auto lasting : {30, 300, 3000})
    for (const std::uint64_t seed : {0, 1, 2, 3}) {
      Outcome outcome = play_one(FaultKind::slow_digest, std::chrono::milliseconds(lasting), seed);
      ASSERT_TRUE(holds(outcome)) << "for " << lasting << " ms, seed " << seed;
      const auto gave_up = outcome.counts["trainer gave up"];
      if (lasting < 500) EXPECT_EQ(gave_up, 0u) << "for " << lasting << " ms, seed " << seed;
      else EXPECT_TRUE(gave_up > 0 && gave_up <= 2) << "for " << lasting << " ms, seed " << seed << ": " << gave_up;
    }
}

// Of fault.detail: see World::happen().
constexpr std::uint64_t kWithinAStep = 0, kBetweenSteps = 4, kTooLong = 3;

TEST_F(Scenario, WhoSaysThatItIsBusyCostsNobodyAPlaceForAsLongAsItSaid) {
  for (const auto where : {kWithinAStep, kBetweenSteps})
    for (const auto lasting : {30, 250, 3000})
      for (const std::uint64_t seed : {0, 1, 2, 3}) {
        const Fault fault{.at = std::chrono::seconds(1),
                          .kind = FaultKind::busy_trainer,
                          .replica = 1,
                          .lasting = std::chrono::milliseconds(lasting),
                          .detail = where};
        Outcome outcome = play({.seed = seed, .replicas = 3, .ranks = 2, .faults = {{fault}}});
        ASSERT_TRUE(holds(outcome)) << "for " << lasting << " ms, seed " << seed;
        EXPECT_EQ(outcome.counts["trainer gave up"], 0u) << "for " << lasting << " ms, seed " << seed;
      }
}

TEST_F(Scenario, WhoIsBusyForLongerThanItSaidGoes) {
  for (const auto where : {kWithinAStep, kBetweenSteps})
    for (const std::uint64_t seed : {0, 1, 2, 3}) {
      Outcome outcome = play({.seed = seed,
                              .replicas = 3,
                              .ranks = 2,
                              .faults = {{{.at = std::chrono::seconds(1),
                                           .kind = FaultKind::busy_trainer,
                                           .replica = 1,
                                           .lasting = std::chrono::seconds(3),
                                           .detail = where + kTooLong}}}});
      ASSERT_TRUE(holds(outcome)) << "seed " << seed;
      EXPECT_EQ(outcome.counts["trainer gave up"], 2u) << "seed " << seed << ": its ranks";
    }
}

// A step in which somebody was busy would otherwise be what a step may take.
TEST_F(Scenario, ATrainerThatHangsIsFoundAsSoonAfterABusyStepAsBefore) {
  for (const std::uint64_t seed : {0, 1, 2, 3}) {
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
    ASSERT_TRUE(holds(outcome)) << "seed " << seed;
    EXPECT_GT(outcome.counts["trainer gave up"], 0u) << "seed " << seed;
  }
}

// One is out for its silence, and the others die, in many seeds before they have committed anything without it.
TEST_F(Scenario, WhoIsOutForNowIsTakenBackWhenTheOthersDie) {
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
    ASSERT_TRUE(holds(outcome)) << "seed " << seed;
    survived += outcome.counts["rolled back"] == 0;
  }
  EXPECT_GT(survived, kOften / 4);
}

}  // namespace
}  // namespace rejoin::sim
