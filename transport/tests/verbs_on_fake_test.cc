// The verbs backend over devices made of software: the conformance suite (linked in beside this, REJOIN_RDMA says which
// devices), ports that go down, and what a write costs in the backend itself.
#include <gtest/gtest.h>

#include <functional>

#include "base/clock.h"
#include "base/log.h"
#include "transport/factory.h"
#include "transport/tests/fake_verbs.h"

namespace rejoin::transport {
namespace {

struct Side {
  std::unique_ptr<Engine> engine;
  EndpointId endpoint;
  bool up = false, closed = false;
  std::uint64_t completed = 0, failed = 0, written = 0;
  void poll() {
    for (const auto& event : engine->poll()) {
      if (event.kind == EventKind::accepted) endpoint = event.endpoint;
      if (event.kind == EventKind::accepted || event.kind == EventKind::connected) up = true;
      if (event.kind == EventKind::closed) closed = true;
      if (event.kind == EventKind::written) ++written;
      if (event.kind == EventKind::completed) ++(event.error ? failed : completed);
    }
  }
};

struct VerbsOnFake : testing::Test {
  Side a, b;
  void connect(const std::string& transport) {
    spdlog::set_level(spdlog::level::err);
    a.engine = *make_engine(transport);
    b.engine = *make_engine(transport);
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
  const RegionId source = *a.engine->register_region(from, MemoryKind::host);
  const RegionId target = *b.engine->register_region(to, MemoryKind::host);
  for (std::uint64_t i = 1; i <= 6; ++i) {
    std::fill(to.begin(), to.end(), std::byte{0});
    const Write write{
        .context = i, .local = {source, 0}, .remote = {b.engine->remote(target), 0}, .length = 8 * MiB, .notify = i};
    ASSERT_TRUE(a.engine->write(a.endpoint, {&write, 1}));
    for (int turn = 0; turn < 5; ++turn) a.poll(), b.poll();
    const char* device = i % 2 == 0 ? "fake0" : "fake1";
    fake_verbs_port(device, false);
    ASSERT_TRUE(until([&] { return a.completed == i && b.written == i; })) << i;
    EXPECT_EQ(from, to);
    fake_verbs_port(device, true);
    const auto back = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
    ASSERT_TRUE(until([&] { return std::chrono::steady_clock::now() > back; }));
  }
  EXPECT_EQ(a.failed, 0u);
  EXPECT_FALSE(a.closed || b.closed);
}

TEST_F(VerbsOnFake, WritesCostLittleInTheBackendItself) {
  connect("ibverbs:fake0;qps=1");
  std::vector<std::byte> from(4096), to(4096);
  const RegionId source = *a.engine->register_region(from, MemoryKind::host);
  const RegionId target = *b.engine->register_region(to, MemoryKind::host);
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
