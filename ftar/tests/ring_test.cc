// The all-reduce under failures, on the simulated fabric: whole rings in one process, driven by a seed; over the host's
// memory, and over a GPU's: one made of software here, a real one in `./run gpu test`.
#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <set>

#include "base/log.h"
#include "device/tests/library.h"
#include "ftar/communicator.h"
#include "transport/sim/fabric.h"
#include "transport/staged/factory.h"

namespace rejoin::ftar {
namespace {

constexpr std::uint64_t kSecret = 42;

// One rank with its buffers. Where they are in a GPU's memory, what `input` and `output` hold is a copy of that.
struct Rank {
  std::vector<device::Memory> inputs, outputs;
  std::unique_ptr<transport::Engine> engine;
  transport::Engine* on_fabric = nullptr;  // the engine that the fabric knows
  transport::Address address;
  std::unique_ptr<Communicator> communicator;
  std::vector<std::vector<float>> input, output;
  Member self;
  bool alive = true;
  std::vector<Outcome> outcomes;

  std::size_t done(Step step) const {
    return static_cast<std::size_t>(std::count_if(outcomes.begin(), outcomes.end(), [&](const Outcome& o) {
      return o.kind == Outcome::Kind::done && o.step == step;
    }));
  }
  bool lost_someone() const {
    return std::any_of(outcomes.begin(), outcomes.end(),
                       [](const Outcome& o) { return o.kind == Outcome::Kind::peer_lost; });
  }
};

struct Cluster {
  VirtualClock clock;
  transport::sim::Fabric fabric;
  std::vector<std::unique_ptr<Rank>> ranks;
  Options options{.chunk_bytes = 1024, .chunks_in_flight = 3, .direct_bytes = 256};
  std::vector<std::size_t> sizes;
  std::mt19937_64 random;
  std::shared_ptr<device::Device> device;  // whose memory is reduced; none: the host's
  std::unique_ptr<device::Stream> stream;

  Cluster(std::uint64_t seed, std::vector<std::size_t> elements, bool on_gpu = false)
      : fabric({.seed = seed}, clock), sizes(std::move(elements)), random(seed) {
    if (!on_gpu) return;
    spdlog::set_level(spdlog::level::err);  // each engine says that it stages
    device = device::test_gpu();
    stream = *device->make_stream();
    options.device = device;
    options.reducer = {.blocks = 2, .threads = 64};
  }

  Rank& add() {
    auto rank = std::make_unique<Rank>();
    rank->engine = fabric.make_engine();
    rank->on_fabric = rank->engine.get();
    if (device)
      rank->engine = *transport::staged::make_engine(std::move(rank->engine), device, {.slot_bytes = 512, .slots = 4});
    rank->address = *rank->engine->listen({"sim"});
    rank->self = {ReplicaId(static_cast<std::uint32_t>(ranks.size())), Incarnation(ranks.size() + 1)};
    std::vector<BucketSpec> buckets;
    for (auto size : sizes) {
      rank->input.emplace_back(size);
      rank->output.emplace_back(size, -7.0f);
      for (auto& value : rank->input.back())
        value = static_cast<float>(static_cast<int>(random() % 20001) - 10000) * 1e-3f;
    }
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const auto memory_of = [&](std::vector<float>& values, std::vector<device::Memory>& on_device) {
        const auto bytes = std::as_writable_bytes(std::span(values));
        if (!device) return bytes;
        on_device.push_back(*device->allocate(bytes.size()));
        EXPECT_TRUE(stream->copy(on_device.back().bytes.data(), bytes.data(), bytes.size()));
        EXPECT_TRUE(stream->synchronize());
        return on_device.back().bytes;
      };
      buckets.push_back({DataType::float32, sizes[i], memory_of(rank->input[i], rank->inputs),
                         memory_of(rank->output[i], rank->outputs)});
    }
    auto made = Communicator::make(*rank->engine, options, rank->self, std::move(buckets), kSecret);
    if (!made) throw std::runtime_error(made.error().message);
    rank->communicator = std::move(*made);
    for (auto& other : ranks) EXPECT_TRUE(rank->communicator->connect(other->self, other->address));
    ranks.push_back(std::move(rank));
    return *ranks.back();
  }

  void pump() {
    for (auto& rank : ranks)
      if (rank->alive)
        for (const auto& outcome : rank->communicator->poll(clock.now())) rank->outcomes.push_back(outcome);
  }
  // Until it is, or nothing moves any more. What a GPU does takes real time, which the fabric knows nothing of.
  bool until(const std::function<bool()>& done) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    for (int idle = 0; !done();) {
      pump();
      if (fabric.step()) continue;
      if (device ? std::chrono::steady_clock::now() > deadline : ++idle > 3) return done();
    }
    return true;
  }
  // What is in a GPU's memory, to where the tests look.
  void look() {
    look_at_inputs();
    for (auto& rank : ranks)
      if (rank->alive) copy_out(rank->outputs, rank->output);  // a dead one's GPU may still be at it
  }
  void look_at_inputs() {  // which nobody writes, so that it may be at any time
    for (auto& rank : ranks) copy_out(rank->inputs, rank->input);
  }
  void copy_out(const std::vector<device::Memory>& from, std::vector<std::vector<float>>& to) {
    for (std::size_t i = 0; i < from.size(); ++i)
      EXPECT_TRUE(stream->copy(reinterpret_cast<std::byte*>(to[i].data()), from[i].bytes.data(), from[i].bytes.size()));
    if (device) EXPECT_TRUE(stream->synchronize());
  }
  std::vector<RingMember> ring_members(Role newest = Role::contributor) const {
    std::vector<RingMember> ring;
    for (auto& rank : ranks)
      if (rank->alive) ring.push_back({rank->self, Role::contributor});
    ring.back().role = newest;
    return ring;
  }
  void enter(Epoch epoch, const std::vector<RingMember>& ring) {
    for (auto& rank : ranks) {
      if (!rank->alive) continue;
      for (auto& other : ranks)
        if (!other->alive) rank->communicator->forget(other->self);
      rank->communicator->enter(epoch, ring);
    }
  }
  void start(Step step, ReduceOp op = ReduceOp::sum) {
    for (auto& rank : ranks)
      if (rank->alive)
        for (std::uint32_t b = 0; b < sizes.size(); ++b) EXPECT_TRUE(rank->communicator->all_reduce(b, step, op));
  }
  bool all_done(Step step) const {
    return std::all_of(ranks.begin(), ranks.end(),
                       [&](const auto& rank) { return !rank->alive || rank->done(step) == sizes.size(); });
  }
  void kill(Rank& rank) {
    rank.alive = false;
    fabric.kill(*rank.on_fabric);
  }

  // Every live rank has the same bits, and they are the sum over `contributors` within float rounding.
  void expect_result(const std::vector<const Rank*>& contributors, double divisor = 1) {
    look();
    const Rank* first = nullptr;
    for (auto& rank : ranks) {
      if (!rank->alive) continue;
      if (first == nullptr) first = rank.get();
      for (std::size_t b = 0; b < sizes.size(); ++b) {
        ASSERT_EQ(std::memcmp(rank->output[b].data(), first->output[b].data(), sizes[b] * 4), 0)
            << "bucket " << b << " differs on replica " << rank->self.replica.value;
        for (std::size_t i = 0; i < sizes[b]; ++i) {
          double sum = 0;
          for (auto* c : contributors) sum += c->input[b][i];
          ASSERT_NEAR(rank->output[b][i], sum / divisor, 1e-4) << "bucket " << b << " element " << i;
        }
      }
    }
  }
  std::vector<const Rank*> live() const {
    std::vector<const Rank*> all;
    for (auto& rank : ranks)
      if (rank->alive) all.push_back(rank.get());
    return all;
  }
};

const std::vector<std::size_t> kSizes{1, 5, 60, 200, 3000, 40001};

struct FtarRing : testing::TestWithParam<bool> {
  bool on_gpu = GetParam();
  // A GPU made of software is slower than memory.
  std::uint64_t seeds(std::uint64_t of_host) const { return on_gpu ? (of_host + 7) / 8 : of_host; }
};
INSTANTIATE_TEST_SUITE_P(Memory, FtarRing, testing::Bool(),
                         [](const auto& i) { return std::string(i.param ? "gpu" : "host"); });

TEST_P(FtarRing, ResultsHaveOneDigestOnAllMembersWhoeverJoins) {
  for (const bool direct : {false, true}) {
    Cluster cluster(5, kSizes, on_gpu);
    if (!direct) cluster.options.direct_bytes = 0;
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
      for (auto& rank : cluster.ranks) digests.insert(*rank->communicator->results_digest());
      EXPECT_EQ(digests.size(), 1u);
      all.insert(*digests.begin());
    }
    EXPECT_EQ(all.size(), 2u) << "other results, other digests";
  }
}

TEST(FtarResults, AFlippedBitIsTracedToTheHopThatItCameOver) {
  for (const bool both_ways : {false, true})
    for (const std::size_t size : {std::size_t{60}, std::size_t{3000}}) {  // directly, and by the ring
      Cluster cluster(9, {200, size});
      cluster.options.both_ways = both_ways;
      for (std::uint32_t i = 0; i < 5; ++i) {
        cluster.options.flip_bit_at = Step(i == 3 ? 2 : 0);
        cluster.add().communicator->digest_results(true);
      }
      cluster.enter(Epoch(1), cluster.ring_members());
      for (std::uint64_t step = 1; step <= 2; ++step) {
        cluster.start(Step(step));
        ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(step)); }));
        std::set<std::uint64_t> digests;
        for (auto& rank : cluster.ranks) digests.insert(*rank->communicator->results_digest());
        EXPECT_EQ(digests.size(), step);
      }
      std::vector<std::vector<std::vector<Segment>>> told;
      for (auto& rank : cluster.ranks) told.push_back(*rank->communicator->inspect_results());
      std::set<std::uint32_t> receivers;
      for (std::uint32_t r = 0; r < 5; ++r)
        for (std::size_t b = 0; b < 2; ++b)
          for (std::size_t s = 0; s < told[r][b].size(); ++s)
            if (told[r][b][s].digest != told[told[r][b][s].from.value][b][s].digest) receivers.insert(r);
      EXPECT_EQ(receivers, std::set<std::uint32_t>{3});
      // The same step in another epoch, from the same inputs, is sound.
      cluster.enter(Epoch(2), cluster.ring_members());
      for (auto& rank : cluster.ranks) rank->outcomes.clear();
      cluster.start(Step(2));
      ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(2)); }));
      cluster.expect_result(cluster.live());
    }
}

TEST_P(FtarRing, AllMembersEndWithTheSumBitForBit) {
  for (int members : {1, 2, 3, 4, 6})
    for (std::uint64_t seed = 1; seed <= seeds(8); ++seed) {
      Cluster cluster(seed, kSizes, on_gpu);
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
    Cluster cluster(seed, kSizes, on_gpu);
    for (int i = 0; i < 4; ++i) cluster.add();
    cluster.enter(Epoch(1), cluster.ring_members(Role::catching_up));
    cluster.start(Step(1), ReduceOp::mean);
    ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); }));
    cluster.expect_result({cluster.ranks[0].get(), cluster.ranks[1].get(), cluster.ranks[2].get()}, 3);
  }
}

TEST_P(FtarRing, ACatchingUpMemberChangesNoBitOfTheResult) {
  const auto run = [&](bool joiner) {
    Cluster cluster(5, kSizes, on_gpu);
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

TEST_P(FtarRing, SurvivorsFinishFromIntactInputsWhereverAMemberDies) {
  for (std::uint64_t seed = 1; seed <= seeds(60); ++seed) {
    SCOPED_TRACE(seed);
    Cluster cluster(seed, kSizes, on_gpu);
    for (int i = 0; i < 4; ++i) cluster.add();
    cluster.enter(Epoch(1), cluster.ring_members());
    ASSERT_TRUE(cluster.until([&] {
      return cluster.ranks[0]->communicator->epoch() == Epoch(1) && !cluster.ranks[0]->communicator->busy();
    }));
    std::vector<std::vector<std::vector<float>>> inputs;
    for (auto& rank : cluster.ranks) inputs.push_back(rank->input);
    cluster.start(Step(1));
    const auto moment = static_cast<int>(cluster.random() % 400);
    for (int i = 0; i < moment; ++i) {
      cluster.fabric.step();
      cluster.pump();
    }
    Rank& victim = *cluster.ranks[seed % 4];
    cluster.kill(victim);
    ASSERT_TRUE(cluster.until([&] {
      return std::all_of(cluster.ranks.begin(), cluster.ranks.end(),
                         [](auto& r) { return !r->alive || r->lost_someone(); });
    }));
    cluster.look_at_inputs();
    for (std::size_t i = 0; i < inputs.size(); ++i) EXPECT_EQ(cluster.ranks[i]->input, inputs[i]) << "input-intact";
    for (auto& rank : cluster.ranks) rank->outcomes.clear();
    cluster.enter(Epoch(2), cluster.ring_members());
    cluster.start(Step(1));
    ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); }));
    cluster.expect_result(cluster.live());
  }
}

TEST_P(FtarRing, AStoppedMemberThatWakesLaterWritesNothingIntoTheNewEpoch) {
  for (std::uint64_t seed = 1; seed <= seeds(30); ++seed) {
    SCOPED_TRACE(seed);
    Cluster cluster(seed, kSizes, on_gpu);
    for (int i = 0; i < 4; ++i) cluster.add();
    cluster.enter(Epoch(1), cluster.ring_members());
    cluster.start(Step(1));
    for (std::uint64_t i = 0; i < 30 + seed * 7; ++i) {
      cluster.fabric.step();
      cluster.pump();
    }
    Rank& sleeper = *cluster.ranks[1];
    cluster.fabric.stop(*sleeper.on_fabric);
    sleeper.alive = false;  // for the cluster; its process wakes up again below
    for (auto& rank : cluster.ranks) rank->outcomes.clear();
    cluster.enter(Epoch(2), cluster.ring_members());
    cluster.start(Step(1));
    for (int i = 0; i < 20; ++i) {
      cluster.fabric.step();
      cluster.pump();
    }
    cluster.fabric.resume(*sleeper.on_fabric);
    ASSERT_TRUE(cluster.until([&] {
      sleeper.communicator->poll(cluster.clock.now());
      return cluster.all_done(Step(1));
    }));
    cluster.expect_result(cluster.live());
  }
}

TEST_P(FtarRing, AnEpochMayChangeInMidOperationWithAllMembersAlive) {
  for (std::uint64_t seed = 1; seed <= seeds(40); ++seed) {
    SCOPED_TRACE(seed);
    Cluster cluster(seed, kSizes, on_gpu);
    for (int i = 0; i < 3; ++i) cluster.add();
    cluster.enter(Epoch(1), cluster.ring_members());
    std::uint64_t epoch = 1;
    for (int round = 0; round < 5; ++round) {
      cluster.start(Step(1));
      const auto moment = static_cast<int>(cluster.random() % 200);
      for (int i = 0; i < moment; ++i) {
        cluster.fabric.step();
        cluster.pump();
      }
      // Members learn of the new epoch one after the other, with traffic in between.
      ++epoch;
      for (auto& rank : cluster.ranks) {
        rank->communicator->enter(Epoch(epoch), cluster.ring_members());
        for (int i = 0; i < 5; ++i) {
          cluster.fabric.step();
          cluster.pump();
        }
      }
    }
    for (auto& rank : cluster.ranks) rank->outcomes.clear();
    cluster.start(Step(2));
    ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(2)); }));
    cluster.expect_result(cluster.live());
  }
}

TEST(FtarPlans, WaitsNameTheMemberThatIsMissing) {
  Cluster cluster(3, {40000});
  for (int i = 0; i < 3; ++i) cluster.add();
  cluster.enter(Epoch(1), cluster.ring_members());
  cluster.until([&] { return !cluster.ranks[0]->communicator->busy(); });
  for (int i : {0, 1}) EXPECT_TRUE(cluster.ranks[i]->communicator->all_reduce(0, Step(1), ReduceOp::sum));
  while (cluster.fabric.step()) cluster.pump();
  const auto waits = cluster.ranks[1]->communicator->waits(cluster.clock.now() + std::chrono::seconds(1));
  ASSERT_EQ(waits.size(), 1u);
  ASSERT_TRUE(waits[0].on);
  EXPECT_EQ(waits[0].on->replica, ReplicaId(2));
  EXPECT_EQ(waits[0].what, "its start of bucket 0");
}

// Found by the simulator: the operations under way went on with pointers to the connection that was gone.
TEST_P(FtarRing, AMemberOfTheRingMayBeForgottenUnderARunningOperation) {
  Cluster cluster(3, {5000, 20}, on_gpu);
  for (int i = 0; i < 3; ++i) cluster.add();
  cluster.enter(Epoch(1), cluster.ring_members());
  ASSERT_TRUE(cluster.until([&] {
    return std::all_of(cluster.ranks.begin(), cluster.ranks.end(), [](const auto& rank) {
      return rank->communicator->epoch() == Epoch(1) && !rank->communicator->busy();
    });
  }));
  cluster.start(Step(1));
  for (int i = 0; i < 10; ++i) cluster.pump(), cluster.fabric.step();
  ASSERT_FALSE(cluster.all_done(Step(1)));
  for (auto& rank : cluster.ranks)
    if (rank->self != cluster.ranks[2]->self) rank->communicator->forget(cluster.ranks[2]->self);
  for (int i = 0; i < 40; ++i) {
    for (auto& rank : cluster.ranks) (void)rank->communicator->waits(cluster.clock.now());
    cluster.pump();
    cluster.fabric.step();
  }
  cluster.kill(*cluster.ranks[2]);
  for (auto& rank : cluster.ranks) rank->outcomes.clear();  // the small bucket may have ended in the first epoch
  cluster.enter(Epoch(2), cluster.ring_members());
  cluster.start(Step(1));
  EXPECT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); }));
}

// It has not died: it was silent, and may go on where it was stopped.
TEST_P(FtarRing, WhoIsNotInTheNextRingIsFencedByIt) {
  Cluster cluster(3, {5000, 20}, on_gpu);
  for (int i = 0; i < 3; ++i) cluster.add();
  const auto entered = [&](Epoch epoch) {
    return cluster.until([&] {
      return std::all_of(cluster.ranks.begin(), cluster.ranks.begin() + 2, [&](const auto& rank) {
        return rank->communicator->epoch() == epoch && !rank->communicator->busy();
      });
    });
  };
  const Member out = cluster.ranks[2]->self;
  cluster.enter(Epoch(1), cluster.ring_members());
  ASSERT_TRUE(entered(Epoch(1)));
  auto ring_members = cluster.ring_members();
  std::erase_if(ring_members, [&](const RingMember& one) { return one.member == out; });
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(cluster.ranks[i]->communicator->connected(out));
    cluster.ranks[i]->communicator->enter(Epoch(2), ring_members);
    EXPECT_FALSE(cluster.ranks[i]->communicator->connected(out));
  }
  ASSERT_TRUE(entered(Epoch(2)));
}

TEST(FtarPlans, AMemberWithAnotherPlanOrKeyIsRefused) {
  Cluster cluster(1, {1000});
  Rank& first = cluster.add();
  cluster.sizes = {1001};
  Rank& second = cluster.add();
  EXPECT_TRUE(cluster.until([&] { return second.lost_someone(); }));
  EXPECT_FALSE(first.communicator->connected(second.self));
}

TEST(FtarPlans, BadPlansAreRefusedWithTheReason) {
  VirtualClock clock;
  transport::sim::Fabric fabric({}, clock);
  auto engine = fabric.make_engine();
  std::vector<float> buffer(10);
  const auto bytes = std::as_writable_bytes(std::span(buffer));
  EXPECT_FALSE(Communicator::make(*engine, {}, {}, {}, 1));
  auto short_input = Communicator::make(*engine, {}, {}, {{DataType::float32, 11, bytes, bytes}}, 1);
  ASSERT_FALSE(short_input);
  EXPECT_NE(short_input.error().message.find("need 44 bytes"), std::string::npos) << short_input.error().message;
  EXPECT_FALSE(Communicator::make(*engine, {.chunks_in_flight = 65}, {}, {{DataType::float32, 10, bytes, bytes}}, 1));
}

// The same inputs give the same bits in either memory: a ring of GPUs is no other ring.
TEST(FtarPlans, AGpuAddsAsTheHostDoes) {
  const auto run = [](bool on_gpu) {
    Cluster cluster(9, {40001, 64}, on_gpu);
    for (int i = 0; i < 3; ++i) cluster.add();
    cluster.enter(Epoch(1), cluster.ring_members());
    cluster.start(Step(1), ReduceOp::mean);
    EXPECT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); }));
    cluster.look();
    return cluster.ranks[2]->output;
  };
  EXPECT_EQ(run(false), run(true));
}

TEST(FtarPlans, AMemberAloneIsGivenWhatItGave) {
  Cluster cluster(2, {5000}, true);
  cluster.add();
  cluster.enter(Epoch(1), cluster.ring_members());
  cluster.start(Step(1), ReduceOp::mean);
  ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); }));
  cluster.expect_result(cluster.live());
}

// A kernel for all buckets of a step, not for each chunk.
TEST(FtarPlans, AKernelServesForAWholeStep) {
  Cluster cluster(2, {40000, 40000}, true);
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
