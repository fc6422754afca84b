// Rings whose chunks travel coded: the same bits on all members, near the sum, and nothing lost for good.
#include <cmath>
#include <set>

#include "ftar/coded.h"
#include "ftar/tests/ring_cluster.h"

namespace rejoin::ftar {
namespace {

const std::vector<std::size_t> kCodedSizes{5, 200, kSanitized ? 1000 : 3000, kSanitized ? 3001 : 10001};

struct Coded : Cluster {
  Coded(Over over, std::uint64_t seed, Coding coding, std::vector<std::size_t> elements = kCodedSizes)
      : Cluster(seed, std::move(elements), over) {
    options.coding = coding;
  }
  void reduce(Step step, ReduceOp op = ReduceOp::sum, std::uint64_t weights = 0) {
    start(step, op, weights);
    ASSERT_TRUE(until([&] { return all_done(step); }));
  }
  // What this member's chunks have been coded in is in no result; that they have been is.
  std::uint64_t coded_chunks() const {
    std::uint64_t all = 0;
    for (auto& rank : ranks)
      if (rank->alive) all += rank->communicator->stats().coded_chunks_sent;
    return all;
  }
  std::uint64_t bytes_sent() const {
    std::uint64_t all = 0;
    for (auto& rank : ranks) all += rank->communicator->stats().chunk_bytes_sent;
    return all;
  }

  // All have the same bits, and each element differs from the sum by no more than what all codings of its block may
  // lose: one of each contributor. `more`: what they had lost before, and added.
  void expect_near(const std::vector<const Rank*>& contributors, unsigned bits, double divisor = 1, double more = 1) {
    double largest = 0;  // in the block at hand: they come one after the other
    expect_within(contributors, divisor, [&](std::size_t b, std::size_t i) {
      if (i % 16 == 0) largest = 0;
      for (std::size_t j = i; i % 16 == 0 && j < std::min(sizes[b], i + 16); ++j) {
        double all = 0;
        for (auto* c : contributors) all += std::abs(static_cast<double>(c->input[b][j]));
        largest = std::max(largest, all);
      }
      const double each = largest / (bits == 8 ? 127.5 : 14.0) * (bits == 8 ? 1.1 : 1.7);  // with what was lost
      return (each * static_cast<double>(contributors.size()) * more + 1e-4) / divisor;
    });
  }
};

unsigned bits_of(Coding coding) { return coding == Coding::eight ? 8 : 4; }

struct FtarCoded : FtarRing {};
INSTANTIATE_TEST_SUITE_P(Memory, FtarCoded, testing::Values(Over::host, Over::gpu),
                         [](const auto& i) { return std::string(i.param == Over::gpu ? "gpu" : "host"); });

TEST_P(FtarCoded, AllMembersEndWithTheSameBitsNearTheSum) {
  for (const Coding coding : {Coding::eight, Coding::four})
    for (const int contributors : {2, 3, 5})
      for (int joiners = 0; joiners <= 2; joiners += on_gpu ? 2 : 1)
        for (std::uint64_t seed = on_gpu ? 2 : 1; seed <= 2; ++seed) {
          Coded cluster(over, seed, coding);
          cluster.options.both_ways = seed % 2 == 0;
          for (int i = 0; i < contributors + joiners; ++i) cluster.add().communicator->digest_results(true);
          auto ring = cluster.ring_members();
          for (int i = 0; i < joiners; ++i) ring[ring.size() - 1 - i].role = Role::catching_up;
          cluster.enter(Epoch(1), ring);
          auto counted = cluster.live();
          counted.resize(contributors);
          for (std::uint64_t step = 1; step <= (on_gpu && kSanitized ? 2 : 3); ++step) {
            const bool mean = seed > 1;
            cluster.reduce(Step(step), mean ? ReduceOp::mean : ReduceOp::sum);
            cluster.expect_near(counted, bits_of(coding), mean ? contributors : 1, 2);
          }
          std::set<std::uint64_t> digests;
          for (auto& rank : cluster.ranks) digests.insert(*rank->communicator->results().digest(*cluster.access));
          EXPECT_EQ(digests.size(), 1u);
          EXPECT_GT(cluster.coded_chunks(), 0u);
        }
}

TEST_P(FtarCoded, FewerBytesTravel) {
  const auto sent = [&](Coding coding) {
    Coded cluster(over, 1, coding, {on_gpu && kSanitized ? 12000u : 40000u});
    for (int i = 0; i < 3; ++i) cluster.add();
    cluster.enter(Epoch(1), cluster.ring_members());
    cluster.reduce(Step(1));
    return static_cast<double>(cluster.bytes_sent());
  };
  const double plain = sent(Coding::off);
  EXPECT_NEAR(plain / sent(Coding::eight), 64.0 / 17, 0.05);
  EXPECT_NEAR(plain / sent(Coding::four), 64.0 / 10, 0.1);
}

TEST_P(FtarCoded, ALoneContributorsResultIsCodedForItsJoinersAlone) {
  for (const bool joiner : {false, true}) {
    Coded cluster(over, 2, Coding::eight);
    for (int i = 0; i < (joiner ? 2 : 1); ++i) cluster.add();
    cluster.enter(Epoch(1), cluster.ring_members(joiner ? Role::catching_up : Role::contributor));
    cluster.reduce(Step(1), ReduceOp::mean, 7);
    if (joiner) {
      cluster.expect_near({cluster.ranks[0].get()}, 8, 7);
      EXPECT_GT(cluster.coded_chunks(), 0u);
      continue;
    }
    cluster.expect_result({cluster.ranks[0].get()}, 7);
    EXPECT_EQ(cluster.coded_chunks(), 0u);
  }
}

// The same inputs in each step: the sum of the results is off by what the last step has lost, however many there were.
TEST_P(FtarCoded, WhatCodingLosesIsMadeUpForInLaterSteps) {
  for (const bool weights : {false, true}) {
    Coded cluster(over, 4, Coding::four, {3000});
    for (int i = 0; i < 3; ++i) cluster.add();
    cluster.enter(Epoch(1), cluster.ring_members());
    std::vector<double> sums(3000), first(3000);
    constexpr int steps = 64;
    double all = 0, all_first = 0;
    for (int step = 1; step <= steps; ++step) {
      // By what the sum is divided changes from step to step: what is lost counts as much.
      cluster.reduce(Step(static_cast<std::uint64_t>(step)), ReduceOp::mean, weights ? step % 5 + 1 : 0);
      all += 1.0 / (weights ? step % 5 + 1 : 3);
      cluster.look();
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += cluster.ranks[0]->output[0][i];
      if (step == 1) first = sums, all_first = all;
    }
    double once = 0, together = 0;
    for (std::size_t i = 0; i < sums.size(); ++i) {
      double exact = 0;
      for (auto& rank : cluster.ranks) exact += rank->input[0][i];
      once += std::pow(first[i] - exact * all_first, 2);
      together += std::pow(sums[i] - exact * all, 2);
    }
    EXPECT_GT(once, 0.0);
    EXPECT_LT(std::sqrt(together), std::sqrt(once) * 3) << (weights ? "weights" : "no weights");
  }
}

// Nothing is kept of a chunk that goes as it is, whatever has been kept of it before. One member takes no coded chunks,
// and in each step it has another neighbour.
TEST_P(FtarCoded, WhatWasLostIsAddedOnceWhoeverCodesInTheNextStep) {
  Coded cluster(over, 4, Coding::four, {3000});
  for (int i = 0; i < 4; ++i) {
    cluster.options.coding = i == 3 ? Coding::off : Coding::four;
    cluster.add();
  }
  std::vector<double> sums(3000);
  auto ring = cluster.ring_members();
  double once = 0, together = 0;
  constexpr std::uint64_t steps = 48;
  for (std::uint64_t step = 1; step <= steps; ++step) {
    std::shuffle(ring.begin(), ring.end(), cluster.random);
    cluster.enter(Epoch(step), ring);
    cluster.reduce(Step(step));
    cluster.look();
    for (std::size_t i = 0; i < sums.size(); ++i) {
      double exact = 0;
      for (auto& rank : cluster.ranks) exact += rank->input[0][i];
      sums[i] += cluster.ranks[0]->output[0][i] - exact;
      if (step == 1) once += std::pow(sums[i], 2);
      if (step == steps) together += std::pow(sums[i], 2);
    }
  }
  EXPECT_GT(once, 0.0);
  EXPECT_LT(std::sqrt(together), std::sqrt(once) * 3);
}

// A step that fails in its midst and is repeated, once or more, with the same members.
TEST_P(FtarCoded, ARepeatedStepHasTheBitsOfOneThatNeverFailed) {
  const auto run = [&](std::uint64_t seed, bool fails) {
    Coded cluster(over, 7, Coding::eight);
    for (int i = 0; i < 3; ++i) cluster.add();
    cluster.random.seed(seed);
    std::uint64_t epoch = 1;
    cluster.enter(Epoch(1), cluster.ring_members());
    for (std::uint64_t step = 1; step <= 4; ++step) {
      cluster.start(Step(step));
      for (int again = 0; fails && again < 2; ++again) {
        for (auto moment = cluster.random() % 300; moment > 0; --moment) cluster.fabric.step(), cluster.pump();
        for (auto& rank : cluster.ranks) rank->outcomes.clear();  // perhaps it had ended already, here or there
        cluster.enter(Epoch(++epoch), cluster.ring_members());
        cluster.start(Step(step));
      }
      EXPECT_TRUE(cluster.until([&] { return cluster.all_done(Step(step)); }));
    }
    cluster.look();
    return std::pair(cluster.ranks[0]->output, cluster.ranks[2]->output);
  };
  const auto calm = run(1, false);
  EXPECT_EQ(calm.first, calm.second);
  for (std::uint64_t seed = 1; seed <= seeds(20); ++seed) EXPECT_EQ(run(seed, true), calm) << "seed " << seed;
}

TEST_P(FtarCoded, SurvivorsFinishFromIntactInputsWhereverAMemberDies) {
  for (std::uint64_t seed = 1; seed <= seeds(40); ++seed) {
    SCOPED_TRACE(seed);
    Coded cluster(over, seed, seed % 2 == 0 ? Coding::eight : Coding::four);
    for (int i = 0; i < 4; ++i) cluster.add();
    cluster.enter(Epoch(1), cluster.ring_members(seed % 3 == 0 ? Role::catching_up : Role::contributor));
    cluster.reduce(Step(1));
    std::vector<std::vector<std::vector<float>>> inputs;
    for (auto& rank : cluster.ranks) inputs.push_back(rank->input);
    cluster.start(Step(2));
    for (auto moment = cluster.random() % 400; moment > 0; --moment) cluster.fabric.step(), cluster.pump();
    cluster.kill(*cluster.ranks[seed % 4]);
    ASSERT_TRUE(cluster.until(
        [&] { return std::ranges::all_of(cluster.ranks, [](auto& r) { return !r->alive || r->lost_someone(); }); }));
    cluster.look_at_inputs();
    for (std::size_t i = 0; i < inputs.size(); ++i) EXPECT_EQ(cluster.ranks[i]->input, inputs[i]) << "input-intact";
    for (auto& rank : cluster.ranks) rank->outcomes.clear();
    cluster.enter(Epoch(2), cluster.ring_members());
    cluster.reduce(Step(2));
    cluster.expect_near(cluster.live(), seed % 2 == 0 ? 8 : 4, 1, 2);
  }
}

// A joiner that has become a contributor, and one that has gone: nobody's bits differ.
TEST_P(FtarCoded, MembersComeAndGoAndTakeNothingWithThem) {
  Coded cluster(over, 6, Coding::four);
  for (int i = 0; i < 4; ++i) cluster.add();
  std::uint64_t step = 0;
  const auto steps = [&](Epoch epoch, std::vector<RingMember> ring) {
    auto counted = cluster.live();
    std::erase_if(counted, [&](const Rank* rank) {
      return std::ranges::none_of(
          ring, [&](const auto& one) { return one.member == rank->self && one.role == Role::contributor; });
    });
    cluster.enter(epoch, std::move(ring));
    for (int i = 0; i < 3; ++i) {
      cluster.reduce(Step(++step), ReduceOp::mean);
      cluster.expect_near(counted, 4, static_cast<double>(counted.size()), 3);
    }
  };
  steps(Epoch(1), cluster.ring_members(Role::catching_up));
  steps(Epoch(2), cluster.ring_members());
  cluster.kill(*cluster.ranks[1]);
  steps(Epoch(3), cluster.ring_members());
}

// Somebody knows of no coding, or does without: what goes to it and from it is plain, and all have the same bits.
TEST_P(FtarCoded, AMemberWithoutCodingTakesPartInTheRing) {
  for (std::uint32_t without = 0; without < 4; ++without)
    for (const bool joiner : {false, true}) {
      if (on_gpu && kSanitized && joiner != (without % 2 == 0)) continue;
      Coded cluster(over, 3, Coding::eight);
      for (std::uint32_t i = 0; i < 4; ++i) {
        cluster.options.coding = i == without ? Coding::off : Coding::eight;
        cluster.add();
      }
      cluster.enter(Epoch(1), cluster.ring_members(joiner ? Role::catching_up : Role::contributor));
      for (std::uint64_t step = 1; step <= 2; ++step) {
        cluster.reduce(Step(step));
        auto counted = cluster.live();
        if (joiner) counted.pop_back();
        cluster.expect_near(counted, 8, 1, 2);
      }
      EXPECT_GT(cluster.coded_chunks(), 0u);
      EXPECT_EQ(cluster.ranks[without]->communicator->stats().coded_chunks_sent, 0u);
    }
}

// The links to one member are slow by this coder's rate, which is set for each member: those over which it sends.
TEST_P(FtarCoded, ChunksAreCodedWhereTheLinkIsSlowerThanTheCoder) {
  const std::size_t elements = on_gpu && kSanitized ? 50000 : 100000;  // enough for the links' rates to be known
  for (const bool any_slow : {false, true}) {
    Coded cluster(over, 5, Coding::automatic, {elements});
    cluster.options.chunk_bytes = on_gpu && kSanitized ? 32 * KiB : 64 * KiB;
    for (int i = 0; i < 4; ++i) {
      cluster.options.coding_rate = any_slow && i == 1 ? 1e15 : 1;
      cluster.add();
    }
    cluster.enter(Epoch(1), cluster.ring_members());
    cluster.reduce(Step(1));
    cluster.expect_result(cluster.live());  // nothing is known of the links yet
    EXPECT_EQ(cluster.coded_chunks(), 0u);
    for (std::uint64_t step = 2; step <= (on_gpu ? 3 : 6); ++step) {
      cluster.reduce(Step(step));
      cluster.expect_near(cluster.live(), 4, 1, 2);
    }
    if (!any_slow) {
      cluster.expect_result(cluster.live());
      EXPECT_EQ(cluster.coded_chunks(), 0u);
      continue;
    }
    // Its neighbours hand on what it and those behind it have coded; whoever made a result after its hop has coded
    // that.
    for (const auto& rank : cluster.ranks) EXPECT_GT(rank->communicator->stats().coded_chunks_sent, 0u);
    const std::uint64_t before = cluster.ranks[1]->communicator->stats().feedback_bytes;
    EXPECT_EQ(before, 2 * 4 * elements) << "what it has lost";
  }
}

TEST(FtarCodedWidth, FewBitsAreTakenWhereTheyLoseLittle) {
  BucketCoding coding;
  const auto steps = [&](double eight, int count) {  // with what 8 bits lose
    for (int i = 0; i < count; ++i) {
      const double error = coding.width == coding::Width::four ? eight * 12 : eight;
      *coding.loss = {error * error, 1};
      coding.adapt(0.2);
    }
    return coding.plain_for > 0 ? coding::Width::plain : coding.width;
  };
  EXPECT_EQ(steps(0.015, 10), coding::Width::eight) << "in 4 bits: 0.18, not clearly less";
  EXPECT_EQ(steps(0.007, 20), coding::Width::four);
  EXPECT_EQ(steps(0.015, 20), coding::Width::four) << "within the bound still";
  EXPECT_EQ(steps(0.02, 20), coding::Width::eight);
  EXPECT_EQ(steps(0.5, 20), coding::Width::plain);
  EXPECT_EQ(steps(0.015, 70), coding::Width::eight) << "tried again later";
  for (const double of : {0.0, 1e-40, 1e40})  // nothing was coded; values whose squares are nothing, or too much
    for (int i = 0; i < 20; ++i) *coding.loss = {0, of}, coding.adapt(0.2);
  EXPECT_EQ(coding.width, coding::Width::eight);
}

// Steps in which one member dies in the midst of the last, which is repeated without it: whatever had been coded by
// then. `in_host`: of a cluster over a GPU's memory, whose buckets are in the host's.
std::vector<std::vector<float>> after_a_death(Over over, Coding coding, std::uint64_t moment,
                                              const std::set<std::uint32_t>& in_host = {}) {
  Coded cluster(over, 8, coding);
  for (std::uint32_t i = 0; i < 4; ++i) cluster.add(in_host.contains(i));
  cluster.enter(Epoch(1), cluster.ring_members());
  for (std::uint64_t step = 1; step <= 3; ++step) cluster.reduce(Step(step), ReduceOp::mean);
  cluster.start(Step(4), ReduceOp::mean);
  for (; moment > 0; --moment) cluster.fabric.step(), cluster.pump();
  cluster.kill(*cluster.ranks[1]);
  EXPECT_TRUE(cluster.until(
      [&] { return std::ranges::all_of(cluster.ranks, [](auto& r) { return !r->alive || r->lost_someone(); }); }));
  for (auto& rank : cluster.ranks) rank->outcomes.clear();
  cluster.enter(Epoch(2), cluster.ring_members());
  for (std::uint64_t step = 4; step <= 5; ++step) cluster.reduce(Step(step), ReduceOp::mean);
  cluster.expect_near(cluster.live(), bits_of(coding), 3, 2);  // all have the same bits
  return cluster.ranks[3]->output;
}

TEST(FtarCodedMemories, MembersInAGpusMemoryOrTheHostsHaveTheSameBitsWhenOneDies) {
  for (const Coding coding : {Coding::eight, Coding::four}) {
    const auto expected = after_a_death(Over::host, coding, 100);
    EXPECT_EQ(after_a_death(Over::host, coding, 40), expected);
    for (const std::uint64_t moment : {30, 170, 260}) EXPECT_EQ(after_a_death(Over::gpu, coding, moment), expected);
    for (const auto& in_host : {std::set{0u, 2u}, std::set{0u, 1u, 2u}, std::set{3u}})
      EXPECT_EQ(after_a_death(Over::gpu, coding, 120, in_host), expected);
  }
}

TEST(FtarCodedMemories, AGpusReducerThatOnlyAddsIsRefused) {
  Cluster cluster(1, {1000}, Over::gpu);
  cluster.options.shared_reducer = *device::Reducer::make(*cluster.device, {.blocks = 2, .threads = 64});
  cluster.add();
  cluster.options.coding = Coding::eight;
  EXPECT_THROW(cluster.add(), std::runtime_error);
}

TEST(FtarCodedMemories, WhatAGpuCodesIsMeasured) {
  Cluster cluster(1, {1000}, Over::gpu);
  const auto reducer = std::shared_ptr(
      *device::Reducer::make(*cluster.device, {.blocks = 2, .threads = 64, .codes = true, .external_launcher = true}));
  const auto rate = make_coder(cluster.device, reducer)->rate();
  ASSERT_TRUE(rate) << rate.error().message;
  EXPECT_GT(*rate, 0);
}

TEST(FtarCodedRoom, EachChunkHasAPlaceOfItsOwnThatIsAlignedWhereItsSizeIs) {
  for (const auto type : {DataType::float32, DataType::bfloat16})
    for (const std::uint32_t contributors : {1u, 2u, 3u, 7u, 1024u})
      for (const std::size_t bytes : {std::size_t{1000}, std::size_t{64000}, std::size_t{3000004}})
        for (const std::size_t limit : {std::size_t{192}, std::size_t{64 * KiB}}) {
          const Schedule schedule({.bytes = bytes,
                                   .element = size_of(type),
                                   .contributors = contributors,
                                   .members = contributors,
                                   .chunk_bytes = tuned_chunk(bytes, contributors, limit)});
          BucketCoding coding;
          coding.type = type;
          coding.room = 64;
          std::size_t end = coding.room;
          for (std::uint32_t chunk = 0; chunk < contributors * schedule.stride(); ++chunk) {
            if (!schedule.valid(chunk)) continue;
            const std::size_t place = coding.place(schedule, chunk);
            ASSERT_GE(place, end) << chunk;
            if (limit % KiB == 0) ASSERT_EQ(place % 16, 0u) << chunk;
            end = place + coding::coded_bytes(type, schedule.chunk(chunk).length, coding::Width::eight);
          }
          ASSERT_LE(end, coding.room + BucketCoding::room_for(type, bytes));
        }
}

TEST(FtarCodedWidth, ABoundOutsideOfItsRangeIsRefused) {
  EXPECT_FALSE(check({.coding_error = 0}));
  EXPECT_FALSE(check({.coding_error = 1.5}));
}

}  // namespace
}  // namespace rejoin::ftar
