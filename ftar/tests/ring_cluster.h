// Whole rings in one process, on the simulated fabric, driven by a seed; over the host's memory, and over a GPU's: one
// made of software here, a real one in `./run gpu test`.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "base/log.h"
#include "base/sanitized.h"
#include "device/tests/library.h"
#include "ftar/communicator.h"
#include "transport/sim/fabric.h"
#include "transport/staged/factory.h"

namespace rejoin::ftar {

// What a ring reduces: memory of the host; the same, which members can look into; a GPU's.
enum class Over { host, viewed, gpu };

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
  Options options{.chunk_bytes = 1024, .chunks_in_flight = 3, .direct_bytes = 256, .device_direct_bytes = 256};
  Group group{.job = 42, .rank = 0};  // of whom is added
  std::vector<std::size_t> sizes;
  std::mt19937_64 random;
  std::shared_ptr<device::Device> device;  // whose memory is reduced; none: the host's
  std::unique_ptr<device::Stream> stream;
  std::unique_ptr<device::Access> access = *device::make_host()->make_access();  // to what is reduced
  // Put between the fabric and what stages, to see what passes there; none: nothing.
  std::function<std::unique_ptr<transport::Engine>(std::unique_ptr<transport::Engine>)> wrap;

  Cluster(std::uint64_t seed, std::vector<std::size_t> elements, Over over = Over::host)
      : fabric({.seed = seed, .viewable = over == Over::viewed}, clock), sizes(std::move(elements)), random(seed) {
    if (over != Over::gpu) return;
    spdlog::set_level(spdlog::level::err);  // each engine says that it stages
    device = device::test_gpu();
    stream = *device->make_stream();
    access = *device->make_access();
    options.device = device;
    options.reducer = {.blocks = 2, .threads = 64};
  }

  // `in_host`: this one's buckets are in the host's memory, whatever the others'.
  Rank& add(bool in_host = false) {
    auto rank = std::make_unique<Rank>();
    rank->engine = fabric.make_engine();
    rank->on_fabric = rank->engine.get();
    if (wrap) rank->engine = wrap(std::move(rank->engine));
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
        if (!device || in_host) return bytes;
        on_device.push_back(*device->allocate(bytes.size()));
        EXPECT_TRUE(stream->copy(on_device.back().bytes.data(), bytes.data(), bytes.size()));
        EXPECT_TRUE(stream->synchronize());
        return on_device.back().bytes;
      };
      buckets.push_back({DataType::float32, sizes[i], memory_of(rank->input[i], rank->inputs),
                         memory_of(rank->output[i], rank->outputs)});
    }
    Options its = options;
    if (in_host) its.device = nullptr;
    auto made = Communicator::make(*rank->engine, its, rank->self, std::move(buckets), group);
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
  // One at a time: what happens next on the fabric, and then all look.
  void pass(std::uint64_t turns) {
    for (; turns > 0; --turns) {
      (void)fabric.step();
      pump();
    }
  }
  bool works() const {
    return !device &&
           std::ranges::any_of(ranks, [](auto& rank) { return rank->alive && rank->communicator->working(); });
  }
  // Until it is, or nothing moves any more. What a GPU does takes real time, which the fabric knows nothing of.
  bool until(const std::function<bool()>& done) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    for (int idle = 0; !done();) {
      pump();
      if (fabric.step() || works()) continue;
      if (device ? std::chrono::steady_clock::now() > deadline : ++idle > 3) return done();
      if (device) device::pause();
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
  Chunking chunking = Chunking::now;
  void enter(Epoch epoch, const std::vector<RingMember>& ring) {
    for (auto& rank : ranks) {
      if (!rank->alive) continue;
      for (auto& other : ranks)
        if (!other->alive) rank->communicator->forget(other->self);
      rank->communicator->enter(epoch, ring, chunking);
    }
  }
  // Twelve epochs, each with another order of members; of so many members one does not hear of it, and it lasts for
  // fewer than so many turns. Then one that all hear of. Step 1 is reduced in each.
  struct Missed {
    std::uint64_t one_in = 3, turns = 400;
    std::function<void()> before_each = [] {};  // turn
  };
  void miss_epochs(const Missed& missed) {
    auto ring = ring_members();
    std::uint64_t epoch = 0;
    const auto enter_and_reduce = [&](Rank& rank) {
      rank.communicator->enter(Epoch(epoch), ring);
      for (std::uint32_t b = 0; b < sizes.size(); ++b)
        ASSERT_TRUE(rank.communicator->all_reduce(b, Step(1), ReduceOp::sum));
    };
    for (int change = 0; change < 12; ++change) {
      std::shuffle(ring.begin(), ring.end(), random);
      ++epoch;
      for (auto& rank : ranks)
        if (random() % missed.one_in != 0) enter_and_reduce(*rank);
      for (auto turns = random() % missed.turns; turns > 0; --turns) {
        missed.before_each();
        pump();
        (void)fabric.step();
      }
    }
    ++epoch;
    for (auto& rank : ranks) {
      std::erase_if(rank->outcomes, [](const Outcome& one) { return one.kind == Outcome::Kind::done; });
      enter_and_reduce(*rank);
    }
  }
  void start(Step step, ReduceOp op = ReduceOp::sum, std::uint64_t weights = 0) {
    for (auto& rank : ranks)
      if (rank->alive)
        for (std::uint32_t b = 0; b < sizes.size(); ++b)
          EXPECT_TRUE(rank->communicator->all_reduce(b, step, op, weights));
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
    expect_within(contributors, divisor, [](std::size_t, std::size_t) { return 1e-4; });
  }
  // … within `most` of a bucket and element.
  void expect_within(const std::vector<const Rank*>& contributors, double divisor,
                     const std::function<double(std::size_t, std::size_t)>& most) {
    look();
    const Rank* first = nullptr;
    for (auto& rank : ranks) {
      if (!rank->alive) continue;
      if (first == nullptr) first = rank.get();
      for (std::size_t b = 0; b < sizes.size(); ++b) {
        ASSERT_EQ(std::memcmp(rank->output[b].data(), first->output[b].data(), sizes[b] * 4), 0)
            << "bucket " << b << " differs on replica " << rank->self.replica.value;
        for (std::size_t i = 0; i < sizes[b] && rank.get() == first; ++i) {
          double sum = 0;
          for (auto* c : contributors) sum += c->input[b][i];
          ASSERT_NEAR(rank->output[b][i], sum / divisor, most(b, i)) << "bucket " << b << " element " << i;
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

inline const std::vector<std::size_t> kSizes{1, 5, 60, 200, kSanitized ? 1000 : 3000, kSanitized ? 4001 : 40001};

struct FtarRing : testing::TestWithParam<Over> {
  const Over over = GetParam();
  const bool on_gpu = over == Over::gpu;
  // A GPU made of software is slower than memory, and sanitizers make both slower.
  std::uint64_t seeds(std::uint64_t of_host) const {
    constexpr std::uint64_t fewer = kSanitized ? 3 : 1;
    const std::uint64_t by = fewer * (on_gpu ? 8 : 1);
    return (of_host + by - 1) / by;
  }
};

}  // namespace rejoin::ftar
