// What an RDMA device is told of what peers may do, and what becomes of a peer that does not ask first.
#include <gtest/gtest.h>

#include <algorithm>

#include "base/log.h"
#include "transport/factory.h"
#include "transport/tests/any_access.h"
#include "transport/tests/fake_verbs_state.h"
#include "transport/tests/same_bytes.h"
#include "transport/tests/within.h"

namespace rejoin::transport {
namespace {

fake::FakeMr* registered(std::span<const std::byte> memory) {
  for (const auto& [key, region] : fake::regions)
    if (region->region.addr == memory.data()) return region;
  return nullptr;
}

TEST(VerbsAccess, TheDeviceIsGivenTheRightsThatWereAskedForAndNoMore) {
  const auto engine = *make_engine("ibverbs:fake0");
  std::vector<std::byte> memory(4 * KiB);
  for (const Access access : {Access::local, Access::remote_read, Access::remote_write, kAnyAccess}) {
    const RegionId region = *engine->register_region(memory, MemoryKind::host, access);
    const auto* there = registered(memory);
    ASSERT_NE(there, nullptr);
    EXPECT_EQ(there->remote_read, allows(access, Access::remote_read));
    EXPECT_EQ(there->remote_write, allows(access, Access::remote_write));
    engine->deregister(region);
  }
  // Its own buffers for messages are nobody's.
  for (const auto& [key, region] : fake::regions) EXPECT_FALSE(region->remote_read || region->remote_write) << key;
}

// As a peer that posts what it was not allowed: here the rights change behind the back of one that has asked.
TEST(VerbsAccess, TheDeviceRefusesWhatIsPostedNeverthelessAndTheEndpointGoesOn) {
  spdlog::set_level(spdlog::level::err);
  const auto a = *make_engine("ibverbs:fake0"), b = *make_engine("ibverbs:fake0");
  const EndpointId to_b = *a->connect(*b->listen({"0.0.0.0:0"}), {});
  bool up = false;
  std::vector<std::optional<Error>> outcomes;
  const auto until = [&](const auto& done) {
    return within(std::chrono::seconds(20), [&] {
      for (const auto& event : a->poll()) {
        up = up || event.kind == EventKind::connected;
        if (event.kind == EventKind::completed) outcomes.push_back(event.error);
      }
      (void)b->poll();
      return done();
    });
  };
  ASSERT_TRUE(until([&] { return up; }));
  std::vector<std::byte> from(64 * KiB, std::byte{1}), to(64 * KiB), other(64 * KiB);
  const RegionId source = *a->register_region(from, MemoryKind::host, Access::local);
  const RegionId target = *b->register_region(to, MemoryKind::host, Access::remote_write);
  const RegionId sound = *b->register_region(other, MemoryKind::host, Access::remote_write);
  const auto write = [&](RegionId region) {
    const Write one{.local = {source, 0}, .remote = {b->remote(region), 0}, .length = from.size(), .notify = {}};
    const std::size_t before = outcomes.size();
    EXPECT_TRUE(a->write(to_b, {&one, 1}));
    EXPECT_TRUE(until([&] { return outcomes.size() > before; }));
    return outcomes.back();
  };
  EXPECT_FALSE(write(target));
  std::fill(to.begin(), to.end(), std::byte{0});
  registered(to)->remote_write = false;
  const auto refused = write(target);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code, ErrorCode::refused);
  EXPECT_TRUE(all_are(std::byte{0}, to));
  EXPECT_TRUE(until([&] { return b->refused() > 0; })) << "the device's event was not counted";
  EXPECT_FALSE(write(sound));
  EXPECT_EQ(other, from);
}

}  // namespace
}  // namespace rejoin::transport
