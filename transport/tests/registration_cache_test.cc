#include "transport/registration_cache.h"

#include <gtest/gtest.h>

#include <random>

#include "transport/sim/fabric.h"
#include "transport/tests/any_access.h"

namespace rejoin::transport {
namespace {

constexpr std::size_t kPage = 4 * KiB;

// Passes on to a simulated engine and knows what is registered.
struct Recorder final : Engine {
  explicit Recorder(std::unique_ptr<Engine> e) : engine(std::move(e)) {}
  std::unique_ptr<Engine> engine;
  std::map<std::uint64_t, std::span<std::byte>> registered;
  std::uint64_t bytes() const {
    std::uint64_t sum = 0;
    for (const auto& [id, span] : registered) sum += span.size();
    return sum;
  }
  Result<RegionId> register_region(std::span<std::byte> memory, MemoryKind kind, Access access) override {
    auto id = engine->register_region(memory, kind, access);
    registered[id->value] = memory;
    return id;
  }
  void deregister(RegionId region) override {
    EXPECT_EQ(registered.erase(region.value), 1u) << "deregistered twice";
    engine->deregister(region);
  }
  RemoteRegion remote(RegionId region) const override { return engine->remote(region); }
  std::uint64_t refused() const override { return engine->refused(); }
  Result<Address> listen(const Address& where) override { return engine->listen(where); }
  Result<EndpointId> connect(const Address& peer, BytesView hello) override { return engine->connect(peer, hello); }
  Result<> send(EndpointId endpoint, BytesView message) override { return engine->send(endpoint, message); }
  Result<> write(EndpointId endpoint, std::span<const Write> writes) override {
    return engine->write(endpoint, writes);
  }
  Result<> read(EndpointId endpoint, std::span<const Read> reads) override { return engine->read(endpoint, reads); }
  std::span<const Event> poll() override { return engine->poll(); }
  bool arm() override { return engine->arm(); }
  int event_fd() const override { return engine->event_fd(); }
  void close(EndpointId endpoint) override { engine->close(endpoint); }
};

struct RegistrationCacheTest : testing::Test {
  VirtualClock clock;
  sim::Fabric fabric{{}, clock};
  Recorder engine{fabric.make_engine()};
  std::vector<std::byte> memory = std::vector<std::byte>(65 * kPage);
  std::byte* base = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(memory.data()), kPage));
  std::span<std::byte> pages(std::size_t first, std::size_t count) { return {base + first * kPage, count * kPage}; }
  bool covers(const RegistrationCache::Lease& lease, std::span<std::byte> range) {
    auto found = engine.registered.find(lease.region.value);
    return found != engine.registered.end() && found->second.data() + lease.offset == range.data() &&
           lease.offset + range.size() <= found->second.size();
  }
};

TEST_F(RegistrationCacheTest, ASecondUseCostsNothing) {
  RegistrationCache cache(engine);
  auto first = *cache.acquire(pages(3, 2).subspan(100, 500), MemoryKind::host, kAnyAccess);
  cache.release(first);
  auto second = *cache.acquire(pages(3, 1), MemoryKind::host, kAnyAccess);
  EXPECT_TRUE(covers(second, pages(3, 1)));
  EXPECT_EQ(first.region, second.region);
  EXPECT_EQ(cache.counts().hits, 1u);
  EXPECT_EQ(cache.counts().misses, 1u);
}

TEST_F(RegistrationCacheTest, TheLeastRecentlyUsedGoesWhenRoomIsNeededAndNeverOneInUse) {
  RegistrationCache cache(engine, {.max_bytes = 3 * kPage, .page = kPage});
  const auto use = [&](std::size_t page) {
    cache.release(*cache.acquire(pages(page, 1), MemoryKind::host, kAnyAccess));
  };
  auto held = *cache.acquire(pages(0, 1), MemoryKind::host, kAnyAccess);
  use(10);
  use(20);
  use(10);
  use(30);  // takes the place of 20
  EXPECT_EQ(cache.counts().evictions, 1u);
  use(10);
  EXPECT_EQ(cache.counts().evictions, 1u);
  EXPECT_TRUE(covers(held, pages(0, 1)));
  auto more = *cache.acquire(pages(40, 2), MemoryKind::host, kAnyAccess);
  auto refused = cache.acquire(pages(50, 1), MemoryKind::host, kAnyAccess);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::exhausted);
  cache.release(more);
  EXPECT_TRUE(cache.acquire(pages(50, 1), MemoryKind::host, kAnyAccess));
}

TEST_F(RegistrationCacheTest, WhatIsInvalidatedIsNeitherRegisteredNorHandedOutAgain) {
  RegistrationCache cache(engine);
  auto held = *cache.acquire(pages(0, 4), MemoryKind::host, kAnyAccess);
  cache.release(*cache.acquire(pages(8, 1), MemoryKind::host, kAnyAccess));
  cache.invalidate(pages(3, 6));
  EXPECT_TRUE(engine.registered.empty());
  auto again = *cache.acquire(pages(0, 4), MemoryKind::host, kAnyAccess);
  EXPECT_NE(again.region, held.region);
  cache.release(held);
  EXPECT_TRUE(covers(again, pages(0, 4)));
}

TEST_F(RegistrationCacheTest, EmptyRangesAreRefused) {
  RegistrationCache cache(engine);
  EXPECT_FALSE(cache.acquire({}, MemoryKind::host, kAnyAccess));
}

// Random use against a model: every lease is covered by a registration while it is held, the bound holds, nothing is
// left at the end.
TEST_F(RegistrationCacheTest, HoldsWhateverTheOrder) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(static_cast<unsigned>(seed));
    {
      RegistrationCache cache(engine, {.max_bytes = 40 * kPage, .page = kPage});
      std::vector<std::pair<RegistrationCache::Lease, std::span<std::byte>>> held;
      for (int i = 0; i < 400; ++i) {
        switch (random() % 8) {
          case 0: {
            const auto gone = pages(random() % 60, 1 + random() % 4);
            cache.invalidate(gone);
            for (const auto& [id, span] : engine.registered)
              EXPECT_FALSE(span.data() < gone.data() + gone.size() && gone.data() < span.data() + span.size());
            std::erase_if(held, [&](const auto& one) {
              if (engine.registered.contains(one.first.region.value)) return false;
              cache.release(one.first);
              return true;
            });
            break;
          }
          case 1:
          case 2:
          case 3:
            if (!held.empty()) {
              const std::size_t which = random() % held.size();
              cache.release(held[which].first);
              held.erase(held.begin() + static_cast<std::ptrdiff_t>(which));
            }
            break;
          default: {
            const auto range = pages(random() % 56, 1 + random() % 8).subspan(random() % 100);
            auto lease = cache.acquire(range, MemoryKind::host, kAnyAccess);
            if (lease) held.push_back({*lease, range});
          }
        }
        for (const auto& [lease, range] : held) EXPECT_TRUE(covers(lease, range));
        EXPECT_LE(engine.bytes(), 40 * kPage);
        EXPECT_EQ(engine.bytes(), cache.counts().bytes);
      }
      for (const auto& [lease, range] : held) cache.release(lease);
    }
    EXPECT_TRUE(engine.registered.empty());
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace rejoin::transport
