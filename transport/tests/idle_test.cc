// How progress threads wait.
#include "transport/idle.h"

#include <gtest/gtest.h>

#include <vector>

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

struct IdleWaits : testing::Test {
  Quiet engine;
  Idle idle{engine, {.spins = 400, .yields = 100, .longest = std::chrono::hours(1)}};

  // Until it sleeps.
  int polls() {
    int count = 0;
    for (const int before = engine.slept; engine.slept == before; ++count) idle.wait(true, Duration::zero());
    return count;
  }
};

TEST_F(IdleWaits, WhoIsNotUrgentSleepsAtOnce) {
  idle.wait(false, Duration::zero());
  EXPECT_EQ(engine.slept, 1);
}

TEST_F(IdleWaits, SpinsLessWhereThatWasInVainAndTriesNowAndThen) {
  std::vector<int> took;
  for (int i = 0; i < 18; ++i) {
    took.push_back(polls());
    EXPECT_EQ(polls(), 1) << "it sleeps again, where nothing has happened";
    idle.reset();
  }
  EXPECT_EQ(took, (std::vector{501, 376, 282, 211, 158, 118, 88, 66, 49, 37, 33, 33, 33, 33, 33, 501, 33, 33}));
}

TEST_F(IdleWaits, SpinsForTwiceAsLongAsItTookThatSomethingCame) {
  for (int i = 0; i < 15; ++i) polls(), idle.reset();
  for (int poll = 0; poll < 90; ++poll) idle.wait(true, Duration::zero());  // in the wait that tries
  idle.reset();
  EXPECT_EQ(polls(), 181);
}

}  // namespace
}  // namespace rejoin::transport
