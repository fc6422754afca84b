// The stream end to end in one process: trainers that update every step, their daemons' services on the simulated
// fabric, a joiner that starts from nothing.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <vector>

#include "base/log.h"
#include "base/sanitized.h"
#include "catchup/gradient_log.h"
#include "catchup/service.h"
#include "device/tests/library.h"
#include "transport/sim/fabric.h"
#include "transport/staged/factory.h"

namespace rejoin::catchup {

inline constexpr std::uint64_t kSeeds = kSanitized ? 2 : 4;

inline local::Manifest small_model(bool elementwise, bool on_gpu) {
  const std::uint64_t less = on_gpu ? 9 : 3;  // a GPU made of software is slower than memory
  return *local::Manifest::make({{.name = "a", .count = 900'001 / less, .columns = 3, .elementwise = elementwise},
                                 {.name = "b", .count = 700'000 / less, .columns = 3},
                                 {.name = "c", .count = 5, .columns = 1}});
}

// Each tensor is a slice.
inline local::Manifest model_of(std::uint32_t tensors) {
  std::vector<local::Tensor> all;
  for (std::uint32_t t = 0; t < tensors; ++t)
    all.push_back({.name = fmt::format("t{}", t), .count = 1000 + t % 7, .columns = 3});
  return *local::Manifest::make(std::move(all));
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
      const std::uint64_t size = manifest.tensors()[t].bytes(c), gap = random() % 64 * 16;
      if (rest.size() < gap + size) {
        // A GPU's are mapped block by block, so that a column may lie in several.
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
inline void expect_reads_while_written(std::span<std::byte> column) {
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
  bool daemon_stopped = false, trainer_stopped = false;  // SIGSTOP
  std::uint64_t trained_updates = 0;

  // The gradient of a step is a function of step and element, as if it came out of an all-reduce:
  // (31 × element + 7 × tensor + 13 × step) mod 101 - 50. The remainder is carried along, since a division for each
  // element would be most of what these tests cost.
  static std::vector<float> gradient(std::uint32_t tensor, std::uint64_t count, std::uint64_t step) {
    std::vector<float> values(count);
    auto remainder = static_cast<std::int32_t>((tensor * 7 + step * 13) % 101);
    for (auto& value : values) {
      value = static_cast<float>(remainder - 50);
      remainder += 31;
      if (remainder >= 101) remainder -= 101;
    }
    return values;
  }
  void update(Step step) {
    begin_update(step);
    end_update();
  }
  // What its optimizer is given, until the update ends.
  Step updates_to;
  std::vector<std::vector<float>> gradients;
  std::vector<device::Memory> of_device;
  std::vector<Update> updates;

  // A state is mapped memory, of which ASan does not know what is whose: here it would only take its time.
  __attribute__((no_sanitize("address"))) static void decay_and_add(float* values, const float* gradient, float rate,
                                                                    std::uint64_t count) {
    for (std::uint64_t i = 0; i < count; ++i) values[i] = values[i] * 0.9f + gradient[i] * rate;
  }
  void begin_update(Step step) {
    updates_to = step;
    gradients.clear();
    of_device.clear();
    for (std::uint32_t t = 0; t < owner->manifest().tensors().size(); ++t)
      gradients.push_back(gradient(t, owner->manifest().tensors()[t].count, step.value));
    const auto gradient_of = [&](std::uint32_t t, std::uint64_t first, std::uint64_t count) {
      const std::uint64_t size = size_of(owner->manifest().tensors()[t].type_of_gradient());  // at most a float's
      const BytesView here = std::as_bytes(std::span(gradients[t])).subspan(first * size, count * size);
      if (on_host()) return here;
      of_device.push_back(*owner->device()->allocate(here.size()));
      EXPECT_TRUE(access->write(of_device.back().bytes.data(), here));
      return BytesView(of_device.back().bytes);
    };
    auto begun = gradient_log->begin(step, contributes, 1, gradient_of);
    ASSERT_TRUE(begun);
    updates = std::move(*begun);
  }
  void end_update() {
    for (const auto& update : updates) {
      ++trained_updates;
      const auto& tensor = owner->manifest().tensors()[update.tensor];
      Bytes copied;
      BytesView gradient = update.gradient;
      if (!on_host()) {
        copied.resize(gradient.size());
        ASSERT_TRUE(access->read(gradient, copied.data()));
        gradient = copied;
      }
      for (std::uint32_t column = 0; column < tensor.columns; ++column) {
        const std::uint64_t size = size_of(tensor.type_of(column));
        const auto place = owner->column(update.tensor, column).subspan(update.first * size, update.count * size);
        if (tensor.type_of(column) != DataType::float32 || tensor.type_of_gradient() != DataType::float32) {
          change_bytes(place, [&](std::span<std::byte> values) {
            const std::uint64_t of_gradient = gradient.size() / update.count;
            for (std::uint64_t i = 0; i < values.size(); ++i)
              values[i] = static_cast<std::byte>(static_cast<unsigned>(values[i]) * 5 + column + update.step.value +
                                                 static_cast<unsigned>(gradient[i / size * of_gradient]));
          });
          continue;
        }
        const float rate = (0.1f + 0.01f * static_cast<float>(column)) / static_cast<float>(update.step.value);
        const auto* g = reinterpret_cast<const float*>(gradient.data());
        change(place, [g, rate, count = update.count](float* values) { decay_and_add(values, g, rate, count); });
      }
    }
    gradient_log->end(updates_to, contributes);
  }
  local::SliceStatus status(std::uint32_t slice) const {
    return local::SliceStatus::unpack(owner->page().slice_statuses()[slice].load());
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
  template <typename How>
  void change_bytes(std::span<std::byte> place, How how) {
    if (on_host()) return how(place);
    Bytes values(place.size());
    EXPECT_TRUE(access->read(place, values.data()));
    how(values);
    EXPECT_TRUE(access->write(place.data(), values));
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
  std::map<ReplicaId, std::size_t> distances;  // of sources
  std::uint64_t budget = 64 * MiB;

  std::shared_ptr<device::Device> device;  // all states are in its memory
  Memory memory;
  bool on_gpu = memory.on_gpu;
  std::optional<local::Manifest> model;  // otherwise small_model()

  explicit Cluster(std::uint64_t seed, bool e = true, Memory m = {})
      : fabric({.seed = seed, .between_rooms = std::chrono::milliseconds(1)}, clock),
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
    const auto manifest = model.value_or(small_model(elementwise, on_gpu || smaller));
    std::vector<local::Owner::Own> own;
    if (memory.scattered) own = replica->scattered.emplace(manifest, *device, *replica->access, random()).columns;
    replica->owner = std::make_unique<local::Owner>(*local::Owner::make(manifest, device, own));
    replica->gradient_log = *GradientLog::make(*replica->owner, own_budget);
    replica->service =
        std::make_unique<Service>(*replica->engine, transport::Secret::of({5, 0}),
                                  Service::Options{.compression = compression, .limit_bytes_per_second = limit}, clock);
    replica->contributes = contributes;
    replica->owner->set_version(step);
    replica->for_columns([&](std::uint32_t t, std::uint32_t c, std::span<std::byte> column) {
      if (on_gpu) expect_reads_while_written(column);
      std::vector<float> floats(column.size() / 4 + 1);
      for (std::size_t i = 0; i < floats.size(); ++i)
        floats[i] = contributes ? static_cast<float>((i + t * 300 + c * 100) % 1000) : -1.0f;
      EXPECT_TRUE(replica->access->write(column.data(), std::as_bytes(std::span(floats)).first(column.size())));
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
        sources.insert(
            {.replica = r->id, .incarnation = Incarnation(1), .address = r->address, .distance = distances[r->id]});
        r->service->serve({r->id, RankId(0)}, Incarnation(1));
      }
    joiner.service->catch_up({joiner.id, RankId(0)}, sources, Step(step), clock.now());
  }
  // As the plan says: these joiners are there, and pass on to each other what they have.
  void catch_up(const std::vector<Replica*>& joiners) {
    for (std::uint32_t own = 0; own < joiners.size(); ++own) {
      joiners[own]->service->serve({joiners[own]->id, RankId(0)}, Incarnation(1), 0, true);
      std::set<SourceAddress> sources;
      for (auto& r : replicas)
        if (r && r->contributes) {
          sources.insert({r->id, Incarnation(1), r->address});
          r->service->serve({r->id, RankId(0)}, Incarnation(1));
        }
      Chain chain{.fellows = {}, .own = own, .of = static_cast<std::uint32_t>(joiners.size())};
      for (const auto* other : joiners)
        if (other != joiners[own]) chain.fellows.insert({other->id, Incarnation(1), other->address});
      joiners[own]->service->catch_up({joiners[own]->id, RankId(0)}, sources, Step(step), clock.now(), chain);
    }
  }
  void pump(int events) {
    for (int i = 0; i < events; ++i) {
      fabric.step();
      clock.advance(std::chrono::microseconds(1));
      for (auto& r : replicas)
        if (r && !r->daemon_stopped)
          for (const auto& completed : r->service->poll(clock.now())) r->caught_up |= completed.key.replica == r->id;
    }
  }
  // One training step of everyone, with the stream at work in between, in an order drawn from the seed.
  void train(int events) {
    ++step;
    std::vector<Replica*> order;
    for (auto& r : replicas)
      if (r && !r->trainer_stopped) order.push_back(r.get());
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
  std::uint64_t seeds() const { return on_gpu ? (kSanitized ? 1 : 2) : kSeeds; }
};

}  // namespace rejoin::catchup
