// The all-reduce's results: the same bits on all members, whoever contributes and wherever the buffers are.
#include <set>

#include "ftar/tests/counting_engine.h"
#include "ftar/tests/ring_cluster.h"

namespace rejoin::ftar {
namespace {

INSTANTIATE_TEST_SUITE_P(Memory, FtarRing, testing::Values(Over::host, Over::viewed, Over::gpu), [](const auto& i) {
  return std::string(i.param == Over::gpu ? "gpu" : i.param == Over::viewed ? "viewed" : "host");
});

TEST_P(FtarRing, AllMembersEndWithTheSumBitForBit) {
  for (int members : {1, 2, 3, 4, 6})
    for (std::uint64_t seed = 1; seed <= seeds(8); ++seed) {
      Cluster cluster(seed, kSizes, over);
      cluster.options.both_ways = seed % 2 == 0;
      for (int i = 0; i < members; ++i) cluster.add();
      cluster.enter(Epoch(1), cluster.ring_members());
      for (std::uint64_t step = 1; step <= 3; ++step) {
        cluster.start(Step(step));
        ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(step)); })) << members << " seed " << seed;
        cluster.expect_result(cluster.live());
      }
    }
}

TEST_P(FtarRing, TheMeanIsOverContributorsAndACatchingUpMemberAddsNothing) {
  for (std::uint64_t seed = 1; seed <= seeds(8); ++seed) {
    Cluster cluster(seed, kSizes, over);
    for (int i = 0; i < 4; ++i) cluster.add();
    cluster.enter(Epoch(1), cluster.ring_members(Role::catching_up));
    cluster.start(Step(1), ReduceOp::mean);
    ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); }));
    cluster.expect_result({cluster.ranks[0].get(), cluster.ranks[1].get(), cluster.ranks[2].get()}, 3);
  }
}

// By the weights of all contributors, whose inputs are multiplied with theirs: also where there is one contributor, to
// whose input nothing is added, and by every way that a bucket may go.
TEST_P(FtarRing, AMeanMayBeDividedByWeights) {
  for (const int contributors : {1, 3})
    for (const bool joiner : {false, true})
      for (const std::uint32_t direct_members : {0u, 8u}) {
        if (on_gpu && joiner != (direct_members == 0)) continue;  // it is slower than memory
        Cluster cluster(3, kSizes, over);
        cluster.options.direct_members = direct_members;
        for (int i = 0; i < contributors + (joiner ? 1 : 0); ++i) cluster.add();
        cluster.enter(Epoch(1), cluster.ring_members(joiner ? Role::catching_up : Role::contributor));
        cluster.start(Step(1), ReduceOp::mean, 7);
        ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); }));
        const auto live = cluster.live();
        cluster.expect_result({live.begin(), live.begin() + contributors}, 7);
        const Rank& first = *cluster.ranks[0];
        for (std::size_t b = 0; b < kSizes.size() && contributors == 1; ++b)
          for (std::size_t i = 0; i < kSizes[b]; ++i)
            ASSERT_EQ(first.output[b][i], first.input[b][i] * (1.0f / 7.0f)) << "bucket " << b << " element " << i;
      }
}

TEST_P(FtarRing, ACatchingUpMemberChangesNoBitOfTheResult) {
  const auto run = [&](bool joiner) {
    Cluster cluster(5, kSizes, over);
    for (int i = 0; i < 3; ++i) cluster.add();
    if (joiner) cluster.add();
    cluster.enter(Epoch(1), cluster.ring_members(joiner ? Role::catching_up : Role::contributor));
    cluster.start(Step(1));
    EXPECT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); }));
    cluster.look();
    return cluster.ranks[0]->output;
  };
  EXPECT_EQ(run(false), run(true));
}

TEST_P(FtarRing, ResultsHaveOneDigestOnAllMembersWhoeverJoins) {
  for (const bool direct : {false, true}) {
    Cluster cluster(5, kSizes, over);
    if (!direct) cluster.options.direct_bytes = cluster.options.device_direct_bytes = 0;
    for (int i = 0; i < 4; ++i) cluster.add().communicator->digest_results(true);
    cluster.enter(Epoch(1), cluster.ring_members(Role::catching_up));
    std::set<std::uint64_t> all;
    for (std::uint64_t step = 1; step <= 2; ++step) {
      for (auto& rank : cluster.ranks) rank->outcomes.clear();
      for (auto& rank : cluster.ranks)
        for (std::uint32_t b = 0; b < kSizes.size(); ++b)
          ASSERT_TRUE(rank->communicator->all_reduce(b, Step(step), step == 1 ? ReduceOp::sum : ReduceOp::mean));
      ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(step)); }));
      std::set<std::uint64_t> digests;
      for (auto& rank : cluster.ranks) digests.insert(*rank->communicator->results().digest(*cluster.access));
      EXPECT_EQ(digests.size(), 1u);
      all.insert(*digests.begin());
    }
    EXPECT_EQ(all.size(), 2u) << "other results, other digests";
  }
}

TEST(FtarResults, AFlippedBitIsTracedToTheHopThatItCameOver) {
  struct Way {
    std::size_t size;
    std::uint32_t direct_members, damaged;
    bool both_ways;
    Over over = Over::host;
    Coding coding = Coding::off;
  };
  // All to all, by the ring, also coded, and where members look into each other's memory.
  std::vector<Way> ways{{60, 8, 3, true}, {3000, 8, 3, true}, {3000, 8, 3, false}, {3000, 8, 3, true, Over::viewed}};
  for (const bool both_ways : {true, false}) ways.push_back({3000, 8, 3, both_ways, Over::host, Coding::eight});
  for (std::uint32_t damaged = 0; damaged < 5; ++damaged) ways.push_back({60, 0, damaged, true});  // in rounds
  for (const auto& way : ways) {
    SCOPED_TRACE(testing::Message() << way.size << ", " << way.direct_members << ", " << way.damaged);
    Cluster cluster(9, {way.size}, way.over);
    cluster.options.both_ways = way.both_ways;
    cluster.options.direct_members = way.direct_members;
    cluster.options.coding = way.coding;
    for (std::uint32_t i = 0; i < 5; ++i) {
      cluster.options.flip_bit_at = Step(i == way.damaged ? 2 : 0);
      cluster.add().communicator->digest_results(true);
    }
    cluster.enter(Epoch(1), cluster.ring_members());
    for (std::uint64_t step = 1; step <= 2; ++step) {
      cluster.start(Step(step));
      ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(step)); }));
      std::set<std::uint64_t> digests;
      for (auto& rank : cluster.ranks) digests.insert(*rank->communicator->results().digest(*cluster.access));
      EXPECT_EQ(digests.size(), step);
    }
    std::vector<std::vector<std::vector<Segment>>> told;
    for (auto& rank : cluster.ranks) told.push_back(*rank->communicator->origins().digests(*cluster.access));
    std::set<std::uint32_t> receivers;
    for (std::uint32_t r = 0; r < 5; ++r)
      for (std::size_t s = 0; s < told[r][0].size(); ++s)
        if (told[r][0][s].digest != told[told[r][0][s].from.value][0][s].digest) receivers.insert(r);
    EXPECT_EQ(receivers, std::set<std::uint32_t>{way.damaged});
    // The same step in another epoch, from the same inputs, is sound.
    cluster.enter(Epoch(2), cluster.ring_members());
    for (auto& rank : cluster.ranks) rank->outcomes.clear();
    cluster.start(Step(2));
    ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(2)); }));
    for (auto& rank : cluster.ranks) EXPECT_EQ(rank->output, cluster.ranks[0]->output);
    if (way.coding == Coding::off) cluster.expect_result(cluster.live());
  }
}

TEST(FtarPlans, ChunksAreCutAsAllMembersOfTheEpochDo) {
  // Of 8 MiB, whose halves are segments of 4 MiB, and of 512 KiB. Each member is sent its own segment's chunks and
  // those of the other one's sum; where it reads inputs in place, only these.
  const auto received = [](Chunking chunking, Over over) {
    Cluster cluster(4, {2 << 20, 128 << 10}, over);
    cluster.options.chunk_bytes = 1 * MiB;
    cluster.chunking = chunking;
    for (int i = 0; i < 2; ++i) cluster.add();
    cluster.enter(Epoch(1), cluster.ring_members());
    cluster.start(Step(1));
    EXPECT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); }));
    return cluster.ranks[0]->communicator->stats().peers[0].chunks_received;
  };
  EXPECT_EQ(received(Chunking::now, Over::host), 2u * (8 + 2));
  EXPECT_EQ(received(Chunking::of_protocol_15, Over::host), 2u * (4 + 4));
  EXPECT_EQ(received(Chunking::now, Over::viewed), 4u + 4);
  if (!kSanitized)
    EXPECT_EQ(received(Chunking::now, Over::gpu), 2u * (4 + 4));  // under sanitizers its kernels take 10 s
}

// What is added up on its way has slots; what is done has no such bound of its own.
TEST(FtarPlans, NoMoreChunksThanAllowedAreInFlightToANeighbourOneWay) {
  for (const std::uint32_t members : {2u, 4u})
    for (const bool both_ways : {true, false}) {
      std::uint64_t transfers = 0;
      std::vector<Counting*> engines;
      Cluster cluster(members, {20001, 9000});
      cluster.options.direct_bytes = 0;
      cluster.options.both_ways = both_ways;
      cluster.wrap = [&](std::unique_ptr<transport::Engine> engine) {
        auto made = std::make_unique<Counting>(std::move(engine), transfers);
        engines.push_back(made.get());
        return made;
      };
      for (std::uint32_t i = 0; i < members; ++i) cluster.add();
      cluster.enter(Epoch(1), cluster.ring_members(members > 2 ? Role::catching_up : Role::contributor));
      cluster.start(Step(1));
      ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); }));
      std::uint64_t most = 0;
      for (const auto* engine : engines) most = std::max(most, engine->most_gathered);
      EXPECT_EQ(most, cluster.options.chunks_in_flight) << members << ", " << both_ways;
    }
}

// The same inputs give the same bits in any memory, whoever adds them up where.
TEST(FtarPlans, AllWaysOfAddingUpGiveTheSameBits) {
  const auto run = [](Over over) {
    Cluster cluster(9, {kSanitized ? 5001 : 40001, 64}, over);
    for (int i = 0; i < 3; ++i) cluster.add();
    cluster.enter(Epoch(1), cluster.ring_members());
    cluster.start(Step(1), ReduceOp::mean);
    EXPECT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); }));
    cluster.look();
    return cluster.ranks[2]->output;
  };
  const auto sums = run(Over::host);
  EXPECT_EQ(sums, run(Over::gpu));
  EXPECT_EQ(sums, run(Over::viewed));
}

TEST(FtarPlans, AMemberAloneIsGivenWhatItGave) {
  for (const Over over : {Over::gpu, Over::viewed, Over::host}) {
    Cluster cluster(2, {5000}, over);
    cluster.add();
    cluster.enter(Epoch(1), cluster.ring_members());
    cluster.start(Step(1), ReduceOp::mean);
    ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); }));
    cluster.expect_result(cluster.live());
  }
}

// However large the buckets are of whom nobody helps: they are copied by who gives the process's signs of life, too.
TEST(FtarPlans, AMemberAloneTakesAChunkInATurn) {
  Cluster cluster(2, {10 * 256, 3 * 256});
  cluster.add();
  cluster.enter(Epoch(1), cluster.ring_members());
  cluster.start(Step(1), ReduceOp::mean);
  const Rank& rank = *cluster.ranks[0];
  for (int turn = 1; turn <= 13; ++turn) {
    ASSERT_EQ(rank.done(Step(1)), turn > 10 ? 1u : 0u) << turn;
    ASSERT_TRUE(rank.communicator->working()) << turn;
    EXPECT_TRUE(rank.communicator->waits(cluster.clock.now()).empty()) << "it waits for nobody";
    cluster.pump();
  }
  EXPECT_EQ(rank.done(Step(1)), 2u);
  EXPECT_FALSE(rank.communicator->working());
  cluster.expect_result(cluster.live());
}

// A kernel for all buckets of a step, not for each chunk.
TEST(FtarPlans, AKernelServesForAWholeStep) {
  Cluster cluster(2, {40000, 40000}, Over::gpu);
  cluster.options.reducer.patience = std::chrono::hours(1);
  for (int i = 0; i < 2; ++i) cluster.add();
  cluster.enter(Epoch(1), cluster.ring_members());
  for (std::uint64_t step = 1; step <= 3; ++step) {
    cluster.start(Step(step));
    ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(step)); }));
  }
  for (auto& rank : cluster.ranks) {
    EXPECT_GE(rank->communicator->stats().kernel_launches, 1u);
    EXPECT_LE(rank->communicator->stats().kernel_launches, 7u);  // one to load it; a step's buckets may end apart
  }
}

}  // namespace
}  // namespace rejoin::ftar
