// Operations of a GPU's memory, which the host can't touch: the same bits as in the host's, whoever dies meanwhile.
#include <gmock/gmock.h>

#include <thread>

#include "base/sanitized.h"
#include "collectives/tests/members.h"
#include "device/tests/fake_control.h"
#include "device/tests/library.h"
#include "transport/factory.h"
#include "transport/tests/fake_verbs.h"

namespace rejoin::collectives {
namespace {

using namespace std::chrono_literals;
using testing::AllOf, testing::HasSubstr;

constexpr std::size_t kElements[] = {0, 5, 3'000, kSanitized ? 20'003 : 100'003};

// A GPU's memory with a copy in the host's, to compare with.
class Gpu {
 public:
  const std::shared_ptr<device::Device> device = device::test_gpu();

  device::Memory with(const Floats& floats) {
    auto memory = *device->allocate(std::max<std::size_t>(floats.size() * 4, 4));
    memory.bytes = memory.bytes.first(floats.size() * 4);
    write(memory, floats);
    return memory;
  }
  void write(const device::Memory& to, const Floats& floats) {
    if (!floats.empty()) EXPECT_TRUE(access_->write(to.bytes.data(), std::as_bytes(std::span(floats))));
  }
  Floats in(const device::Memory& memory) {
    Floats floats(memory.bytes.size() / 4);
    if (!floats.empty()) EXPECT_TRUE(access_->read(memory.bytes, bytes_in(floats).data()));
    return floats;
  }

 private:
  std::unique_ptr<device::Access> access_ = *device->make_access();
};

// What one member gives to an operation.
struct Buffers {
  std::vector<Floats> inputs, outputs;
};

// With roundings, so that the order of additions shows.
Floats fractions(std::uint32_t m, std::size_t count, std::uint32_t which = 0) {
  Floats all(count);
  for (std::size_t i = 0; i < count; ++i) all[i] = 1.0f / static_cast<float>(1 + (i * 7 + m * 131 + which * 17) % 1009);
  return all;
}

std::vector<Floats> many(std::uint32_t n, std::uint32_t m, std::size_t count) {
  std::vector<Floats> all;
  for (std::uint32_t i = 0; i < n; ++i) all.push_back(fractions(m, count, i));
  return all;
}

// Of every kind of operation, what member m of n gives.
Buffers buffers_of(Collective kind, std::uint32_t m, std::uint32_t n, std::uint32_t root, std::size_t count) {
  const auto own = fractions(m, count);
  const Floats empty(count);
  const std::vector<Floats> all(n, empty);
  switch (kind) {
    case Collective::all_gather: return {{own}, all};
    case Collective::reduce_scatter: return {many(n, m, count), {empty}};
    case Collective::gather: return {{own}, m == root ? all : std::vector<Floats>{}};
    case Collective::scatter: return {m == root ? many(n, m, count) : std::vector<Floats>{}, {empty}};
    case Collective::all_to_all: return {many(n, m, count), all};
    case Collective::barrier: return {};
    default: return {{own}, {}};
  }
}

// What the sums that a member has are as means: a GPU multiplies by a rounded 1 / n, where the host divides.
void scale(Buffers& sums, const Call& call, std::uint32_t m, std::uint32_t n) {
  if (call.kind == Collective::reduce && m != call.root) return;
  for (auto& floats : call.kind == Collective::reduce_scatter ? sums.outputs : sums.inputs)
    for (auto& value : floats) value *= 1.0f / static_cast<float>(n);
}

// The same over any members, the simulated ones or those below.
template <typename Group>
void compare(Group& members, Gpu& gpu, std::uint32_t n, Call call, std::size_t count) {
  SCOPED_TRACE(testing::Message() << to_string(call.kind) << " " << to_string(call.combine) << " of " << count);
  std::vector<Buffers> host;
  std::vector<std::vector<device::Memory>> device(n);
  std::vector<Members::Work> on_host, on_device;
  for (std::uint32_t m = 0; m < n; ++m) host.push_back(buffers_of(call.kind, m, n, call.root, count));
  const bool between_two = call.kind == Collective::send;
  for (std::uint32_t m = 0; m < n; ++m) {
    Call here = call, there = call;
    if (between_two && m > 1) continue;
    if (between_two && m == 1) here.kind = there.kind = Collective::receive;
    if (between_two) here.root = there.root = 1 - m;
    if (call.combine == Combine::mean) here.combine = Combine::sum;
    there.memory = transport::MemoryKind::cuda;
    const auto add = [&](auto of) {
      for (auto& floats : host[m].*of) {
        device[m].push_back(gpu.with(floats));
        (of == &Buffers::inputs ? there.inputs : there.outputs).push_back(device[m].back().bytes);
        (of == &Buffers::inputs ? here.inputs : here.outputs).push_back(bytes_in(floats));
      }
    };
    add(&Buffers::inputs), add(&Buffers::outputs);
    on_device.push_back(members.submit(m, there));
    on_host.push_back(members.submit(m, here));
  }
  members.expect_success(on_device);
  members.expect_success(on_host);
  for (std::uint32_t m = 0; m < n; ++m) {
    if (call.combine == Combine::mean) scale(host[m], call, m, n);
    auto at = device[m].begin();
    for (const auto& list : {host[m].inputs, host[m].outputs})
      for (const auto& floats : list)
        if (at != device[m].end()) ASSERT_EQ(gpu.in(*at++), floats) << "of member " << m;
  }
}

template <typename Group>
void compare_all(Group& members, Gpu& gpu, std::uint32_t n, std::span<const std::size_t> counts) {
  for (const auto count : counts) {
    for (const auto combine : {Combine::sum, Combine::mean})
      for (const auto kind : {Collective::all_reduce, Collective::reduce_scatter, Collective::reduce})
        compare(members, gpu, n, {.kind = kind, .combine = combine, .root = n / 2}, count);
    for (const auto kind : {Collective::broadcast, Collective::all_gather, Collective::gather, Collective::scatter,
                            Collective::all_to_all})
      compare(members, gpu, n, {.kind = kind, .root = n / 2}, count);
    if (n > 1) compare(members, gpu, n, {.kind = Collective::send}, count);
  }
  compare(members, gpu, n, {.kind = Collective::barrier}, 0);
}

struct DeviceGroups : testing::TestWithParam<std::uint32_t> {};
INSTANTIATE_TEST_SUITE_P(Of, DeviceGroups, testing::Values(1, 3), testing::PrintToStringParamName());

TEST_P(DeviceGroups, GiveTheSameBitsAsInTheHostsMemory) {
  const auto n = GetParam();
  Gpu gpu;
  Members members(n, n, {}, gpu.device);
  members.everyone();
  compare_all(members, gpu, n, kElements);
}

TEST(DeviceGroup, AnOperationBeginsWhenItsCallersStreamHasComeToIt) {
  Gpu gpu;
  Members members(2, 1, {}, gpu.device);
  members.everyone();
  const Floats ones(50'000, 1.0f), twos(50'000, 2.0f);
  const device::Memory buffers[] = {gpu.with(ones), gpu.with(twos)}, message[] = {gpu.with(ones), gpu.with(twos)};
  bool has_come = false;
  std::vector<Members::Work> works, messages;
  for (std::uint32_t m = 0; m < 2; ++m) {
    const Call call{
        .kind = Collective::all_reduce, .inputs = {buffers[m].bytes}, .memory = transport::MemoryKind::cuda};
    works.push_back(members.submit(m, call, 10s, [&, m] { return m == 0 || has_come; }));
    messages.push_back(members.submit(m, {.kind = m == 0 ? Collective::send : Collective::receive,
                                          .root = 1 - m,
                                          .inputs = {message[m].bytes},
                                          .memory = transport::MemoryKind::cuda}));
  }
  members.expect_success(messages);
  members.run_for(20ms);
  for (const auto& work : works) EXPECT_FALSE(work->result);
  EXPECT_EQ(gpu.in(buffers[1]), twos);
  gpu.write(buffers[1], Floats(50'000, 5.0f));  // by what is queued before
  has_come = true;
  members.expect_success(works);
  for (const auto& buffer : buffers) EXPECT_EQ(gpu.in(buffer), Floats(50'000, 6.0f));
  EXPECT_EQ(gpu.in(message[1]), ones);

  const auto never = members.submit(
      0, {.kind = Collective::broadcast, .inputs = {buffers[0].bytes}, .memory = transport::MemoryKind::cuda}, 1s,
      [] { return false; });
  ASSERT_TRUE(members.run({never}));
  EXPECT_THAT(never->result->error().message,
              HasSubstr("broadcast of 200000 bytes in a GPU's memory from rank 0 waits for the CUDA stream that it was "
                        "started behind"));
}

// Whoever dies, and whenever: nothing is written into the others' memory once they have heard, and they go on.
TEST(DeviceGroup, OneThatDiesFailsEverythingAndTheOthersGoOnWithoutIt) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    Gpu gpu;
    Members members(3, seed,
                    {.detection = seed % 4 >= 2 ? 100us : 1ms,
                     .spread = seed % 4 >= 2 ? 300us : 0us,
                     .late_writes = seed % 2 == 1,
                     .withdrawal_breaks = seed % 4 >= 2},
                    gpu.device);
    members.everyone();
    const auto victim = static_cast<std::uint32_t>(random() % 3);
    const std::size_t count = seed % 3 == 0 ? 1'000 : 60'000;
    std::vector<device::Memory> buffers;
    for (std::uint32_t m = 0; m < 3; ++m) buffers.push_back(gpu.with(fractions(m, count)));
    const auto all_reduce_of = [](const device::Memory& memory) {
      return Call{.kind = Collective::all_reduce, .inputs = {memory.bytes}, .memory = transport::MemoryKind::cuda};
    };
    std::vector<Members::Work> works;
    Members::Work its;
    std::vector<std::uint32_t> left;
    for (std::uint32_t m = 0; m < 3; ++m) {
      const auto work = members.submit(m, all_reduce_of(buffers[m]));
      if (m == victim) {
        its = work;
        continue;
      }
      work->failed = [&, m] { gpu.write(buffers[m], Floats(count, 3.0f)); };
      works.push_back(work);
      left.push_back(m);
    }
    for (auto steps = random() % 200; steps > 0; --steps) members.poll(), members.fabric.step();
    members.fabric.kill(*members.all[victim].on_fabric);
    members.all[victim].stopped = true;
    ASSERT_TRUE(members.run(works));
    for (const auto& work : works)
      if (!*work->result)
        EXPECT_THAT(work->result->error().message, HasSubstr(fmt::format("rank {0} (sim:{0}) is gone", victim)));
    for (std::size_t i = 0; i < works.size(); ++i)
      if (*works[i]->result) gpu.write(buffers[left[i]], Floats(count, 3.0f));
    members.run_for(5ms);
    members.reconfigure(2, left);
    std::vector<device::Memory> after;
    for (std::uint32_t m = 0; m < 3; ++m) after.push_back(gpu.with(Floats(20'000, static_cast<float>(m + 1))));
    works.clear();
    for (const auto m : left) works.push_back(members.submit(m, all_reduce_of(after[m])));
    members.expect_success(works);
    for (const auto m : left) ASSERT_EQ(gpu.in(after[m]), Floats(20'000, 6.0f - static_cast<float>(victim + 1)));
    for (const auto m : left) ASSERT_EQ(gpu.in(buffers[m]), Floats(count, 3.0f)) << "written after it had failed";
    for (auto& member : members.all) member.group.reset();  // the dead one's kernel leaves: memory is freed next
    EXPECT_TRUE(its->result);
  }
}

TEST(DeviceGroup, WhatCanNotBeIsRefusedByName) {
  Gpu gpu;
  Members members(2, 1, {}, gpu.device);
  members.everyone();
  Floats here(1'000);
  const auto there = gpu.with(here);
  const Call call{.kind = Collective::all_reduce, .inputs = {there.bytes}, .memory = transport::MemoryKind::cuda};
  Call most = call, odd = call;
  most.combine = Combine::maximum;
  EXPECT_THAT(prepare(most, 0, 2).error().message, HasSubstr("is not taken in a GPU's memory"));
  odd.inputs[0] = there.bytes.subspan(2, 40);
  EXPECT_THAT(prepare(odd, 0, 2).error().message, HasSubstr("is not where elements of float32 can be added"));
  // Memory of one kind on all sides.
  for (const bool message : {false, true}) {
    Call one = call, other{.kind = Collective::all_reduce, .inputs = {bytes_in(here)}};
    if (message) one.kind = Collective::send, one.root = 1, other.kind = Collective::receive;
    const auto first = members.submit(0, one), second = members.submit(1, other);
    ASSERT_TRUE(members.run({first, second}));
    for (const auto& work : {first, second}) {
      ASSERT_FALSE(*work->result);
      EXPECT_THAT(work->result->error().message, AllOf(HasSubstr("in a GPU's memory"), HasSubstr("rank 1")));
    }
    members.reconfigure(message ? 3 : 2, {0, 1});
  }
}

constexpr std::size_t kSlot = 64 * KiB;

// Over real transports, all in this thread.
class Real : public Members {
 public:
  Real(const std::string& transport, std::uint32_t count, std::shared_ptr<device::Device> gpu)
      : Members(0, 1, {}, std::move(gpu)) {
    std::vector<Handle> handles;
    for (std::uint32_t m = 0; m < count; ++m) {
      Member member;
      member.engine = *transport::make_engine(transport);
      stage(member, kSlot);
      member.handle.secret = {m + 1, 7};
      member.engine->set_secrets({transport::Secret::of(member.handle.secret)});
      member.handle.address = *member.engine->listen({transport == "shm"   ? ""
                                                      : transport == "tcp" ? "127.0.0.1:0"
                                                                           : "0.0.0.0:0"});
      member.group = std::make_unique<Group>(*member.engine, member.handle, member.reducer);
      all.push_back(std::move(member));
    }
    reconfigure_all(1);
  }
  void reconfigure_all(std::uint64_t number) {
    std::vector<std::uint32_t> who;
    for (std::uint32_t m = 0; m < all.size(); ++m)
      if (all[m].group) who.push_back(m);
    expect_success(begin_reconfigure(number, who));
  }
  bool run(const std::vector<Work>& works) {
    const auto limit = std::chrono::steady_clock::now() + 60s;
    while (std::chrono::steady_clock::now() < limit) {
      poll();
      if (std::ranges::all_of(works, [](const auto& work) { return work->result.has_value(); })) return true;
      device::pause();
    }
    return false;
  }
  void expect_success(const std::vector<Work>& works) {
    ASSERT_TRUE(run(works)) << "stuck";
    for (const auto& work : works) ASSERT_TRUE(*work->result) << work->result->error().message;
  }
};

// Over RDMA devices made of software the GPU has dma-bufs, and orders what a NIC writes.
struct DeviceGroupsOver : testing::TestWithParam<std::string> {
  const bool by_dma_buf = GetParam().starts_with("ibverbs");
  device::fake::Control control{device::cuda_library().c_str()};
  std::uint64_t largest = 0;  // bytes that a device has moved at once

  void SetUp() override {
    if (!by_dma_buf) return;
    if (device::is_real()) GTEST_SKIP() << "SKIPPED: RDMA devices made of software reach no real GPU's memory";
    control.set_options({.ordered = true});
    control.set_dma_buf(true);
    fake_verbs_watch(
        [this](const char*, const void*, const void*, std::uint64_t bytes) { largest = std::max(largest, bytes); });
  }
  void TearDown() override {
    if (IsSkipped()) return;
    if (by_dma_buf) {
      control.set_options({});
      control.set_dma_buf(false);
      fake_verbs_watch({});
    }
    EXPECT_EQ(largest > kSlot, by_dma_buf) << "what is staged goes in fragments of a slot";
  }
};
INSTANTIATE_TEST_SUITE_P(Transports, DeviceGroupsOver, testing::Values("tcp", "shm", "ibverbs:fake0"));

TEST_P(DeviceGroupsOver, GiveTheSameBitsAndGoOnWithoutOne) {
  Gpu gpu;
  Real members(GetParam(), 3, gpu.device);
  constexpr std::size_t counts[] = {10, 5'000, 300'001};
  compare_all(members, gpu, 3, counts);
  std::vector<device::Memory> buffers;
  for (std::uint32_t m = 0; m < 3; ++m) buffers.push_back(gpu.with(Floats(1'000'000, 1.0f)));
  std::vector<Members::Work> works;
  for (std::uint32_t m = 0; m < 3; ++m)
    works.push_back(members.submit(
        m, {.kind = Collective::all_reduce, .inputs = {buffers[m].bytes}, .memory = transport::MemoryKind::cuda}));
  for (int i = 0; i < (by_dma_buf ? 3 : 20); ++i) members.poll();  // a ring of three takes more
  members.all[2].group.reset();
  ASSERT_TRUE(members.run(works));
  for (const auto& work : works) EXPECT_FALSE(*work->result);
  members.reconfigure_all(2);
  const Floats ones(100'000, 1.0f);
  for (std::uint32_t m = 0; m < 2; ++m) gpu.write(buffers[m] = gpu.with(ones), ones);
  works.clear();
  for (std::uint32_t m = 0; m < 2; ++m)
    works.push_back(members.submit(
        m, {.kind = Collective::all_reduce, .inputs = {buffers[m].bytes}, .memory = transport::MemoryKind::cuda}));
  members.expect_success(works);
  for (std::uint32_t m = 0; m < 2; ++m) EXPECT_EQ(gpu.in(buffers[m]), Floats(100'000, 2.0f));
}

}  // namespace
}  // namespace rejoin::collectives
