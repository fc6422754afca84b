// How progress threads wait, alone on a core and beside another thread.
#include "transport/idle.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <thread>

#include "base/fd.h"

namespace rejoin::transport {
namespace {

// Nothing ever happens to it. It counts who sleeps.
class Quiet final : public Engine {
 public:
  int slept = 0;
  Result<Address> listen(const Address&) override { return Address{}; }
  Result<EndpointId> connect(const Address&, BytesView) override { return EndpointId{}; }
  Result<RegionId> register_region(std::span<std::byte>, MemoryKind, Access) override { return RegionId{}; }
  void deregister(RegionId) override {}
  RemoteRegion remote(RegionId) const override { return {}; }
  std::uint64_t refused() const override { return 0; }
  Result<> send(EndpointId, BytesView) override { return {}; }
  Result<> write(EndpointId, std::span<const Write>) override { return {}; }
  Result<> read(EndpointId, std::span<const Read>) override { return {}; }
  std::span<const Event> poll() override { return {}; }
  bool arm() override { return ++slept, true; }
  int event_fd() const override { return -1; }
  void close(EndpointId) override {}
};

void run_on(int core) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  ASSERT_EQ(::pthread_setaffinity_np(::pthread_self(), sizeof one, &one), 0);
}

// Polls until it sleeps.
int polls_of(Idle& idle, const Quiet& engine) {
  int polls = 0;
  for (const int before = engine.slept; engine.slept == before; ++polls) idle.wait(true, Duration::zero());
  return polls;
}

struct IdleOnACore : testing::Test {
  static constexpr Idle::Options kOptions{.spins = 100'000, .yields = 10, .longest = std::chrono::hours(1)};
  Quiet engine;
  Idle idle{engine, kOptions};
  cpu_set_t before{};
  int core = 0;
  void SetUp() override {
    ASSERT_EQ(::pthread_getaffinity_np(::pthread_self(), sizeof before, &before), 0);
    while (!CPU_ISSET(core, &before)) ++core;
  }
  void TearDown() override { ::pthread_setaffinity_np(::pthread_self(), sizeof before, &before); }
};

TEST_F(IdleOnACore, WhoIsNotUrgentSleepsAtOnce) {
  idle.wait(false, Duration::zero());
  EXPECT_EQ(engine.slept, 1);
}

TEST_F(IdleOnACore, ThatAnotherThreadNeedsItSleepsSoon) {
  std::atomic<bool> stop{false}, runs{false};
  std::thread other([&] {
    run_on(core);
    for (runs = true; !stop;) {
    }
  });
  run_on(core);
  while (!runs) std::this_thread::yield();
  EXPECT_LT(polls_of(idle, engine), kOptions.spins / 10);
  stop = true;
  other.join();
}

TEST_F(IdleOnACore, SpinsAgainWhenSomethingHasHappened) {
  EXPECT_GT(polls_of(idle, engine), 1);
  EXPECT_EQ(polls_of(idle, engine), 1) << "nothing has";
  idle.reset();
  EXPECT_GT(polls_of(idle, engine), 1);
}

}  // namespace
}  // namespace rejoin::transport
