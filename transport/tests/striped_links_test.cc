// Rails that come up late or never, hang, are fewer at one end, or are the last.
#include <gtest/gtest.h>

#include "base/log.h"
#include "transport/tests/same_bytes.h"
#include "transport/tests/striped_cluster.h"

namespace rejoin::transport::striped {
namespace {

// As UP/PEERS of each.
std::string told(const Engine& engine) {
  std::string text;
  for (const auto& rail : engine.rails()) text += std::to_string(rail.up) + "/" + std::to_string(rail.peers) + " ";
  return text;
}

TEST(Striped, TheEndpointFailsWithItsLastRailOnly) {
  Cluster c(3);
  ASSERT_TRUE(c.until([&] { return c.a.up && c.b.up; }));
  for (int i = 0; i < 1000; ++i) c.turn();
  std::vector<std::byte> bytes(64 * KiB);
  const RegionId source = *c.a.engine->register_region(bytes, MemoryKind::host, kAnyAccess);
  const RegionId target = *c.b.engine->register_region(bytes, MemoryKind::host, kAnyAccess);
  const Write write{
      .context = 7, .local = {source, 0}, .remote = {c.b.engine->remote(target), 0}, .length = 64 * KiB, .notify = 7};
  ASSERT_TRUE(c.a.engine->write(c.a.endpoint, {&write, 1}));
  for (const Side* side : {&c.a, &c.b}) EXPECT_EQ(told(*side->engine), "1/1 1/1 ");
  c.fabric.cut(*c.a.rails[0]);
  c.a.poll();
  EXPECT_FALSE(c.a.closed);
  EXPECT_EQ(told(*c.a.engine), "0/1 1/1 ");
  c.fabric.cut(*c.a.rails[1]);
  ASSERT_TRUE(c.until([&] { return c.a.closed && c.b.closed; }));
  ASSERT_TRUE(c.a.completed.contains(7));
  EXPECT_TRUE(c.a.completed[7]);
  EXPECT_TRUE(c.b.written.empty());
  EXPECT_EQ(told(*c.a.engine), "0/0 0/0 ");  // nobody is connected
}

// The rail that is the first to be up dies before the others have come up: they are waited for, with all that was
// posted.
TEST(Striped, TheFirstRailToBeUpMayDieBeforeTheOthersAreUp) {
  for (const bool at_connecting_end : {true, false}) {
    SCOPED_TRACE(at_connecting_end);
    Cluster c(4, 2, std::chrono::milliseconds(2));
    ASSERT_TRUE(c.until([&] { return c.a.up && c.b.up; }));
    std::vector<std::byte> from(64 * KiB, std::byte{5}), to(64 * KiB);
    const RegionId source = *c.a.engine->register_region(from, MemoryKind::host, kAnyAccess);
    const RegionId target = *c.b.engine->register_region(to, MemoryKind::host, kAnyAccess);
    const Write write{.context = 1,
                      .local = {source, 0},
                      .remote = {c.b.engine->remote(target), 0},
                      .length = from.size(),
                      .notify = 1};
    c.fabric.cut(*(at_connecting_end ? c.a : c.b).rails[1]);
    ASSERT_TRUE(c.a.engine->write(c.a.endpoint, {&write, 1}));
    ASSERT_TRUE(c.a.engine->send(c.a.endpoint, as_bytes("there")));
    ASSERT_TRUE(c.b.engine->send(c.b.endpoint, as_bytes("back")));
    ASSERT_TRUE(c.until([&] { return c.a.completed.contains(1) && !c.b.written.empty() && !c.a.messages.empty(); }));
    EXPECT_FALSE(c.a.completed[1]) << c.a.completed[1]->message;
    EXPECT_TRUE(same_bytes(from, to));
    EXPECT_EQ(c.b.messages, std::vector<std::string>{"there"});
    EXPECT_FALSE(c.a.closed || c.b.closed);
  }
}

void expect_the_end_after_two_stalls(Cluster& c, Side& end) {
  const TimePoint before = c.clock.now();
  while (!end.closed && c.clock.now() - before < 3 * kOptions.stall) {  // not to the slow rail's next event at once
    while (c.fabric.next_event() <= c.clock.now()) c.fabric.step();
    end.poll();
    c.clock.advance(std::chrono::microseconds(50));
  }
  EXPECT_TRUE(end.closed);
  EXPECT_GT(c.clock.now() - before, kOptions.stall);
  EXPECT_LT(c.clock.now() - before, kOptions.stall * 5 / 2);
}

// But not for ever.
TEST(Striped, ARailThatNeverComesUpIsWaitedForTwoStalls) {
  Cluster c(6, 2, std::chrono::seconds(3600));
  ASSERT_TRUE(c.until([&] { return c.a.up && c.b.up; }));
  c.fabric.kill(*c.a.rails[0]);
  c.fabric.kill(*c.a.rails[1]);
  expect_the_end_after_two_stalls(c, c.b);
}

// Nor does the connecting end wait for it longer, though it may be greeting for ever.
TEST(Striped, ARailThatNeverAnswersIsWaitedForTwoStallsByWhoConnectsIt) {
  Cluster c(6, 2, std::chrono::seconds(3600));
  ASSERT_TRUE(c.until([&] { return c.a.up && c.b.up; }));
  c.fabric.kill(*c.b.rails[1]);
  expect_the_end_after_two_stalls(c, c.a);
}

// As of one that dies later, at both ends.
TEST(Striped, ARailThatIsDeadFromTheStartIsLoggedOnce) {
  Cluster c(6, 2, std::chrono::seconds(3600));
  ASSERT_TRUE(c.until([&] { return c.a.up && c.b.up; }));
  spdlog::set_level(spdlog::level::info);
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  for (const TimePoint before = c.clock.now(); c.clock.now() - before < 20 * kOptions.stall;) {
    while (c.fabric.next_event() <= c.clock.now()) c.fabric.step();  // not to the slow rail's next event at once
    for (Side* side : {&c.a, &c.b}) side->poll();
    c.clock.advance(std::chrono::microseconds(50));
  }
  const std::string logged = testing::internal::GetCapturedStdout() + testing::internal::GetCapturedStderr();
  const std::string line = "rail 0 to a peer is down (it has not come up in 0.0 s); the others carry on";
  const auto first = logged.find(line);
  ASSERT_NE(first, std::string::npos) << logged;
  const auto second = logged.find(line, first + 1);
  ASSERT_NE(second, std::string::npos) << logged;
  EXPECT_EQ(logged.find("is down", second + line.size()), std::string::npos) << logged;
}

// A peer that stood still answers over one rail before it does over the other.
TEST(Striped, APauseOfThePeerTakesNoRailOut) {
  Cluster c(5);
  ASSERT_TRUE(c.until([&] { return c.a.up && c.b.up; }));
  for (int i = 0; i < 1000; ++i) c.turn();
  std::vector<std::byte> from(256 * KiB, std::byte{9}), to(256 * KiB);
  const RegionId source = *c.a.engine->register_region(from, MemoryKind::host, kAnyAccess);
  const RegionId target = *c.b.engine->register_region(to, MemoryKind::host, kAnyAccess);
  for (auto* rail : c.b.rails) c.fabric.stop(*rail);
  const Write write{
      .local = {source, 0}, .remote = {c.b.engine->remote(target), 0}, .length = from.size(), .notify = 1};
  ASSERT_TRUE(c.a.engine->write(c.a.endpoint, {&write, 1}));
  const TimePoint before = c.clock.now();
  while (c.clock.now() - before < 2 * kOptions.stall) c.turn();
  testing::internal::CaptureStdout();
  c.fabric.resume(*c.b.rails[0]);
  while (c.clock.now() - before < kOptions.stall * 17 / 8) c.turn();
  c.fabric.resume(*c.b.rails[1]);
  const bool written = c.until([&] { return !c.b.written.empty() && c.a.completed.contains(0); });
  for (int i = 0; i < 1000; ++i) c.turn();
  EXPECT_EQ(testing::internal::GetCapturedStdout().find("is down"), std::string::npos);
  EXPECT_TRUE(written);
  EXPECT_TRUE(same_bytes(from, to));
}

// Nor does one of its own, in which it had nothing under way: what it posts before it polls is not that old.
TEST(Striped, WhatIsPostedAfterAPauseIsNoOlderThanThat) {
  Cluster c(3);
  ASSERT_TRUE(c.until([&] { return c.a.up && c.b.up; }));
  for (int i = 0; i < 1000; ++i) c.turn();
  std::vector<std::byte> from(8 * KiB, std::byte{9}), to(8 * KiB);
  const RegionId source = *c.a.engine->register_region(from, MemoryKind::host, kAnyAccess);
  const RegionId target = *c.b.engine->register_region(to, MemoryKind::host, kAnyAccess);
  testing::internal::CaptureStdout();
  for (std::uint64_t i = 0; i < 2; ++i) {  // at the first, a asks for b's keys
    const Write write{.context = i,
                      .local = {source, 0},
                      .remote = {c.b.engine->remote(target), 0},
                      .length = from.size(),
                      .notify = i};
    ASSERT_TRUE(c.a.engine->write(c.a.endpoint, {&write, 1}));
    EXPECT_TRUE(c.until([&] {
      while (c.fabric.next_event() <= c.clock.now()) c.fabric.step();
      return c.a.completed.contains(i) && c.b.written.size() > i;
    }));
    for (int turn = 0; turn < 1000; ++turn) c.turn();
    c.clock.advance(100 * kOptions.stall);
    c.b.poll();
    c.fabric.slow(*c.a.rails[1], kOptions.stall * 3 / 5, {}, c.clock.now() + std::chrono::seconds(1));
  }
  EXPECT_EQ(testing::internal::GetCapturedStdout().find("is down"), std::string::npos);
}

TEST(Striped, ARailThatHangsIsTakenOutAndItsPiecesGoOverTheOthers) {
  Cluster c(5);
  ASSERT_TRUE(c.until([&] { return c.a.up && c.b.up; }));
  for (int i = 0; i < 1000; ++i) c.turn();
  std::vector<std::byte> from(256 * KiB, std::byte{9}), to(256 * KiB);
  const RegionId source = *c.a.engine->register_region(from, MemoryKind::host, kAnyAccess);
  const RegionId target = *c.b.engine->register_region(to, MemoryKind::host, kAnyAccess);
  c.fabric.stop(*c.b.rails[1]);  // it takes everything and does nothing
  for (std::uint64_t i = 0; i < 50; ++i) {
    const Write write{.context = i,
                      .local = {source, 0},
                      .remote = {c.b.engine->remote(target), 0},
                      .length = 256 * KiB,
                      .notify = i};
    ASSERT_TRUE(c.a.engine->write(c.a.endpoint, {&write, 1}));
    ASSERT_TRUE(c.until([&] { return c.a.completed.contains(i); })) << i;
    EXPECT_FALSE(c.a.completed[i]);
  }
  EXPECT_TRUE(same_bytes(from, to));
  EXPECT_FALSE(c.a.closed);
}

// As a flush has to be: behind what any rail has written.
TEST(Striped, AReadOnEachRailWaitsForEachThatIsUp) {
  Cluster c(8);
  ASSERT_TRUE(c.until([&] { return c.a.up && c.b.up; }));
  for (int i = 0; i < 1000; ++i) c.turn();
  std::vector<std::byte> from(64, std::byte{9}), to(64);
  const RegionId source = *c.b.engine->register_region(from, MemoryKind::host, kAnyAccess);
  const RegionId target = *c.a.engine->register_region(to, MemoryKind::host, kAnyAccess);
  std::uint64_t context = 0;
  const auto read = [&] {
    const Read one{.context = ++context,
                   .local = {target, 0},
                   .remote = {c.b.engine->remote(source), 0},
                   .length = 1,
                   .on_each_rail = true};
    EXPECT_TRUE(c.a.engine->read(c.a.endpoint, {&one, 1}));
    return context;
  };
  const auto first = read();
  ASSERT_TRUE(c.until([&] { return c.a.completed.contains(first); }));
  EXPECT_FALSE(c.a.completed[first]);
  EXPECT_EQ(to[0], std::byte{9});
  for (auto* rail : c.b.rails) {
    c.fabric.stop(*rail);
    const auto next = read();
    const TimePoint before = c.clock.now();
    while (c.clock.now() - before < kOptions.stall / 4) c.turn();
    EXPECT_FALSE(c.a.completed.contains(next)) << "one of them has not answered";
    c.fabric.resume(*rail);
    ASSERT_TRUE(c.until([&] { return c.a.completed.contains(next); }));
    EXPECT_FALSE(c.a.completed[next]);
  }
  c.fabric.cut(*c.a.rails[1]);
  const auto last = read();
  ASSERT_TRUE(c.until([&] { return c.a.completed.contains(last); }));
  EXPECT_FALSE(c.a.completed[last]) << "who is down writes nothing";
}

constexpr Options with_bulk_rail() {
  Options options = kOptions;
  options.first_bulk_rail = 1;
  options.least_bulk = 8 * KiB;
  return options;
}

// A rail for bulk that hangs holds up no message and nothing small, and bulk until it is taken out.
TEST(Striped, WhatIsSmallKeepsAwayFromRailsForBulk) {
  Cluster c(9, 2, {}, with_bulk_rail());
  ASSERT_TRUE(c.until([&] { return c.a.up && c.b.up; }));
  for (int i = 0; i < 1000; ++i) c.turn();
  std::vector<std::byte> from(64 * KiB, std::byte{9}), to(64 * KiB);
  const RegionId source = *c.a.engine->register_region(from, MemoryKind::host, kAnyAccess);
  const RegionId target = *c.b.engine->register_region(to, MemoryKind::host, kAnyAccess);
  const auto write = [&](std::uint64_t context, std::size_t length) {
    const Write one{
        .context = context, .local = {source, 0}, .remote = {c.b.engine->remote(target), 0}, .length = length};
    ASSERT_TRUE(c.a.engine->write(c.a.endpoint, {&one, 1}));
  };
  c.fabric.stop(*c.b.rails[1]);
  const TimePoint before = c.clock.now();
  for (std::uint64_t i = 0; i < 20; ++i) {
    write(i, 8 * KiB - 1);
    ASSERT_TRUE(c.a.engine->send(c.a.endpoint, as_bytes(std::to_string(i))));
  }
  write(100, 64 * KiB);
  ASSERT_TRUE(c.until([&] { return c.a.completed.size() == 20 && c.b.messages.size() == 20; }));
  EXPECT_LT(c.clock.now() - before, kOptions.stall / 2);
  EXPECT_FALSE(c.a.completed.contains(100));
  ASSERT_TRUE(c.until([&] { return c.a.completed.contains(100); }));
  EXPECT_FALSE(c.a.completed[100]);
  EXPECT_TRUE(same_bytes(from, to));
}

// Messages change over to a rail that comes up later than the one for bulk, and are heard once and in order.
TEST(Striped, MessagesLeaveARailForBulkAsSoonAsTheyCan) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(seed);
    Cluster c(seed, 2, std::chrono::milliseconds(1), with_bulk_rail());
    ASSERT_TRUE(c.until([&] { return c.a.up && c.b.up; }));
    EXPECT_EQ(told(*c.a.engine), "0/1 1/1 ");
    std::vector<std::string> sent;
    const auto send = [&] {
      sent.push_back(std::to_string(sent.size()));
      for (const Side* side : {&c.a, &c.b}) ASSERT_TRUE(side->engine->send(side->endpoint, as_bytes(sent.back())));
    };
    while (told(*c.a.engine) != "1/1 1/1 " || told(*c.b.engine) != "1/1 1/1 ") {
      send();
      for (int i = 0; i < 20; ++i) c.turn();
      ASSERT_LT(sent.size(), 1000u);
    }
    for (auto* side : {&c.a, &c.b}) c.fabric.stop(*side->rails[1]);
    const TimePoint before = c.clock.now();
    for (int i = 0; i < 20; ++i) send();
    ASSERT_TRUE(c.until([&] { return c.a.messages.size() >= sent.size() && c.b.messages.size() >= sent.size(); }));
    EXPECT_LT(c.clock.now() - before, kOptions.stall * 3 / 4);
    EXPECT_EQ(c.a.messages, sent);
    EXPECT_EQ(c.b.messages, sent);
  }
}

TEST(Striped, OtherCountsOfRailsUseWhatBothHave) {
  VirtualClock clock;
  sim::Fabric fabric({}, clock);
  const auto make = [&](int rails) {
    std::vector<std::unique_ptr<Engine>> engines;
    for (int i = 0; i < rails; ++i) engines.push_back(fabric.make_engine());
    return *make_engine(std::move(engines), kOptions, clock);
  };
  auto a = make(3), b = make(2);
  const EndpointId endpoint = *a->connect(*b->listen({"sim"}), {});
  std::vector<std::byte> from(100 * KiB, std::byte{3}), to(100 * KiB);
  const RegionId source = *a->register_region(from, MemoryKind::host, kAnyAccess),
                 target = *b->register_region(to, MemoryKind::host, kAnyAccess);
  bool done = false;
  for (int i = 0; i < 10000 && !done; ++i) {
    if (!fabric.step()) clock.advance(std::chrono::microseconds(100));
    for (const auto& event : a->poll()) {
      if (event.kind == EventKind::connected) {
        const Write write{
            .context = 1, .local = {source, 0}, .remote = {b->remote(target), 0}, .length = 100 * KiB, .notify = 1};
        ASSERT_TRUE(a->write(endpoint, {&write, 1}));
      }
      done |= event.kind == EventKind::completed && !event.error;
    }
    b->poll();
  }
  EXPECT_TRUE(done);
  EXPECT_TRUE(same_bytes(from, to));
  EXPECT_EQ(told(*a), "1/1 1/1 0/0 ");
  EXPECT_EQ(told(*b), "1/1 1/1 ");
}

TEST(Striped, NoRailsOrTooManyAreRefused) {
  VirtualClock clock;
  sim::Fabric fabric({}, clock);
  EXPECT_FALSE(make_engine({}, {}, clock));
  std::vector<std::unique_ptr<Engine>> many;
  for (int i = 0; i < 17; ++i) many.push_back(fabric.make_engine());
  auto made = make_engine(std::move(many), {}, clock);
  ASSERT_FALSE(made);
  EXPECT_NE(made.error().message.find("1 to 16"), std::string::npos);
}

}  // namespace
}  // namespace rejoin::transport::striped
