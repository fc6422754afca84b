// The verbs backend over devices made of software: the conformance suite (linked in beside this, REJOIN_RDMA says which
// devices), ports that go down, and what a write costs in the backend itself.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <map>

#include "base/fd.h"
#include "base/log.h"
#include "device/tests/fake_control.h"
#include "transport/factory.h"
#include "transport/staged/factory.h"
#include "transport/tests/any_access.h"
#include "transport/tests/fake_verbs.h"
#include "transport/tests/same_bytes.h"

namespace rejoin::transport {
namespace {

struct Side {
  std::unique_ptr<Engine> engine;
  EndpointId endpoint;
  bool up = false, closed = false;
  std::uint64_t completed = 0, failed = 0, written = 0;
  std::function<void(std::uint64_t)> on_written;
  void poll() {
    for (const auto& event : engine->poll()) {
      if (event.kind == EventKind::accepted) endpoint = event.endpoint;
      if (event.kind == EventKind::accepted || event.kind == EventKind::connected) up = true;
      if (event.kind == EventKind::closed) closed = true;
      written += event.kind == EventKind::written;
      if (event.kind == EventKind::written && on_written) on_written(event.value);
      if (event.kind == EventKind::completed) ++(event.error ? failed : completed);
    }
  }
};

struct VerbsOnFake : testing::Test {
  Side a, b;
  void connect(const std::string& transport) { connect(transport, transport); }
  using Wrap = std::function<std::unique_ptr<Engine>(std::unique_ptr<Engine>)>;
  void connect(const std::string& transport, const std::string& accepting, const Wrap& wrap = {}) {
    spdlog::set_level(spdlog::level::err);
    a.engine = *make_engine(transport);
    b.engine = *make_engine(accepting);
    for (auto* side : {&a, &b})
      if (wrap) side->engine = wrap(std::move(side->engine));
    a.endpoint = *a.engine->connect(*b.engine->listen({"0.0.0.0:0"}), {});
    ASSERT_TRUE(until([&] { return a.up && b.up; }));
  }
  [[nodiscard]] bool until(const std::function<bool()>& done) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!done() && std::chrono::steady_clock::now() < deadline) a.poll(), b.poll();
    return done();
  }
};

TEST_F(VerbsOnFake, APortThatGoesDownIsLeftAndUsedAgainWhenItIsUp) {
  connect("ibverbs:fake0,fake1");
  std::vector<std::byte> from(8 * MiB, std::byte{1}), to(8 * MiB);
  const RegionId source = *a.engine->register_region(from, MemoryKind::host, kAnyAccess);
  const RegionId target = *b.engine->register_region(to, MemoryKind::host, kAnyAccess);
  for (std::uint64_t i = 1; i <= 6; ++i) {
    std::fill(to.begin(), to.end(), std::byte{0});
    const Write write{
        .context = i, .local = {source, 0}, .remote = {b.engine->remote(target), 0}, .length = 8 * MiB, .notify = i};
    ASSERT_TRUE(a.engine->write(a.endpoint, {&write, 1}));
    for (int turn = 0; turn < 5; ++turn) a.poll(), b.poll();
    const char* device = i % 2 == 0 ? "fake0" : "fake1";
    fake_verbs_port(device, false);
    ASSERT_TRUE(until([&] { return a.completed == i && b.written == i; })) << i;
    EXPECT_TRUE(same_bytes(from, to));
    fake_verbs_port(device, true);
    const auto back = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
    ASSERT_TRUE(until([&] { return std::chrono::steady_clock::now() > back; }));
  }
  EXPECT_EQ(a.failed, 0u);
  EXPECT_FALSE(a.closed || b.closed);
}

TEST_F(VerbsOnFake, ADeviceThatIsUnpluggedIsOpenedAgainWhenItIsBack) {
  connect("ibverbs:fake0,fake1");
  std::vector<std::byte> from(4 * MiB, std::byte{1}), to(4 * MiB), late(4 * MiB);
  const RegionId source = *a.engine->register_region(from, MemoryKind::host, kAnyAccess);
  const RegionId target = *b.engine->register_region(to, MemoryKind::host, kAnyAccess);
  const auto write = [&](RegionId region, std::vector<std::byte>& there, std::uint64_t number) {
    std::fill(there.begin(), there.end(), std::byte{0});
    const Write one{.context = number,
                    .local = {source, 0},
                    .remote = {b.engine->remote(region), 0},
                    .length = 4 * MiB,
                    .notify = number};
    ASSERT_TRUE(a.engine->write(a.endpoint, {&one, 1}));
  };
  write(target, to, 1);
  for (int turn = 0; turn < 5; ++turn) a.poll(), b.poll();
  fake_verbs_plug("fake1", false);
  ASSERT_TRUE(until([&] { return a.completed == 1 && b.written == 1; }));
  EXPECT_TRUE(same_bytes(from, to));
  // What is registered meanwhile is there too when the device is.
  const RegionId meanwhile = *b.engine->register_region(late, MemoryKind::host, kAnyAccess);
  fake_verbs_plug("fake1", true);
  const auto back = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  ASSERT_TRUE(until([&] { return std::chrono::steady_clock::now() > back; }));
  fake_verbs_plug("fake0", false);  // so the other must carry everything
  write(meanwhile, late, 2);
  ASSERT_TRUE(until([&] { return a.completed == 2 && b.written == 2; }));
  EXPECT_TRUE(same_bytes(from, late));
  fake_verbs_plug("fake0", true);
  EXPECT_FALSE(a.closed || b.closed);
  a.engine.reset(), b.engine.reset();
}

TEST_F(VerbsOnFake, BulkGoesFromTheCallersMemoryToTheCallersMemoryWithoutACopy) {
  for (const char* transport : {"ibverbs:fake0", "ibverbs:fake0,fake1"}) {
    a = {}, b = {};
    connect(transport);
    std::vector<std::byte> from(16 * MiB, std::byte{1}), to(16 * MiB);
    const RegionId source = *a.engine->register_region(from, MemoryKind::host, kAnyAccess);
    const RegionId target = *b.engine->register_region(to, MemoryKind::host, kAnyAccess);
    std::uint64_t direct = 0, copied = 0;
    fake_verbs_watch([&](const char*, const void* here, const void* there, std::uint64_t bytes) {
      const auto offset = static_cast<const std::byte*>(here) - from.data();
      const bool mine = here != nullptr && offset >= 0 &&
                        offset + static_cast<std::int64_t>(bytes) <= 16 * static_cast<std::int64_t>(MiB);
      (mine && static_cast<const std::byte*>(there) - to.data() == offset ? direct : copied) += bytes;
    });
    const Write write{
        .context = 1, .local = {source, 0}, .remote = {b.engine->remote(target), 0}, .length = 16 * MiB, .notify = 1};
    ASSERT_TRUE(a.engine->write(a.endpoint, {&write, 1}));
    ASSERT_TRUE(until([&] { return a.completed == 1 && b.written == 1; }));
    fake_verbs_watch({});
    EXPECT_EQ(direct, 16 * MiB) << transport;
    EXPECT_EQ(copied, 0u) << transport;
    a.engine.reset(), b.engine.reset();
  }
}

TEST_F(VerbsOnFake, ARailThatCantGetAtARegionIsAvoidedForItAndUsedForOthers) {
  for (const bool at_the_source : {true, false}) {
    a = {}, b = {};
    connect("ibverbs:fake0,fake1");
    constexpr std::uint64_t size = 8 * MiB;
    std::vector<std::byte> from(size, std::byte{1}), to(size), other(size);
    const RegionId source = *a.engine->register_region(from, MemoryKind::host, kAnyAccess);
    const RegionId targets[] = {*b.engine->register_region(to, MemoryKind::host, kAnyAccess),
                                *b.engine->register_region(other, MemoryKind::host, kAnyAccess)};
    std::map<std::string, std::uint64_t> carried;
    fake_verbs_watch(
        [&](const char* device, const void*, const void*, std::uint64_t bytes) { carried[device] += bytes; });
    std::uint64_t writes = 0;
    const auto write = [&](RegionId target) {
      carried.clear();
      const Write one{.context = 1,
                      .local = {source, 0},
                      .remote = {b.engine->remote(target), 0},
                      .length = size,
                      .notify = ++writes};
      ASSERT_TRUE(a.engine->write(a.endpoint, {&one, 1}));
      ASSERT_TRUE(until([&] { return a.completed + a.failed == writes && b.written == a.completed; }));
    };
    fake_verbs_blind("fake1", at_the_source ? from.data() : to.data(), size);
    write(targets[0]);
    EXPECT_TRUE(same_bytes(from, to));
    EXPECT_EQ(carried["fake0"], size);
    write(targets[0]);  // known by now
    EXPECT_EQ(carried["fake0"], size);
    fake_verbs_blind("fake1", nullptr, 0);
    write(targets[1]);  // between other regions the rail is as good as before
    EXPECT_TRUE(same_bytes(from, other));
    EXPECT_GT(carried["fake1"], 0u);
    EXPECT_EQ(a.failed, 0u);
    EXPECT_FALSE(a.closed || b.closed);

    // No rail left: an error that says so, and the endpoint goes on.
    fake_verbs_blind("fake0", to.data(), size);
    write(targets[0]);
    EXPECT_EQ(a.failed, 1u);
    write(targets[1]);
    EXPECT_EQ(a.failed, 1u);
    fake_verbs_blind("fake0", nullptr, 0);
    fake_verbs_watch({});
    a.engine.reset(), b.engine.reset();
  }
}

// A device's memory: the processor must not touch it, not even for a write that is short enough to be inlined.
TEST_F(VerbsOnFake, ADmaBufIsReachedByTheDeviceAndNotByTheProcessor) {
  constexpr std::uint64_t size = 4 * MiB, offset = 64 * KiB;
  struct DeviceMemory {
    Fd fd{::memfd_create("device", MFD_CLOEXEC)};
    std::byte* bytes = nullptr;
    std::span<std::byte> device;
    DeviceMemory() {
      EXPECT_EQ(::ftruncate(fd.get(), offset + size), 0);
      bytes = static_cast<std::byte*>(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), offset));
      void* reserved = ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      device = {static_cast<std::byte*>(reserved), size};
    }
    ~DeviceMemory() { ::munmap(bytes, size), ::munmap(device.data(), size); }
    DmaBuf dma_buf() const { return {.fd = fd.get(), .offset = offset, .memory = device}; }
  };
  for (const char* transport : {"ibverbs:fake0", "ibverbs:fake0,fake1"}) {
    a = {}, b = {};
    connect(transport);
    DeviceMemory from, to;
    for (std::uint64_t i = 0; i < size; ++i) from.bytes[i] = static_cast<std::byte>(i * 7);
    const RegionId source = *a.engine->register_dma_buf(from.dma_buf(), kAnyAccess);
    const RegionId target = *b.engine->register_dma_buf(to.dma_buf(), kAnyAccess);
    std::uint64_t writes = 0;
    for (const std::uint64_t length : {std::uint64_t{8}, size}) {
      const Write write{.context = 1,
                        .local = {source, size - length},
                        .remote = {b.engine->remote(target), size - length},
                        .length = length,
                        .notify = ++writes};
      ASSERT_TRUE(a.engine->write(a.endpoint, {&write, 1}));
      ASSERT_TRUE(until([&] { return a.completed == writes && b.written == writes; }));
      EXPECT_EQ(std::memcmp(from.bytes + size - length, to.bytes + size - length, length), 0);
    }
    const auto wrong = a.engine->register_dma_buf({.fd = -1, .offset = 0, .memory = from.device}, kAnyAccess);
    ASSERT_FALSE(wrong);
    a.engine.reset(), b.engine.reset();
  }
}

// The memory of a GPU, by what its driver exports: nothing is staged.
TEST_F(VerbsOnFake, AGpusMemoryIsReachedDirectlyWhereItsDriverExportsIt) {
  auto gpu = device::open_cuda({.ordinal = 0, .library = REJOIN_FAKE_CUDA});
  ASSERT_TRUE(gpu) << gpu.error().message;
  const device::fake::Control control(REJOIN_FAKE_CUDA);
  control.set_dma_buf(true);
  constexpr std::uint64_t size = 2 * MiB;
  a = {}, b = {};
  connect("ibverbs:fake0", "ibverbs:fake0", [&](std::unique_ptr<Engine> below) {
    return *staged::make_engine(std::move(below), *gpu, {.slot_bytes = 4 * KiB, .slots = 2});
  });
  auto from = *(*gpu)->allocate(size), to = *(*gpu)->allocate(size);
  auto pinned = *(*gpu)->allocate_pinned(size), back = *(*gpu)->allocate_pinned(size);
  auto stream = *(*gpu)->make_stream();
  for (std::uint64_t i = 0; i < size; ++i) pinned.bytes[i] = static_cast<std::byte>(i * 7 >> 2);
  ASSERT_TRUE(stream->copy(from.bytes.data(), pinned.bytes.data(), size));
  ASSERT_TRUE(stream->synchronize());
  const RegionId source = *a.engine->register_region(from.bytes, MemoryKind::cuda, kAnyAccess);
  const RegionId target = *b.engine->register_region(to.bytes, MemoryKind::cuda, kAnyAccess);
  EXPECT_FALSE(b.engine->staged(target));
  const Write write{
      .context = 1, .local = {source, 0}, .remote = {b.engine->remote(target), 0}, .length = size, .notify = 1};
  ASSERT_TRUE(a.engine->write(a.endpoint, {&write, 1}));
  ASSERT_TRUE(until([&] { return a.completed == 1 && b.written == 1; }));
  ASSERT_TRUE(stream->copy(back.bytes.data(), to.bytes.data(), size));
  ASSERT_TRUE(stream->synchronize());
  EXPECT_EQ(std::memcmp(back.bytes.data(), pinned.bytes.data(), size), 0);
  control.set_dma_buf(false);
  a.engine.reset(), b.engine.reset();
}

// The order of notifications and data is kept over queue pairs that keep none, whichever side may use them.
TEST_F(VerbsOnFake, DataThatIsPlacedOutOfOrderIsAllThereWhenItIsSaid) {
  struct Case {
    const char *connects, *accepts;
    bool can;
  };
  for (const Case& one : {Case{"ibverbs:fake0;qps=3;ooo=1", "ibverbs:fake0;qps=3;ooo=1", true},
                          Case{"ibverbs:fake0;qps=3;ooo=1", "ibverbs:fake0;qps=2", true},
                          Case{"ibverbs:fake0;qps=3", "ibverbs:fake0;qps=3;ooo=1", true},
                          Case{"ibverbs:fake0;qps=1;ooo=1", "ibverbs:fake0;qps=1;ooo=1", true},
                          Case{"ibverbs:fake0;qps=3;ooo=1", "ibverbs:fake0;qps=3;ooo=1", false}}) {
    fake_verbs_out_of_order("fake0", one.can);
    a = {}, b = {};
    connect(one.connects, one.accepts);
    constexpr std::uint64_t size = 2 * MiB, count = 400;
    std::vector<std::byte> from(size, std::byte{1}), to(size);
    const RegionId source = *a.engine->register_region(from, MemoryKind::host, kAnyAccess);
    const RegionId target = *b.engine->register_region(to, MemoryKind::host, kAnyAccess);
    // Every write brings bytes of its own to a place of its own, and what it brings is looked at when it is said.
    std::vector<std::uint64_t> starts{0};
    for (std::uint64_t i = 0; i < count; ++i) starts.push_back(starts.back() + 100 + i * 24);
    ASSERT_LE(starts.back(), size);
    std::uint64_t said = 0;
    b.on_written = [&](std::uint64_t value) {
      for (std::uint64_t at = starts[value]; at < starts[value + 1]; ++at)
        ASSERT_EQ(to[at], std::byte{1}) << value << ", " << at;
      ++said;
    };
    for (std::uint64_t i = 0; i < count; ++i) {
      const Write write{.context = i,
                        .local = {source, starts[i]},
                        .remote = {b.engine->remote(target), starts[i]},
                        .length = starts[i + 1] - starts[i],
                        .notify = i};
      ASSERT_TRUE(a.engine->write(a.endpoint, {&write, 1}));
      if (i % 16 == 0) a.poll(), b.poll();
    }
    ASSERT_TRUE(until([&] { return a.completed == count && said == count; }));
    EXPECT_EQ(a.failed, 0u);

    // Withdrawn under way: queue pairs are rebuilt, what was refused is told, and what was not is done.
    std::vector<std::byte> other(size);
    const RegionId gone = *b.engine->register_region(other, MemoryKind::host, kAnyAccess);
    const RemoteRegion gone_there = b.engine->remote(gone), there = b.engine->remote(target);
    const Write ask{.context = 0, .local = {source, 0}, .remote = {gone_there, 0}, .length = 8, .notify = {}};
    ASSERT_TRUE(a.engine->write(a.endpoint, {&ask, 1}));
    ASSERT_TRUE(until([&] { return a.completed == count + 1; }));
    std::fill(to.begin(), to.end(), std::byte{0});
    b.engine->deregister(gone);
    for (std::uint64_t i = 0; i < count; ++i) {
      const Write write{.context = i,
                        .local = {source, starts[i]},
                        .remote = {i % 4 == 3 ? gone_there : there, starts[i]},
                        .length = starts[i + 1] - starts[i],
                        .notify = i};
      ASSERT_TRUE(a.engine->write(a.endpoint, {&write, 1}));
    }
    ASSERT_TRUE(until([&] { return a.completed + a.failed == 2 * count + 1 && said == count + count / 4 * 3; }));
    EXPECT_EQ(a.failed, count / 4);
    EXPECT_FALSE(a.closed || b.closed);
    a.engine.reset(), b.engine.reset();
  }
  fake_verbs_out_of_order("fake0", true);
}

TEST_F(VerbsOnFake, MessagesOfManyEndpointsShareTheSendBuffersAndAllArrive) {
  spdlog::set_level(spdlog::level::err);
  a.engine = *make_engine("ibverbs:fake0;depth=16");
  b.engine = *make_engine("ibverbs:fake0;depth=16");
  const Address address = *b.engine->listen({"0.0.0.0:0"});
  std::vector<EndpointId> endpoints;
  for (int i = 0; i < 40; ++i) endpoints.push_back(*a.engine->connect(address, {}));
  std::size_t connected = 0;
  std::uint64_t bytes = 0;
  const auto turn = [&] {
    for (const auto& event : a.engine->poll()) connected += event.kind == EventKind::connected;
    for (const auto& event : b.engine->poll())
      if (event.kind == EventKind::message) bytes += event.message.size();
  };
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (connected < endpoints.size() && std::chrono::steady_clock::now() < deadline) turn();
  ASSERT_EQ(connected, endpoints.size());
  const Bytes message(60000, std::byte{1});  // fifteen buffers each, many more than there are
  for (int round = 0; round < 4; ++round)
    for (auto endpoint : endpoints) ASSERT_TRUE(a.engine->send(endpoint, message));
  while (bytes < 160 * message.size() && std::chrono::steady_clock::now() < deadline) turn();
  EXPECT_EQ(bytes, 160 * message.size());
}

TEST_F(VerbsOnFake, WritesCostLittleInTheBackendItself) {
  connect("ibverbs:fake0;qps=1");
  std::vector<std::byte> from(4096), to(4096);
  const RegionId source = *a.engine->register_region(from, MemoryKind::host, kAnyAccess);
  const RegionId target = *b.engine->register_region(to, MemoryKind::host, kAnyAccess);
  const Write write{
      .context = 1, .local = {source, 0}, .remote = {b.engine->remote(target), 0}, .length = 8, .notify = std::nullopt};
  constexpr std::uint64_t count = 200000, depth = 16;
  std::vector<Write> batch(depth, write);
  ASSERT_TRUE(a.engine->write(a.endpoint, {&write, 1}));
  ASSERT_TRUE(until([&] { return a.completed == 1; }));  // the region's key is known from here on
  a.completed = 0;
  SteadyClock clock;
  const TimePoint start = clock.now();
  for (std::uint64_t posted = 0; posted < count; posted += depth) {
    ASSERT_TRUE(a.engine->write(a.endpoint, batch));
    while (a.completed < posted + depth) a.poll();
  }
  // Printed, not judged: the pretended device's own work is in it.
  fmt::print(
      "{:.0f} ns for a write of 8 bytes, from the call to its completion's event, the pretended device's work "
      "included\n",
      seconds(clock.now() - start) * 1e9 / count);
  EXPECT_EQ(a.failed, 0u);
}

}  // namespace
}  // namespace rejoin::transport
