// The stream end to end in one process: trainers that update every step, their daemons' services on the simulated
// fabric, a joiner that starts from nothing. What must hold: same-bits, no-stale-write, bounded-memory.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <random>
#include <sstream>

#include "base/log.h"
#include "catchup/gradient_log.h"
#include "catchup/service.h"
#include "device/tests/library.h"
#include "transport/sim/fabric.h"
#include "transport/staged/factory.h"

namespace rejoin::catchup {
namespace {

#ifdef REJOIN_SANITIZED
constexpr bool kSlow = true;
constexpr std::uint64_t kSeeds = 2;
#else
constexpr bool kSlow = false;
constexpr std::uint64_t kSeeds = 8;
#endif

local::Manifest small_model(bool elementwise, bool on_gpu) {
  const std::uint64_t less = on_gpu || kSlow ? 3 : 1;  // one made of software is slower than memory
  return *local::Manifest::make({{.name = "a", .count = 900'001 / less, .columns = 3, .elementwise = elementwise},
                                 {.name = "b", .count = 700'000 / less, .columns = 3},
                                 {.name = "c", .count = 5, .columns = 1}});
}

// Where states are: of a GPU or the host, allocated for them or by somebody else, scattered over several allocations.
struct Memory {
  bool on_gpu = false, scattered = false;
};

// A caching allocator's blocks, with other things between what is taken of them.
struct Scattered {
  static constexpr std::byte kOthers{0xa5};
  std::vector<device::Memory> blocks;
  std::vector<local::Owner::Own> columns;

  Scattered(const local::Manifest& manifest, device::Device& device, device::Access& access, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const bool on_gpu = device.kind() == device::MemoryKind::cuda;
    std::vector<std::pair<std::uint32_t, std::uint32_t>> order;
    for (std::uint32_t t = 0; t < manifest.tensors().size(); ++t) {
      columns.emplace_back(manifest.tensors()[t].columns);
      for (std::uint32_t c = 0; c < columns[t].size(); ++c) order.emplace_back(t, c);
    }
    std::shuffle(order.begin(), order.end(), random);
    std::span<std::byte> rest;
    for (const auto& [t, c] : order) {
      const std::uint64_t size = manifest.tensors()[t].bytes(), gap = random() % 64 * 16;
      if (rest.size() < gap + size) {
        // A GPU's are mapped piece by piece, so that a column may lie in several.
        const std::uint64_t room = 3 * size + 1024;
        blocks.push_back(on_gpu ? *device.allocate_mapped(room, 2 * MiB) : *device.allocate(room));
        rest = blocks.back().bytes;
        EXPECT_TRUE(access.write(rest.data(), Bytes(rest.size(), kOthers)));
      }
      columns[t][c] = rest.subspan(gap, size);
      rest = rest.subspan(std::min(rest.size(), round_up(gap + size, 16)));
    }
  }
  // What lies between the columns is what it was.
  void check(device::Access& access) const {
    for (const auto& block : blocks) {
      Bytes bytes(block.bytes.size());
      EXPECT_TRUE(access.read(block.bytes, bytes.data()));
      for (const auto& tensor : columns)
        for (const auto column : tensor)
          if (column.data() >= block.bytes.data() && column.data() < block.bytes.data() + block.bytes.size())
            std::fill_n(bytes.begin() + (column.data() - block.bytes.data()), column.size(), kOthers);
      EXPECT_TRUE(std::all_of(bytes.begin(), bytes.end(), [](std::byte byte) { return byte == kOthers; }));
    }
  }
};

// A source reads its state while the trainer writes it, and then looks at the slices' versions. In a job they are two
// processes; here the software driver is told, for TSan's sake.
void expect_reads_while_written(std::span<std::byte> column) {
  static const auto tell = reinterpret_cast<void (*)(const void*, std::size_t)>(
      ::dlsym(::dlopen(device::cuda_library().c_str(), RTLD_NOW), "fake_cuda_seqlocked"));
  if (tell != nullptr) tell(column.data(), column.size());
}

// A replica of one rank: trainer, shared memory, daemon service.
struct Replica {
  ReplicaId id;
  std::unique_ptr<transport::Engine> engine;
  transport::Engine* on_fabric = nullptr;  // the engine that the fabric knows
  std::unique_ptr<device::Access> access;
  transport::Address address;
  std::optional<Scattered> scattered;
  std::unique_ptr<local::Owner> owner;
  std::unique_ptr<GradientLog> gradient_log;
  std::unique_ptr<Service> service;
  bool contributes = true;
  bool caught_up = false;
  std::uint64_t trained_updates = 0;

  // The gradient of a step is a function of step and element, as if it came out of an all-reduce.
  static float gradient(std::uint32_t tensor, std::uint64_t i, std::uint64_t step) {
    return static_cast<float>((i * 31 + tensor * 7 + step * 13) % 101) - 50.0f;
  }
  void update(Step step) {
    std::vector<std::vector<float>> gradients;
    for (std::uint32_t t = 0; t < owner->manifest().tensors().size(); ++t) {
      gradients.emplace_back(owner->manifest().tensors()[t].count);
      for (std::uint64_t i = 0; i < gradients[t].size(); ++i) gradients[t][i] = gradient(t, i, step.value);
    }
    std::vector<device::Memory> of_device;
    const auto gradient_of = [&](std::uint32_t t, std::uint64_t first, std::uint64_t count) {
      const BytesView here = std::as_bytes(std::span(gradients[t]).subspan(first, count));
      if (on_host()) return here;
      of_device.push_back(*owner->device()->allocate(here.size()));
      EXPECT_TRUE(access->write(of_device.back().bytes.data(), here));
      return BytesView(of_device.back().bytes);
    };
    const auto updates = gradient_log->begin(step, contributes, 1, gradient_of);
    ASSERT_TRUE(updates);
    for (const auto& update : *updates) {
      ++trained_updates;
      const auto& tensor = owner->manifest().tensors()[update.tensor];
      std::vector<float> copied;
      const float* g = reinterpret_cast<const float*>(update.gradient.data());
      if (!on_host()) {
        copied.resize(update.count);
        ASSERT_TRUE(access->read(update.gradient, std::as_writable_bytes(std::span(copied)).data()));
        g = copied.data();
      }
      for (std::uint32_t column = 0; column < tensor.columns; ++column)
        change(owner->column(update.tensor, column).subspan(update.first * 4, update.count * 4), [&](float* values) {
          for (std::uint64_t i = 0; i < update.count; ++i)
            values[i] = values[i] * 0.9f +
                        g[i] * (0.1f + 0.01f * static_cast<float>(column)) / static_cast<float>(update.step.value);
        });
    }
    gradient_log->end(step, contributes);
  }
  bool on_host() const { return owner->device()->kind() == device::MemoryKind::host; }
  // Lets the CPU change floats of the state, wherever they are.
  template <typename How>
  void change(std::span<std::byte> place, How how) {
    if (on_host()) return how(reinterpret_cast<float*>(place.data()));
    std::vector<float> values(place.size() / 4);
    EXPECT_TRUE(access->read(place, std::as_writable_bytes(std::span(values)).data()));
    how(values.data());
    EXPECT_TRUE(access->write(place.data(), std::as_bytes(std::span(values))));
  }
  template <typename What>
  void for_columns(What what) const {
    for (std::uint32_t t = 0; t < owner->manifest().tensors().size(); ++t)
      for (std::uint32_t c = 0; c < owner->manifest().tensors()[t].columns; ++c) what(t, c, owner->column(t, c));
  }
  Bytes state() const {
    Bytes bytes(owner->manifest().bytes());
    std::byte* to = bytes.data();
    for_columns([&](auto, auto, std::span<std::byte> column) {
      EXPECT_TRUE(access->read(column, to));
      to += column.size();
    });
    return bytes;
  }
};

struct Cluster {
  VirtualClock clock;
  transport::sim::Fabric fabric;
  std::vector<std::unique_ptr<Replica>> replicas;
  std::mt19937_64 random;
  std::uint64_t step = 0;
  bool elementwise, smaller = false;
  Compression compression = Compression::never;
  double limit = 0;
  std::uint64_t budget = 64 * MiB;

  std::shared_ptr<device::Device> device;  // all states are in its memory
  Memory memory;
  bool on_gpu = memory.on_gpu;

  explicit Cluster(std::uint64_t seed, bool e = true, Memory m = {})
      : fabric({.seed = seed}, clock),
        random(seed),
        elementwise(e),
        device(m.on_gpu ? device::test_gpu() : device::make_host()),
        memory(m) {
    if (on_gpu) spdlog::set_level(spdlog::level::err);  // each engine says that it stages
  }

  Replica& add(bool contributes, std::uint64_t own_budget = 64 * MiB) {
    auto replica = std::make_unique<Replica>();
    replica->id = ReplicaId(static_cast<std::uint32_t>(replicas.size()));
    replica->engine = fabric.make_engine();
    replica->on_fabric = replica->engine.get();
    if (on_gpu) replica->engine = *transport::staged::make_engine(std::move(replica->engine), device, {});
    replica->access = *device->make_access();
    replica->address = *replica->engine->listen({"sim"});
    const auto model = small_model(elementwise, on_gpu || smaller);
    std::vector<local::Owner::Own> own;
    if (memory.scattered) own = replica->scattered.emplace(model, *device, *replica->access, random()).columns;
    replica->owner = std::make_unique<local::Owner>(*local::Owner::make(model, device, own));
    replica->gradient_log = *GradientLog::make(*replica->owner, own_budget);
    replica->service = std::make_unique<Service>(
        *replica->engine, 5, Service::Options{.compression = compression, .limit_bytes_per_second = limit}, clock);
    replica->contributes = contributes;
    replica->owner->set_version(step);
    replica->for_columns([&](std::uint32_t t, std::uint32_t c, std::span<std::byte> column) {
      if (on_gpu) expect_reads_while_written(column);
      std::vector<float> floats(column.size() / 4);
      for (std::size_t i = 0; i < floats.size(); ++i)
        floats[i] = contributes ? static_cast<float>((i + t * 300 + c * 100) % 1000) : -1.0f;
      EXPECT_TRUE(replica->access->write(column.data(), std::as_bytes(std::span(floats))));
    });
    auto view = local::View::of(*replica->owner);
    EXPECT_TRUE(replica->service->add_rank({replica->id, RankId(0)}, replica->id.value + 1, std::move(*view)));
    replicas.push_back(std::move(replica));
    return *replicas.back();
  }
  void catch_up(Replica& joiner) {
    std::set<SourceAddress> sources;
    for (auto& r : replicas)
      if (r && r->contributes) {
        sources.insert({r->id, Incarnation(1), r->address});
        r->service->serve({r->id, RankId(0)}, Incarnation(1));
      }
    joiner.service->catch_up({joiner.id, RankId(0)}, sources, Step(step), clock.now());
  }
  void pump(int events) {
    for (int i = 0; i < events; ++i) {
      fabric.step();
      clock.advance(std::chrono::microseconds(1));
      for (auto& r : replicas)
        if (r)
          for (const auto& completed : r->service->poll(clock.now())) r->caught_up |= completed.key.replica == r->id;
    }
  }
  // One training step of everyone, with the stream at work in between, in an order drawn from the seed.
  void train(int events) {
    ++step;
    std::vector<Replica*> order;
    for (auto& r : replicas)
      if (r) order.push_back(r.get());
    std::shuffle(order.begin(), order.end(), random);
    for (auto* r : order) {
      pump(events);
      r->update(Step(step));
    }
  }
  bool same_bits(const Replica& a, const Replica& b) const {
    for (const auto* replica : {&a, &b})
      if (replica->scattered) replica->scattered->check(*replica->access);
    return a.state() == b.state();
  }
  // Trains until the joiner has caught up, for so many steps at most; a GPU's copies take real time.
  void train_until_caught_up(const Replica& joiner, int steps, int events) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    for (int i = 0; !joiner.caught_up && (on_gpu ? std::chrono::steady_clock::now() < deadline : i < steps); ++i)
      train(events);
  }
};

struct CatchUp : testing::TestWithParam<Memory> {
  Memory memory = GetParam();
  bool on_gpu = memory.on_gpu;
  std::uint64_t seeds() const { return on_gpu ? (kSlow ? 1 : 2) : kSeeds; }
};
INSTANTIATE_TEST_SUITE_P(Memory, CatchUp,
                         testing::Values(Memory{}, Memory{.on_gpu = true}, Memory{.scattered = true},
                                         Memory{.on_gpu = true, .scattered = true}),
                         [](const auto& i) {
                           return std::string(i.param.on_gpu ? "gpu" : "host") +
                                  (i.param.scattered ? "_scattered" : "");
                         });

TEST_P(CatchUp, AJoinerEndsWithTheSameBitsWhileEveryoneTrainsOn) {
  for (std::uint64_t seed = 1; seed <= seeds(); ++seed) {
    SCOPED_TRACE(seed);
    Cluster cluster(seed, seed % 2 == 0, memory);
    cluster.add(true), cluster.add(true);
    for (int i = 0; i < 3; ++i) cluster.train(1);
    Replica& joiner = cluster.add(false);
    cluster.catch_up(joiner);
    cluster.train_until_caught_up(joiner, 200, static_cast<int>(2 + seed));
    ASSERT_TRUE(joiner.caught_up);
    EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
    joiner.contributes = true;
    joiner.service->finish({joiner.id, RankId(0)});
    cluster.train(5);
    EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
    const auto progress = cluster.replicas[0]->service->bytes_served() + cluster.replicas[1]->service->bytes_served();
    EXPECT_GE(progress, joiner.owner->manifest().bytes());
  }
}

// Of fewer slices than may be under way from one source. It has none left when the second one is connected, unless it
// leaves that one its share.
TEST(CatchUpService, ASmallStateComesFromAllSources) {
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE(seed);
    Cluster cluster(seed);
    cluster.smaller = true;
    Replica &first = cluster.add(true), &second = cluster.add(true);
    cluster.train(1);
    Replica& joiner = cluster.add(false);
    ASSERT_LE(joiner.owner->manifest().slices().size(), 16u) << "the window";
    cluster.catch_up(joiner);
    cluster.train_until_caught_up(joiner, 200, 50);
    ASSERT_TRUE(joiner.caught_up);
    EXPECT_GT(first.service->bytes_served(), 0u);
    EXPECT_GT(second.service->bytes_served(), 0u);
    EXPECT_EQ(joiner.service->progress({joiner.id, RankId(0)}, cluster.clock.now())->sources_used, 2u);
  }
}

TEST_P(CatchUp, ASourceMayDieAtAnyMoment) {
  for (std::uint64_t seed = 1; seed <= seeds(); ++seed) {
    SCOPED_TRACE(seed);
    Cluster cluster(seed, true, memory);
    cluster.add(true), cluster.add(true);
    cluster.train(1);
    Replica& joiner = cluster.add(false);
    cluster.catch_up(joiner);
    cluster.train(static_cast<int>(seed * 3));
    cluster.fabric.kill(*cluster.replicas[1]->on_fabric);
    cluster.replicas[1]->service.reset();
    cluster.replicas[1].reset();
    cluster.train(4);
    cluster.catch_up(joiner);  // the next plan is without it
    cluster.train_until_caught_up(joiner, 300, 4);
    ASSERT_TRUE(joiner.caught_up);
    EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
  }
}

TEST(Arrived, DigestsAreKnownAtTheVersionThatCameAlone) {
  Arrived arrived;
  arrived.put(4, 7, {1, 2});
  ASSERT_NE(arrived.at(4, 7), nullptr);
  EXPECT_EQ(*arrived.at(4, 7), (std::vector<std::uint64_t>{1, 2}));
  EXPECT_EQ(arrived.at(4, 8), nullptr) << "an update has changed it";
  EXPECT_EQ(arrived.at(5, 7), nullptr);
  arrived.forget(4);
  EXPECT_EQ(arrived.at(4, 7), nullptr);
}

// A landing that is reported late, or was of an earlier fetch, tells nothing about the bytes that are there now.
TEST(Landed, ADigestFitsTheRoundOfWritesThatItIsOfAndNoOther) {
  Landed landed;
  const Generation first{ReplicaId(1), 7}, second{ReplicaId(1), 8}, other{ReplicaId(2), 8};
  landed.add(first, 3, 0, 100);
  landed.add(first, 3, 1, 101);
  EXPECT_EQ(landed.take(first, 3, 2), combine_digests(combine_digests(0, 100), 101));
  EXPECT_FALSE(landed.take(first, 3, 2)) << "it is given out once";
  landed.add(first, 3, 1, 101);  // reported late
  landed.add(second, 3, 0, 200);
  EXPECT_FALSE(landed.take(second, 3, 2)) << "of one column nobody knows";
  landed.add(second, 3, 0, 200);
  landed.add(second, 3, 1, 201);
  EXPECT_FALSE(landed.take(other, 3, 2));
  landed.add(second, 3, 0, 200);
  landed.add(second, 3, 1, 201);
  landed.forget(ReplicaId(1));
  EXPECT_FALSE(landed.take(second, 3, 2)) << "its next connection counts generations anew";
}

// A step has been committed that the source's trainer has not applied yet, and the joiner starts where the source still
// is: what it could have at once lacks that step, which it has no gradients of.
TEST(CatchUpService, NothingIsTakenThatLacksAStepFromBeforeTheJoiner) {
  Cluster cluster(7);
  cluster.add(true);
  Replica& joiner = cluster.add(false);
  cluster.step = 1;
  cluster.catch_up(joiner);
  cluster.pump(20000);
  EXPECT_FALSE(joiner.caught_up);
  cluster.replicas[0]->update(Step(1));
  cluster.train_until_caught_up(joiner, 200, 20);
  ASSERT_TRUE(joiner.caught_up);
  EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
}

// Found by the simulator: the joiner may be the last that has the state by then, and nobody is there to verify it with.
TEST(CatchUpService, ThatAStateIsCompleteOutlivesTheDaemonThatVerifiedIt) {
  Cluster cluster(7);
  cluster.add(true);
  cluster.train(1);
  Replica& joiner = cluster.add(false);
  cluster.catch_up(joiner);
  cluster.train_until_caught_up(joiner, 200, 20);
  ASSERT_TRUE(joiner.caught_up);
  cluster.train(1);
  joiner.caught_up = false;
  const auto restart = [&] {
    joiner.service = std::make_unique<Service>(*joiner.engine, 5, Service::Options{}, cluster.clock);
    const catchup::RankKey key{joiner.id, RankId(0)};
    EXPECT_TRUE(joiner.service->add_rank(key, 2, *local::View::of(*joiner.owner)));
    joiner.service->catch_up(key, {}, Step(cluster.step), cluster.clock.now());
    cluster.pump(100);
  };
  restart();
  EXPECT_TRUE(joiner.caught_up);
  // But not where the trainer has given up a part of it since.
  joiner.caught_up = false;
  joiner.owner->page().slice_statuses()[0].store(local::SliceStatus{local::SliceState::abandoned, 0}.packed());
  restart();
  EXPECT_FALSE(joiner.caught_up);
}

// Its checkpoint is from before the job was rolled back: no source will have so late a version for long.
TEST(CatchUpService, AJoinerThatComesWithALaterStepThanAnyIsNotKeptWaitingForThatStep) {
  Cluster cluster(7);
  cluster.add(true), cluster.add(true);
  cluster.train(1);
  Replica& joiner = cluster.add(false);
  joiner.owner->set_version(1000);
  cluster.catch_up(joiner);
  cluster.train_until_caught_up(joiner, 200, 20);
  ASSERT_TRUE(joiner.caught_up);
  EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
}

// It refuses whenever it is asked: the joiner compares itself with the others alone, but not before five silences.
TEST(CatchUpService, ASourceThatCanNotBeReachedIsNotWaitedForForever) {
  Cluster cluster(7);
  cluster.add(true), cluster.add(true);
  cluster.train(1);
  Replica& joiner = cluster.add(false);
  cluster.catch_up(joiner);
  cluster.replicas[1]->service->serve({ReplicaId(1), RankId(0)}, std::nullopt);
  const TimePoint began = cluster.clock.now();
  while (!joiner.caught_up && cluster.clock.now() - began < std::chrono::seconds(20)) {
    cluster.clock.advance(std::chrono::milliseconds(100));
    cluster.train(20);
  }
  ASSERT_TRUE(joiner.caught_up);
  const Duration silence = Service::Options{}.silence;
  EXPECT_GE(cluster.clock.now() - began, 5 * silence);
  EXPECT_LE(cluster.clock.now() - began, 6 * silence);
  EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
}

// Flips a bit of the joiner's first slice when it has arrived; false: it was verified before anybody could look, as it
// may be on a fast GPU.
bool flip_when_arrived(Cluster& cluster, Replica& joiner) {
  bool flipped = false;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (int i = 0; (cluster.on_gpu ? std::chrono::steady_clock::now() < deadline : i < 5000) && !joiner.caught_up; ++i) {
    cluster.pump(1);
    if (i % 20 == 19) cluster.train(0);
    const auto status = local::SliceStatus::unpack(joiner.owner->page().slice_statuses()[0].load());
    if (flipped || status.state != local::SliceState::arrived) continue;
    std::byte byte{};
    EXPECT_TRUE(joiner.access->read(joiner.owner->column(0, 0).subspan(1000, 1), &byte));
    byte ^= std::byte{4};
    EXPECT_TRUE(joiner.access->write(joiner.owner->column(0, 0).data() + 1000, {&byte, 1}));
    flipped = true;
  }
  return flipped;
}

TEST_P(CatchUp, AFlippedBitIsFoundByVerificationAndFetchedAgain) {
  bool flipped = false;
  for (std::uint64_t seed = 3; !flipped; ++seed) {
    SCOPED_TRACE(seed);
    ASSERT_LT(seed, on_gpu ? 20u : 4u);
    Cluster cluster(seed, true, memory);
    cluster.add(true), cluster.add(true);
    cluster.train(1);
    Replica& joiner = cluster.add(false);
    cluster.catch_up(joiner);
    flipped = flip_when_arrived(cluster, joiner);
    ASSERT_TRUE(joiner.caught_up);
    EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
    if (flipped) EXPECT_GE(joiner.service->progress({joiner.id, RankId(0)}, cluster.clock.now())->refetched, 1u);
  }
}

TEST_P(CatchUp, SourcesThatDifferAreReportedAndNotTrustedBeforeTheOneThatIsWrongHasGone) {
  for (const std::uint32_t wrong : {0u, 1u}) {
    SCOPED_TRACE(wrong);
    Cluster cluster(6 + wrong, true, memory);
    cluster.add(true), cluster.add(true);
    cluster.train(1);
    Replica& drifted = *cluster.replicas[wrong];
    const float other = 0.25f;  // in tensor "b", moment 1
    ASSERT_TRUE(drifted.access->write(drifted.owner->column(1, 1).data() + 4000, bytes_of(other)));
    Replica& joiner = cluster.add(false);
    cluster.catch_up(joiner);
    std::vector<std::pair<RankKey, Drift>> drifts;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    const auto go_on = [&](int i) { return on_gpu ? std::chrono::steady_clock::now() < deadline : i < 400; };
    for (int i = 0; go_on(i) && drifts.empty(); ++i) {
      cluster.train(6);
      drifts = joiner.service->take_drifts();
    }
    ASSERT_EQ(drifts.size(), 1u);
    const Drift& drift = drifts[0].second;
    EXPECT_EQ(drift.tensor, "b");
    EXPECT_LE(drift.first, 1000u);
    EXPECT_GT(drift.first + drift.count, 1000u);
    ASSERT_EQ(drift.digests.size(), 2u);
    EXPECT_NE(drift.digests[0].second, drift.digests[1].second);
    EXPECT_LT(drift.offset, drift.total);
    const auto refetched = joiner.service->progress({joiner.id, RankId(0)}, cluster.clock.now())->refetched;
    for (int i = 0; i < (on_gpu || kSlow ? 20 : 100); ++i) cluster.train(6);
    EXPECT_FALSE(joiner.caught_up) << "its sources differ";
    EXPECT_EQ(joiner.service->progress({joiner.id, RankId(0)}, cluster.clock.now())->refetched, refetched)
        << "fetched again, it would fit one of them";
    drifted.contributes = false;
    cluster.catch_up(joiner);
    cluster.train_until_caught_up(joiner, 400, 6);
    ASSERT_TRUE(joiner.caught_up);
    EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[1 - wrong]));
  }
}

TEST_P(CatchUp, KeptGradientsStayWithinTheirBudgetAndItStillArrives) {
  Cluster cluster(4, true, memory);
  cluster.add(true);
  cluster.train(1);
  constexpr std::uint64_t budget = 3 * MiB;
  Replica& joiner = cluster.add(false, budget);
  cluster.catch_up(joiner);
  std::uint64_t most = 0;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (int i = 0; (on_gpu ? std::chrono::steady_clock::now() < deadline : i < 400) && !joiner.caught_up; ++i) {
    cluster.train(8);
    most = std::max(most, joiner.gradient_log->bytes());
  }
  ASSERT_TRUE(joiner.caught_up);
  EXPECT_LE(most, budget);
  EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
}

TEST(CatchUpService, ABudgetForHardlyMoreThanOneSliceIsEnough) {
  Cluster cluster(7);
  cluster.add(true);
  cluster.train(1);
  const auto& manifest = cluster.replicas[0]->owner->manifest();
  std::uint64_t largest = 0;
  for (const auto& slice : manifest.slices()) largest = std::max(largest, slice.range.count * 4);
  Replica& joiner = cluster.add(false, 2 * largest);
  cluster.catch_up(joiner);
  std::uint64_t most = 0;
  for (int i = 0; i < 3000 && !joiner.caught_up; ++i) {
    cluster.train(6);
    most = std::max(most, joiner.gradient_log->bytes());
  }
  ASSERT_TRUE(joiner.caught_up);
  EXPECT_LE(most, 2 * largest);
  EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
}

TEST_P(CatchUp, CodedSlicesArriveWithTheSameBits) {
  for (std::uint64_t seed = 1; seed <= seeds(); ++seed) {
    SCOPED_TRACE(seed);
    Cluster cluster(seed, seed % 2 == 0, memory);
    cluster.compression = Compression::always;
    cluster.add(true), cluster.add(true);
    cluster.train(1);
    Replica& joiner = cluster.add(false);
    cluster.catch_up(joiner);
    cluster.train_until_caught_up(joiner, 200, static_cast<int>(2 + seed));
    ASSERT_TRUE(joiner.caught_up);
    EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
    const auto progress = *joiner.service->progress({joiner.id, RankId(0)}, cluster.clock.now());
    // How well it codes depends on how long it was trained before it came.
    EXPECT_LT(progress.wire_bytes, progress.bytes / 20 * 19) << "little was coded";
  }
}

// Found by the simulator: a trainer that was just started again was taken for the contributor that it had been, and its
// initial state was fetched and even verified.
TEST(CatchUpService, OnlyTheIncarnationThatContributesIsServedFrom) {
  Cluster cluster(5);
  Replica& source = cluster.add(true);
  Replica& joiner = cluster.add(false);
  cluster.train(1);
  const RankKey key{source.id, RankId(0)};
  cluster.catch_up(joiner);
  source.service->serve(key, Incarnation(2));  // it was started again meanwhile
  for (int i = 0; i < 50; ++i) cluster.train(2);
  EXPECT_FALSE(joiner.caught_up);
  EXPECT_EQ(joiner.service->progress({joiner.id, RankId(0)}, cluster.clock.now())->bytes, 0u);
  source.service->serve(key, Incarnation(1));  // the joiner has gone on asking
  for (int i = 0; i < 500 && !joiner.caught_up; ++i) {
    cluster.clock.advance(std::chrono::milliseconds(1));
    cluster.train(20);
  }
  EXPECT_TRUE(joiner.caught_up);
  EXPECT_TRUE(cluster.same_bits(joiner, source));
}

TEST(CatchUpService, ASourceThatGoesOnRefusingIsLoggedSeldom) {
  const auto level = spdlog::get_level();
  spdlog::set_level(spdlog::level::info);
  Cluster cluster(5);
  Replica& source = cluster.add(true);
  Replica& joiner = cluster.add(false);
  cluster.catch_up(joiner);
  source.service->serve({source.id, RankId(0)}, Incarnation(2));
  const auto lines_of = [&](std::chrono::seconds time) {
    testing::internal::CaptureStdout();
    for (const TimePoint begun = cluster.clock.now(); cluster.clock.now() - begun < time;) {
      cluster.clock.advance(std::chrono::milliseconds(20));
      cluster.pump(10);
    }
    std::istringstream said(testing::internal::GetCapturedStdout());
    std::vector<std::string> lines;
    for (std::string line; std::getline(said, line);)
      if (line.find("replica 0 is out") != std::string::npos) lines.push_back(line);
    return lines;
  };
  EXPECT_EQ(lines_of(std::chrono::seconds(9)).size(), 1u);
  const auto later = lines_of(std::chrono::seconds(12));
  ASSERT_FALSE(later.empty());
  EXPECT_LE(later.size(), 2u);
  EXPECT_NE(later[0].find("times more since it was said last"), std::string::npos) << later[0];
  spdlog::set_level(level);
}

TEST(CatchUpService, TheStreamKeepsToItsLimit) {
  Cluster cluster(8);
  cluster.limit = 1e9;
  cluster.add(true);
  Replica& joiner = cluster.add(false);
  cluster.catch_up(joiner);
  const TimePoint start = cluster.clock.now();
  for (int i = 0; i < 2000 && !joiner.caught_up; ++i) {
    cluster.pump(20);
    cluster.clock.advance(std::chrono::microseconds(100));
    cluster.train(0);
  }
  ASSERT_TRUE(joiner.caught_up);
  const double took = seconds(cluster.clock.now() - start);
  const auto bytes = static_cast<double>(joiner.owner->manifest().bytes());
  EXPECT_LE(bytes, 1e9 * (took + 0.05) + static_cast<double>(local::kPartBytes));
  EXPECT_GE(bytes, 1e9 * took * 0.3);
}

TEST(Coding, IsUsedOnlyWhereItShortensTheTransfer) {
  const auto decide = [](double link, double ratio, double coder, double limit = 0) {
    CodingDecision decision(Compression::when_it_pays, limit);
    TimePoint now{};
    decision.on_posted(64 * MiB, now);
    now += std::chrono::duration_cast<Duration>(std::chrono::duration<double>(64.0 * MiB / link));
    decision.on_completed(64 * MiB, now);
    if (!decision.wants_sample()) return false;
    decision.on_coded(1 * MiB, static_cast<std::uint64_t>(ratio * MiB),
                      std::chrono::duration_cast<Duration>(std::chrono::duration<double>(1.0 * MiB / coder)));
    return decision.on();
  };
  EXPECT_TRUE(decide(100e6, 0.6, 500e6));
  EXPECT_FALSE(decide(100e6, 0.95, 500e6)) << "it hardly shrinks";
  EXPECT_FALSE(decide(1e9, 0.6, 500e6)) << "the link is faster than the coder";
  EXPECT_FALSE(decide(20e9, 0.01, 500e6)) << "not even tried";
  EXPECT_TRUE(decide(20e9, 0.6, 500e6, 100e6)) << "the stream may use but a little of the link";
}

TEST(Coding, DamagedOrFalseBytesAreAnErrorAndStayInside) {
  Coder coder;
  Bytes plain(100000), coded(100000), out(100000 + 16, std::byte{7});
  for (std::size_t i = 0; i < plain.size(); ++i) plain[i] = static_cast<std::byte>(i / 50);
  const auto length = coder.encode(plain, coded);
  ASSERT_TRUE(length);
  coded.resize(*length);
  const std::span<std::byte> place(out.data(), 100000);
  ASSERT_TRUE(coder.decode(coded, place));
  EXPECT_TRUE(std::equal(plain.begin(), plain.end(), out.begin()));
  EXPECT_FALSE(coder.decode(coded, place.first(99999)));
  EXPECT_FALSE(coder.decode(BytesView(coded).first(*length / 2), place));
  EXPECT_FALSE(coder.decode(BytesView(plain).first(1000), place));
  EXPECT_EQ(out[100000], std::byte{7});
  std::mt19937 random(1);
  Bytes noise(100000);
  for (auto& byte : noise) byte = static_cast<std::byte>(random());
  EXPECT_FALSE(coder.encode(noise, coded)) << "noise does not shrink";
}

TEST(Planner, NarrowsWhereGradientsPileUpAndWidensAgain) {
  Planner planner(1000, 16);
  planner.on_source_up(ReplicaId(0));
  EXPECT_EQ(planner.next(ReplicaId(0)).size(), 16u);
  for (int i = 0; i < 10; ++i) planner.narrow();
  EXPECT_EQ(planner.window(), 1u);
  for (std::uint32_t slice = 0; slice < 200; ++slice) {
    planner.on_arrived(ReplicaId(0), slice);
    planner.next(ReplicaId(0));
  }
  EXPECT_EQ(planner.window(), 16u);
}

TEST(CatchUpService, AStrangerOrAnotherModelIsRefused) {
  Cluster cluster(5);
  Replica& source = cluster.add(true);
  cluster.elementwise = false;  // another manifest
  Replica& joiner = cluster.add(false);
  cluster.catch_up(joiner);
  cluster.pump(200);
  EXPECT_EQ(source.service->bytes_served(), 0u);
  EXPECT_EQ(joiner.service->progress({joiner.id, RankId(0)}, cluster.clock.now())->sources, 0u);
}

TEST(Planner, WhoeverIsUpFirstLeavesTheOthersTheirShare) {
  Planner planner(12, 16);
  planner.on_source_up(ReplicaId(0));
  EXPECT_EQ(planner.next(ReplicaId(0), 3).size(), 4u);
  planner.on_source_up(ReplicaId(1));
  EXPECT_EQ(planner.next(ReplicaId(1), 3).size(), 4u);
  EXPECT_TRUE(planner.next(ReplicaId(0), 3).empty());
  EXPECT_EQ(planner.next(ReplicaId(0), 2).size(), 2u) << "the third one does not come";
  EXPECT_EQ(planner.next(ReplicaId(1), 2).size(), 2u);
  EXPECT_EQ(Planner(1000, 16).next(ReplicaId(0)).size(), 0u);
  Planner alone(3, 16);
  alone.on_source_up(ReplicaId(0));
  for (std::uint32_t arrived = 0; arrived < 3; ++arrived) {  // nobody else ever comes: it has the last one, too
    EXPECT_EQ(alone.next(ReplicaId(0), 5).size(), 1u);
    EXPECT_TRUE(alone.on_arrived(ReplicaId(0), arrived));
  }
  EXPECT_TRUE(alone.all_arrived());
}

TEST(Planner, AllSlicesAreAskedForOnceAndThoseOfALostSourceAgain) {
  Planner planner(10, 3);
  planner.on_source_up(ReplicaId(0));
  planner.on_source_up(ReplicaId(1));
  EXPECT_EQ(planner.next(ReplicaId(0)), (std::vector<std::uint32_t>{0, 1, 2}));
  EXPECT_EQ(planner.next(ReplicaId(1)), (std::vector<std::uint32_t>{3, 4, 5}));
  EXPECT_TRUE(planner.next(ReplicaId(0)).empty());
  EXPECT_TRUE(planner.on_arrived(ReplicaId(0), 1));
  EXPECT_FALSE(planner.on_arrived(ReplicaId(0), 3)) << "not asked of this source";
  planner.on_source_down(ReplicaId(1));
  EXPECT_EQ(planner.refetched(), 3u);
  std::set<std::uint32_t> rest;
  for (bool more = true; more;) {
    const auto next = planner.next(ReplicaId(0));
    more = !next.empty();
    for (auto slice : next) {
      rest.insert(slice);
      EXPECT_TRUE(planner.on_arrived(ReplicaId(0), slice));
    }
    for (auto slice : {0u, 2u}) planner.on_arrived(ReplicaId(0), slice);
  }
  EXPECT_TRUE(planner.all_arrived());
}

}  // namespace
}  // namespace rejoin::catchup
