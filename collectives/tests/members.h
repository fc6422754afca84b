// Members of a group in one process, over the simulated fabric; each with the host's memory, or with a GPU's as well.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <vector>

#include "base/log.h"
#include "collectives/call.h"
#include "device/access.h"
#include "transport/sim/fabric.h"
#include "transport/staged/factory.h"

namespace rejoin::collectives {

using Floats = std::vector<float>;

inline std::span<std::byte> bytes_in(Floats& floats) { return std::as_writable_bytes(std::span(floats)); }

class Members {
 public:
  struct Member {
    std::shared_ptr<device::Reducer> reducer;
    std::vector<device::Memory> scratch;
    std::unique_ptr<transport::Engine> engine;
    transport::Engine* on_fabric = nullptr;  // the engine that the fabric knows
    Handle handle;
    std::unique_ptr<Group> group;
    bool stopped = false;
  };

  explicit Members(std::uint32_t count, std::uint64_t seed = 1, transport::sim::Options options = {},
                   std::shared_ptr<device::Device> gpu = nullptr)
      : device(std::move(gpu)),
        fabric(
            [&] {
              options.seed = seed;
              return options;
            }(),
            clock) {
    clock.advance(std::chrono::hours(1));
    for (std::uint32_t i = 0; i < count; ++i) add();
  }
  ~Members() {
    for (auto& member : all) member.group.reset();
  }

  void add() {
    Member member;
    member.engine = fabric.make_engine();
    member.on_fabric = member.engine.get();
    stage(member, 512);
    member.handle.address = *member.engine->listen({"sim"});
    member.handle.secret = {all.size() + 1, 7};
    member.group = std::make_unique<Group>(*member.engine, member.handle, member.reducer);
    all.push_back(std::move(member));
  }
  void stage(Member& member, std::size_t slot_bytes) {
    if (!device) return;
    spdlog::set_level(spdlog::level::err);  // each engine says that it stages
    member.reducer = *device::Reducer::make(*device, {.blocks = 2, .threads = 64, .external_launcher = true});
    member.engine = *transport::staged::make_engine(
        std::move(member.engine), device, {.slot_bytes = slot_bytes, .slots = 4, .exports = false}, member.reducer);
  }

  struct Pending {
    std::optional<Result<>> result;
    std::function<void()> failed;  // called as soon as it has
  };
  using Work = std::shared_ptr<Pending>;

  // Makes these the members, as ranks in this order.
  std::vector<Work> begin_reconfigure(std::uint64_t number, const std::vector<std::uint32_t>& who,
                                      Duration limit = std::chrono::seconds(10)) {
    std::vector<Handle> handles;
    for (const auto i : who) handles.push_back(all[i].handle);
    std::vector<Work> works;
    for (std::uint32_t rank = 0; rank < who.size(); ++rank) {
      const auto work = works.emplace_back(std::make_shared<Pending>());
      if (!all[who[rank]].stopped && all[who[rank]].group)
        all[who[rank]].group->reconfigure(number, handles, rank, clock.now() + limit,
                                          [work](const Result<>& result) { work->result = result; });
    }
    return works;
  }
  void reconfigure(std::uint64_t number, const std::vector<std::uint32_t>& who) {
    const auto works = begin_reconfigure(number, who);
    ASSERT_TRUE(run(works));
    for (const auto& work : works) ASSERT_TRUE(*work->result) << work->result->error().message;
  }
  void everyone() {
    std::vector<std::uint32_t> who(all.size());
    for (std::uint32_t i = 0; i < who.size(); ++i) who[i] = i;
    reconfigure(1, who);
  }

  // What whoever starts an operation of a GPU's memory does before.
  void prepare_device(Member& member, Operation& operation) {
    ASSERT_TRUE(member.reducer->hold());
    std::ranges::transform(operation.memory, operation.exported.begin(),
                           [&](const auto& memory) { return exported(memory); });
    const auto scratch = operation.plan.scratch;
    const auto large = [&](const device::Memory& one) { return one.bytes.size() >= scratch; };
    while (scratch > 0 && std::ranges::count_if(member.scratch, large) < kAtOnce) {
      member.scratch.push_back(*device->allocate(scratch));
      member.group->give_scratch({member.scratch.back().bytes, exported(member.scratch.back().bytes)});
    }
  }
  std::optional<device::Device::Exported> exported(std::span<std::byte> memory) const {
    if (memory.empty()) return std::nullopt;
    auto made = device->export_dma_buf(memory);
    return made ? std::optional(std::move(*made)) : std::nullopt;
  }
  Work submit(std::uint32_t i, const Call& call, Duration limit = std::chrono::seconds(10),
              std::function<bool()> ready = {}) {
    auto work = std::make_shared<Pending>();
    auto& group = *all[i].group;
    const auto reducer = call.memory == transport::MemoryKind::cuda ? all[i].reducer : nullptr;
    auto operation = prepare(call, group.rank(), group.size());
    if (!operation) {
      work->result = tl::unexpected(operation.error());
      return work;
    }
    if (reducer) prepare_device(all[i], *operation);
    operation->ready = std::move(ready);
    operation->deadline = clock.now() + limit;
    operation->done = [work, reducer](const Result<>& result) {
      if (reducer) reducer->let_go();
      EXPECT_FALSE(work->result) << "an operation ends once";
      work->result = result;
      if (!result && work->failed) work->failed();
    };
    group.submit(std::move(*operation));
    return work;
  }

  void poll() {
    for (auto& member : all)
      if (!member.stopped && member.group) member.group->poll(clock.now());
  }
  // Until all of these have ended; false where nothing more happens for a minute of theirs.
  bool run(const std::vector<Work>& works) {
    const auto limit = clock.now() + std::chrono::minutes(1);
    while (clock.now() < limit) {
      poll();
      if (std::all_of(works.begin(), works.end(), [](const auto& work) { return work->result.has_value(); }))
        return true;
      // What a GPU does takes no time of theirs.
      if (std::ranges::any_of(all, [](const auto& one) { return !one.stopped && one.group && one.group->working(); }))
        fabric.step();
      else if (!fabric.step() || fabric.next_event() > clock.now() + std::chrono::milliseconds(5))
        clock.advance(std::chrono::milliseconds(5));
    }
    return false;
  }
  void run_for(Duration time) {
    for (const auto end = clock.now() + time; clock.now() < end;) {
      poll();
      if (!fabric.step()) clock.advance(std::chrono::milliseconds(1));
    }
  }
  void expect_success(const std::vector<Work>& works) {
    ASSERT_TRUE(run(works)) << "stuck";
    for (const auto& work : works) ASSERT_TRUE(*work->result) << work->result->error().message;
  }

  const std::shared_ptr<device::Device> device;  // none: the host's memory alone
  VirtualClock clock;
  transport::sim::Fabric fabric;
  std::vector<Member> all;
};

// What member m has before.
inline Floats numbers(std::uint32_t m, std::size_t count, std::uint32_t which = 0) {
  Floats all(count);
  for (std::size_t i = 0; i < count; ++i) all[i] = static_cast<float>((i * 7 + m * 13 + which * 5) % 97) - 40.0f;
  return all;
}

}  // namespace rejoin::collectives
