// Clocks that are far apart, drift, and stand while their machines are suspended.
#include "daemon/clock_offsets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "daemon/tests/made_up_recording.h"

namespace rejoin::daemon {
namespace {

constexpr std::int64_t kSecond = 1000 * ms;

// Machine 2 is ahead by so much, and gains 50 us in a second; 3 talks with 2 alone.
TEST(ClockOffsets, AreFoundToWithinTheirStatedErrorHoweverUnequalTheWays) {
  constexpr std::int64_t second = 1000 * ms, ahead = -3 * 86400 * second, third = 17 * second;
  const auto second_clock = [&](std::int64_t t) { return t + ahead + t / 20'000; };
  const auto third_clock = [&](std::int64_t t) { return second_clock(t) + third; };
  std::vector<StampedMessage> messages;
  for (std::int64_t t = 4 * 86400 * second, i = 0; i < 600; ++i, t += 250 * ms) {
    const std::int64_t there = 50'000 + i * 7919 % 900'000, back = 400'000 + i * 104729 % 2'000'000;
    messages.push_back({1, 2, t, second_clock(t + there)});
    messages.push_back({2, 1, second_clock(t + 10 * ms), t + 10 * ms + back});
    messages.push_back({2, 3, second_clock(t), third_clock(t + there)});
    messages.push_back({3, 2, third_clock(t + 20 * ms), second_clock(t + 20 * ms + back)});
    messages.push_back({4, 1, t, t});  // and nothing in the other direction
  }
  const ClockOffsets offsets(messages, 1);
  for (std::int64_t t = 4 * 86400 * second + 20 * second; t < 4 * 86400 * second + 130 * second; t += second) {
    const auto two = offsets.on_reference(2, second_clock(t)), three = offsets.on_reference(3, third_clock(t));
    ASSERT_TRUE(two && three);
    // The drift within half a minute comes on top of how unequal the ways are.
    EXPECT_LE(std::abs(two->at - t), two->error);
    EXPECT_LE(two->error, 1200'000);
    EXPECT_LE(std::abs(three->at - t), three->error);
    EXPECT_GT(three->error, two->error);
  }
  EXPECT_EQ(offsets.on_reference(1, 5)->at, 5);
  EXPECT_FALSE(offsets.on_reference(4, 5)) << "one direction says nothing";
  EXPECT_FALSE(offsets.on_reference(9, 5));
}

// Of two machines one is suspended for ten minutes; they talk four times a second, but for that time.
struct Suspended {
  static constexpr std::int64_t since = 1025 * kSecond, lasts = 600 * kSecond, until = since + lasts;
  MadeUp coordinator{"coordinator", 1}, node{"node2", 2};
  const bool coordinator_is;
  explicit Suspended(bool is) : coordinator_is(is) {
    for (std::int64_t t = 1000 * kSecond; t < until + 40 * kSecond; t += 250 * ms) {
      if (t >= since && t < until) continue;
      node.add(by(node, t + 1 * ms), events::Kind::heard, {.a = 1, .b = stamp(coordinator, t)});
      coordinator.add(by(coordinator, t + 2 * ms), events::Kind::heard, {.a = 2, .b = stamp(node, t + 1 * ms)});
    }
  }
  std::int64_t by(const MadeUp& whose, std::int64_t t) const {
    const bool its = (&whose == &coordinator) == coordinator_is;
    const std::int64_t stood = its ? std::clamp<std::int64_t>(t - since, 0, lasts) : 0;
    return t - stood + (&whose == &node ? 7 * kSecond : 0);
  }
  std::uint64_t stamp(const MadeUp& whose, std::int64_t t) const { return static_cast<std::uint64_t>(by(whose, t)); }
  // When the coordinator's clock was so, and where the node's plan of then is now.
  std::pair<std::int64_t, Recordings> plan(std::int64_t t) {
    node.add(by(node, t), events::Kind::plan);
    coordinator.add(by(coordinator, t), events::Kind::epoch, {.epoch = 1}, "0\nstart");
    auto joined = join({coordinator.recording(), node.recording()});
    const auto& events = joined.all[1].events;
    return {std::ranges::find(events, events::Kind::plan, &RecordedEvent::kind)->at, std::move(joined)};
  }
};

TEST(ClockOffsets, AMachineThatIsSuspendedIsPlacedRightBeforeAndBehind) {
  for (const bool coordinator : {false, true})
    for (const std::int64_t t : {Suspended::since - 20 * ms, Suspended::since - 4 * kSecond,
                                 Suspended::until + 300 * ms, Suspended::until + 20 * kSecond}) {
      Suspended of(coordinator);
      const auto [at, joined] = of.plan(t);
      EXPECT_LE(std::abs(at - of.by(of.coordinator, t)), joined.clock_error) << coordinator << " " << t;
      EXPECT_LE(joined.clock_error, 10 * ms);
      EXPECT_THAT(joined.notes, testing::Contains(testing::HasSubstr("has stood for 600")).Times(coordinator ? 0 : 1));
    }
}

// By the coordinator's clock that is one moment.
TEST(ClockOffsets, WhatANodeDoesWhileTheCoordinatorIsSuspendedStaysBetweenWhatItDoesBeforeAndBehind) {
  Suspended of(true);
  const auto [at, joined] = of.plan(Suspended::since + 300 * kSecond);
  EXPECT_LE(std::abs(at - Suspended::since), 300 * ms);
}

TEST(Recordings, HaveTheTimeOfTheDayThatItWasThen) {
  constexpr std::int64_t day = 1'790'000'000 * kSecond, slept = 3600 * kSecond;
  MadeUp coordinator("coordinator", 1);
  for (std::int64_t t = 0; t < 20 * kSecond; t += kSecond)
    coordinator.add(t, events::Kind::beat, {.a = static_cast<std::uint64_t>(day + t + (t < 10 * kSecond ? 0 : slept))});
  const auto joined = join({coordinator.recording()});
  EXPECT_EQ(joined.wall(3 * kSecond + 1), day + 3 * kSecond + 1);
  EXPECT_EQ(joined.wall(15 * kSecond), day + 15 * kSecond + slept);
  EXPECT_EQ(joined.wall(60 * kSecond), day + 60 * kSecond + slept);
}

}  // namespace
}  // namespace rejoin::daemon
