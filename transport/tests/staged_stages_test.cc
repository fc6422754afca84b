// How the fragments of one staged write follow each other: copied out, read below, copied in; over copies and a network
// that go on when the test says so.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "device/access.h"
#include "device/device.h"
#include "transport/sim/fabric.h"
#include "transport/staged/factory.h"
#include "transport/tests/any_access.h"

namespace rejoin::transport {
namespace {

// Copies of one stream: those that were begun, and how many of them may be done.
struct Copies {
  std::uint64_t begun = 0, allowed = 0;
  std::uint64_t under_way() const { return begun - std::min(begun, allowed); }
};

class SlowStream final : public device::Stream {
 public:
  explicit SlowStream(Copies& copies) : copies_(copies) {}
  Result<> copy(std::byte* to, const std::byte* from, std::size_t size) override {
    queued_.emplace_back([=] { std::copy_n(from, size, to); });
    ++copies_.begun;
    return {};
  }
  Result<std::uint64_t> mark() override { return copies_.begun; }
  Result<std::uint64_t> reached() override {
    for (; done_ < std::min(copies_.allowed, copies_.begun); ++done_) queued_[done_]();
    return done_;
  }
  Result<> synchronize() override {
    copies_.allowed = std::max(copies_.allowed, copies_.begun);
    return reached().map([](std::uint64_t) {});
  }
  Result<> signal(const Fd&) override { return {}; }
  Result<bool> idle() override { return done_ == copies_.begun; }
  Result<> clear(std::byte*, std::size_t) override { return none(); }
  Result<> follow(Stream&) override { return none(); }
  Result<> launch(device::Kernel, device::Grid, const void*) override { return none(); }
  Result<> wait_until(const std::uint64_t*, std::uint64_t) override { return none(); }
  Result<> write(std::uint64_t*, std::uint64_t) override { return none(); }
  CudaStream handle() override { return nullptr; }

 private:
  static tl::unexpected<Error> none() { return tl::unexpected(Error{ErrorCode::unavailable, "not of this stream"}); }
  Copies& copies_;
  std::vector<std::function<void()>> queued_;
  std::uint64_t done_ = 0;
};

// Memory of the host that is called a GPU's, with streams as above: the first is for what goes out.
class SlowDevice final : public device::Device {
 public:
  Copies out, in;
  MemoryKind kind() const override { return MemoryKind::cuda; }
  std::string address() const override { return "slow"; }
  std::string name() const override { return "a slow device"; }
  Result<device::Memory> allocate(std::size_t size) override { return device::on_heap(size); }
  Result<device::Memory> allocate_pinned(std::size_t size) override { return device::on_heap(size); }
  Result<std::unique_ptr<device::Stream>> make_stream(device::Priority) override {
    return std::make_unique<SlowStream>(std::exchange(made_, true) ? in : out);
  }
  RemoteWrites remote_writes() const override { return RemoteWrites::ordered; }
  Result<> flush_remote_writes() override { return {}; }
  Result<device::Memory> allocate_mapped(std::size_t, std::size_t) override { return none(); }
  Result<device::Memory> pin(std::span<std::byte>) override { return none(); }
  Result<std::vector<device::Allocation>> allocations(std::span<std::byte>) override { return none(); }
  Result<device::Handle> share(const device::Allocation&) override { return none(); }
  Result<device::Memory> import_shared(std::span<const device::Handle>) override { return none(); }
  Result<std::unique_ptr<device::Access>> make_access(device::Priority) override { return none(); }
  Result<> prepare_kernels() override { return none(); }
  Result<std::unique_ptr<device::Stream>> adopt_stream(CudaStream) override { return none(); }
  Result<> has_stream_flags() override { return none(); }
  Result<Exported> export_dma_buf(std::span<std::byte>) override { return none(); }

 private:
  static tl::unexpected<Error> none() { return tl::unexpected(Error{ErrorCode::unavailable, "not of this device"}); }
  bool made_ = false;
};

struct StagedStages : testing::Test {
  struct Side {
    std::shared_ptr<SlowDevice> device = std::make_shared<SlowDevice>();
    std::unique_ptr<Engine> engine;
    std::vector<EndpointId> accepted;
    std::size_t written = 0, completed = 0;
    bool connected = false;
    void poll() {
      for (const auto& event : engine->poll()) {
        EXPECT_FALSE(event.error) << event.error->message;
        written += event.kind == EventKind::written;
        completed += event.kind == EventKind::completed;
        connected |= event.kind == EventKind::connected;
        if (event.kind == EventKind::accepted) accepted.push_back(event.endpoint);
      }
    }
  };
  VirtualClock clock;
  sim::Fabric fabric{{}, clock};
  device::Memory from, to;  // before the sides, whose ends wait for copies
  Side a, b;

  // Everything that can happen without more copies.
  void settle() {
    do {
      a.poll();
      b.poll();
    } while (fabric.step());
    a.poll();
    b.poll();
  }
};

TEST_F(StagedStages, FragmentsOfOneWriteAreInAllThreeStagesAtOnce) {
  constexpr std::size_t size = 1 * MiB;
  for (Side* side : {&a, &b})
    side->engine = *staged::make_engine(fabric.make_engine(), side->device, {.direct = false});
  const auto endpoint = *a.engine->connect(*b.engine->listen({"sim"}), {});
  settle();
  ASSERT_TRUE(a.connected && b.accepted.size() == 1);
  from = *a.device->allocate(size);
  to = *b.device->allocate(size);
  for (std::size_t i = 0; i < size; ++i) from.bytes[i] = static_cast<std::byte>(i * 7 + i / 4093);
  const RegionId source = *a.engine->register_region(from.bytes, MemoryKind::cuda, kAnyAccess);
  const RegionId target = *b.engine->register_region(to.bytes, MemoryKind::cuda, kAnyAccess);
  const Write write{
      .context = 1, .local = {source, 0}, .remote = {b.engine->remote(target), 0}, .length = size, .notify = 1};
  ASSERT_TRUE(a.engine->write(endpoint, {&write, 1}));
  settle();
  const std::uint64_t fragments = a.device->out.begun;
  ASSERT_GE(fragments, 3u) << "a write of 1 MiB is copied out in one go";
  a.device->out.allowed = 1;
  settle();
  ASSERT_EQ(b.device->in.begun, 1u);
  a.device->out.allowed = 2;
  a.poll();                    // offers the second fragment …
  ASSERT_TRUE(fabric.step());  // … which comes there …
  b.poll();                    // … and is asked for
  EXPECT_EQ(a.device->out.under_way(), fragments - 2) << "being copied out";
  EXPECT_EQ(b.device->in.under_way(), 1u) << "being copied in";
  EXPECT_EQ(b.device->in.begun, 1u);
  ASSERT_TRUE(fabric.step()) << "being read below";
  settle();
  EXPECT_EQ(b.device->in.begun, 2u);
  EXPECT_EQ(b.written, 0u);
  a.device->out.allowed = b.device->in.allowed = fragments;
  settle();
  EXPECT_EQ(a.completed, 1u);
  EXPECT_EQ(b.written, 1u);
  EXPECT_TRUE(std::ranges::equal(from.bytes, to.bytes));
  a.engine.reset(), b.engine.reset();
}

}  // namespace
}  // namespace rejoin::transport
