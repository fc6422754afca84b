#include <fmt/format.h>
#include <gtest/gtest.h>

#include "transport/sim/fabric.h"
#include "transport/tests/any_access.h"

namespace rejoin::transport::sim {
namespace {

std::string transcript(std::uint64_t seed) {
  VirtualClock clock;
  Fabric fabric({.seed = seed}, clock);
  auto a = fabric.make_engine(), b = fabric.make_engine();
  auto address = *b->listen({"sim"});
  auto endpoint = *a->connect(address, {});
  std::string log;
  std::vector<std::byte> from(100), to(100);
  const RegionId source = *a->register_region(from, MemoryKind::host, kAnyAccess);
  const RegionId target = *b->register_region(to, MemoryKind::host, kAnyAccess);
  while (fabric.step()) {
    for (auto* engine : {a.get(), b.get()})
      for (auto& event : engine->poll()) {
        log += fmt::format("{} {} {}\n", clock.now().time_since_epoch().count(), static_cast<int>(event.kind),
                           event.value);
        if (event.kind != EventKind::connected) continue;
        for (std::uint64_t i = 0; i < 20; ++i) {
          const Write write{
              .context = i, .local = {source, 0}, .remote = {b->remote(target), 0}, .length = 10, .notify = i};
          EXPECT_TRUE(a->write(endpoint, {&write, 1}));
        }
      }
  }
  return log;
}

TEST(SimFabric, TheSameSeedGivesTheSameHistory) {
  EXPECT_EQ(transcript(3), transcript(3));
  EXPECT_NE(transcript(3), transcript(4));
}

TEST(SimFabric, ASlowLinkIsSlowInItsDirectionAndForItsTime) {
  VirtualClock clock;
  Fabric fabric({}, clock);
  auto a = fabric.make_engine(), b = fabric.make_engine();
  auto from_a = *a->connect(*b->listen({"sim"}), {});
  const auto run = [&] {
    while (fabric.step()) {
    }
  };
  run();
  const auto from_b = b->poll().front().endpoint;
  a->poll();
  const auto time_of = [&](Engine& sender, EndpointId endpoint, Engine& receiver) {
    const TimePoint began = clock.now();
    EXPECT_TRUE(sender.send(endpoint, bytes_of(began)));
    run();
    EXPECT_EQ(receiver.poll().size(), 1u);
    return clock.now() - began;
  };
  using namespace std::chrono_literals;
  fabric.slow(*a, 20ms, 0ms, clock.now() + 30ms);
  EXPECT_LT(time_of(*b, from_b, *a), 1ms);
  EXPECT_GE(time_of(*a, from_a, *b), 20ms);
  EXPECT_GE(time_of(*a, from_a, *b), 20ms) << "sent while it was slow";
  EXPECT_LT(time_of(*a, from_a, *b), 1ms);
}

TEST(SimFabric, ARoundTripIsTwiceTheLeastTimeThatAMessageTakes) {
  using namespace std::chrono_literals;
  VirtualClock clock;
  Fabric fabric({.min_delay = 3us, .between_rooms = 100us}, clock);
  auto a = fabric.make_engine(), near = fabric.make_engine(), far = fabric.make_engine();
  fabric.stand(*far, 1);
  const auto to_near = *a->connect(*near->listen({"sim"}), {}), to_far = *a->connect(*far->listen({"sim"}), {});
  EXPECT_FALSE(a->round_trip(to_near)) << "it is not connected yet";
  while (fabric.step()) {
  }
  EXPECT_EQ(a->round_trip(to_near), 6us);
  EXPECT_EQ(a->round_trip(to_far), 206us);
}

TEST(SimFabric, WhatAPeerHasYetToHearIsCounted) {
  VirtualClock clock;
  Fabric fabric({}, clock);
  auto a = fabric.make_engine(), b = fabric.make_engine();
  const auto endpoint = *a->connect(*b->listen({"sim"}), {});
  const auto run = [&] {
    while (fabric.step()) {
    }
  };
  run();
  const Bytes message(100);
  const auto say = [&](int times) {
    for (; times > 0; --times) ASSERT_TRUE(a->send(endpoint, message));
    run();
  };
  fabric.stop(*b);
  say(3);
  EXPECT_EQ(fabric.held(*a).unheard, 300u);
  EXPECT_EQ(fabric.held(*b).unheard, 0u);
  fabric.resume(*b);
  (void)b->poll();
  (void)b->poll();
  EXPECT_EQ(fabric.held(*a).unheard, 0u);
  say(2);
  EXPECT_EQ(fabric.held(*a).unheard, 200u) << "it has arrived, and nobody has looked";
  a->close(endpoint);
  EXPECT_EQ(fabric.held(*a).unheard, 0u) << "with its endpoint";
}

TEST(SimFabric, ARegistrationThatTakesItsTimeSaysSoOnce) {
  VirtualClock clock;
  Fabric fabric({}, clock);
  auto engine = fabric.make_engine();
  std::vector<std::byte> memory(10);
  fabric.slow_memory(*engine, std::chrono::seconds(3));
  EXPECT_EQ(fabric.take_registering(*engine), Duration{});
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(engine->register_region(memory, MemoryKind::host, kAnyAccess));
  EXPECT_EQ(fabric.take_registering(*engine), std::chrono::seconds(3));
  EXPECT_EQ(fabric.take_registering(*engine), Duration{});
}

TEST(SimFabric, AKilledProcessIsSeenByItsPeersAndWritesNoMore) {
  VirtualClock clock;
  Fabric fabric({}, clock);
  auto a = fabric.make_engine(), b = fabric.make_engine();
  auto endpoint = *a->connect(*b->listen({"sim"}), {});
  while (fabric.step()) {
  }
  b->poll();
  std::vector<std::byte> from(10, std::byte{1}), to(10);
  const RegionId source = *a->register_region(from, MemoryKind::host, kAnyAccess);
  const RegionId target = *b->register_region(to, MemoryKind::host, kAnyAccess);
  const Write write{.context = 1, .local = {source, 0}, .remote = {b->remote(target), 0}, .length = 10, .notify = 1};
  ASSERT_TRUE(a->write(endpoint, {&write, 1}));
  fabric.kill(*a);
  while (fabric.step()) {
  }
  bool closed = false;
  for (auto& event : b->poll()) {
    EXPECT_NE(event.kind, EventKind::written);
    closed |= event.kind == EventKind::closed;
  }
  EXPECT_TRUE(closed);
  EXPECT_EQ(to[0], std::byte{0});
}

}  // namespace
}  // namespace rejoin::transport::sim
