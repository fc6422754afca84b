// What a rank's driver tells the others of its trainer, and its trainer of the others.
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "rejoin/log.h"
#include "rejoin/tests/lone_driver.h"

namespace rejoin {
namespace {

// From the step's beginning to the last gradient, without what the trainer was busy with; nothing of a step in which
// the process was paused.
TEST(Driver, ReportsHowLongItsTrainerComputes) {
  Alone rank;
  rank.register_it();
  rank.plan_with_peers(0);
  std::uint64_t step = 0;
  const auto reported = [&](const std::function<void()>& computes) {
    rank.driver->take(++step, rank.now);
    computes();
    rank.driver->want({true}, rank.now);
    rank.pass(70ms);  // the exchange
    std::optional<std::uint64_t> us;
    for (const auto& report : rank.driver->take_reports())
      if (report.has_reduced()) us = report.reduced().compute_us();
    EXPECT_TRUE(us);
    proto::ToNode next;
    *next.mutable_plan() = rank.driver->machine().plan();
    next.mutable_plan()->set_committed(step);
    next.mutable_plan()->set_step(step + 1);
    rank.driver->on_control_message(next, rank.now);
    rank.pass(30ms);
    return us.value_or(0);
  };
  EXPECT_EQ(reported([&] { rank.pass(20ms), rank.pass(20ms); }), 40'000u);
  EXPECT_EQ(reported([] {}), 1u) << "it has taken some time";
  EXPECT_EQ(reported([&] {
              rank.pass(10ms);
              rank.driver->occupy(
                  Driver::Occupation{.reason = "a checkpoint", .since = rank.now, .until = rank.now + 1s}, rank.now);
              rank.pass(100ms);
              rank.driver->occupy(std::nullopt, rank.now);
              rank.pass(5ms);
            }),
            15'000u);
  EXPECT_EQ(reported([&] {
              rank.driver->occupy(Driver::Occupation{.reason = "x", .since = rank.now - 50ms, .until = rank.now + 1s},
                                  rank.now);
              rank.pass(100ms);
            }),
            1u)
      << "busy to the end";
  rank.driver->occupy(std::nullopt, rank.now);
  EXPECT_EQ(reported([&] { rank.pass(kSilence); }), 0u);
  EXPECT_EQ(reported([&] { rank.pass(30ms); }), 30'000u);
}

// A trainer that reads each step's data itself.
struct Reader {
  // Returns how much later than the step's beginning the others were told of it, where they were.
  std::optional<Duration> told_in_step(Duration reads) {
    std::optional<Duration> told;
    const TimePoint begun = rank.now;
    const auto hear = [&] {
      for (const auto& report : rank.driver->take_reports()) {
        if (report.accusation().excused() && !told) told = rank.now - begun;
        if (report.has_reduced()) compute_us = report.reduced().compute_us();
      }
    };
    rank.driver->take(++step, rank.now);
    rank.driver->occupy(
        Driver::Occupation{.reason = "its data", .since = begun, .until = begun + 2min, .computes = true}, rank.now);
    while (rank.now < begun + reads) rank.pass(10ms), hear();
    rank.driver->occupy(std::nullopt, rank.now);
    rank.pass(10ms), hear();
    rank.driver->want({true}, rank.now);
    rank.pass(1ms), hear();
    proto::ToNode next;
    *next.mutable_plan() = rank.driver->machine().plan();
    next.mutable_plan()->set_committed(step);
    next.mutable_plan()->set_step(step + 1);
    next.mutable_plan()->set_excused(told.has_value());
    rank.driver->on_control_message(next, rank.now);
    return told;
  }
  Alone rank{{}, {}, 64, DriverConfig{}.first_steps};
  std::uint64_t step = 0, compute_us = 0;
};

// Of what each step does the others hear when it takes longer than steps do, before they would take it for hanging; and
// nobody but those who have just come says so of steps that all take long: nobody would learn how long steps are.
TEST(Driver, WhatEachStepIsBusyWithIsComputingAndIsToldOfWhenItTakesUnusuallyLong) {
  Reader one;
  one.rank.register_it();
  one.rank.plan_with_peers(0);
  for (int i = 0; i < 8; ++i) EXPECT_GT(one.told_in_step(600ms), kSilence / 2) << i;
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(one.told_in_step(600ms)) << i;
  EXPECT_EQ(one.compute_us, 610'000u);
  for (int i = 0; i < 16; ++i) EXPECT_FALSE(one.told_in_step(50ms)) << i;
  const auto told = one.told_in_step(6s);
  ASSERT_TRUE(told);
  EXPECT_GT(*told, kSilence / 2);
  EXPECT_LT(*told, kSilence);
  EXPECT_FALSE(one.told_in_step(50ms));
}

// Found with a data set that was read from a cold cache after a restart: in its ninth step it told nobody, and was out.
TEST(Driver, WhoHasCaughtUpTellsOfLongStepsUntilItHasSeenOthers) {
  Reader one;
  one.rank.register_it();
  one.rank.plan_with_peers(0, 1, true);
  one.rank.plan_with_peers(0, 2);
  for (int i = 0; i < 20; ++i) EXPECT_LT(one.told_in_step(3s), kSilence) << i;
  for (int i = 0; i < 16; ++i) EXPECT_FALSE(one.told_in_step(50ms)) << i;
  EXPECT_TRUE(one.told_in_step(3s));
}

// Found with a data set that was busy by itself: the thread that tells the others saw no time between that and the rest
// of what the step reads, and when that computed for longer than a silence the replica was out.
TEST(Driver, WhoHasBeenBusyOtherwiseWithinItsReadingMayTakeItsTimeWithTheStep) {
  Reader one;
  one.rank.register_it();
  one.rank.plan_with_peers(0);
  for (int i = 0; i < 16; ++i) one.told_in_step(50ms);
  auto& rank = one.rank;
  rank.driver->take(++one.step, rank.now);
  const auto read = [&] {
    rank.driver->occupy(
        Driver::Occupation{.reason = "its data", .since = rank.now, .until = rank.now + 2min, .computes = true},
        rank.now);
  };
  read();
  rank.pass(10ms);
  rank.driver->occupy(Driver::Occupation{.reason = "a large file", .since = rank.now, .until = rank.now + 2min},
                      rank.now);
  for (int i = 0; i < 80; ++i) rank.pass(kSilence / 16);
  read();
  rank.driver->occupy(std::nullopt, rank.now);
  (void)rank.driver->take_reports();
  TimePoint last{};
  const TimePoint released = rank.now;
  while (rank.now < released + kSilence) {
    rank.pass(kSilence / 16);
    for (const auto& report : rank.driver->take_reports())
      if (report.accusation().excused()) last = rank.now;
  }
  EXPECT_GE(last, released + kSilence / 2) << "it goes on with the step";
}

// A first step compiles and loads, however short a time the daemon is waited for.
TEST(Driver, AFirstStepMayTakeAMinuteWhateverThePatienceWithTheDaemon) {
  Alone rank({}, {}, 64, DriverConfig{}.first_steps);
  rank.register_it();
  rank.plan_with_peers(0);
  for (int i = 0; i < 16; ++i) rank.pass(kSilence / 16);  // it begins the step late, which its driver tells the others
  rank.driver->take(1, rank.now);
  const TimePoint begun = rank.now;
  TimePoint last{};
  while (rank.now < begun + 2min) {
    rank.pass(kSilence / 16);
    for (const auto& report : rank.driver->take_reports())
      if (report.accusation().excused() && report.accusation().suspect() == 100) last = rank.now;
  }
  EXPECT_GE(last, begun + 59s);
  EXPECT_LE(last, begun + 60s);
}

// What its trainer says, or may take between steps, is not used up by a time in which the process did not run.
TEST(Driver, APauseOfTheProcessIsNotCountedAgainstATrainerThatMayTakeItsTime) {
  Alone rank;
  rank.register_it();
  rank.plan_with_peers(0);
  const auto excused_after = [&](Duration time) {
    TimePoint last{};
    for (const TimePoint until = rank.now + time; rank.now < until;) {
      rank.pass(kSilence / 16);
      for (const auto& report : rank.driver->take_reports())
        if (report.accusation().excused() && report.accusation().suspect() == 100) last = rank.now;
    }
    return rank.now - last <= kSilence / 4;
  };
  EXPECT_TRUE(excused_after(8min)) << "between steps";
  rank.pass(20min);
  EXPECT_TRUE(excused_after(1min));
  EXPECT_FALSE(excused_after(2min)) << "ten minutes are over";
  rank.driver->take(1, rank.now);
  EXPECT_TRUE(excused_after(300ms));
  rank.pass(20min);
  EXPECT_TRUE(excused_after(kSilence / 2)) << "it has begun late";
  EXPECT_FALSE(excused_after(4 * kSilence));

  // It says that it is busy in the middle of a pause of the thread that looks.
  const TimePoint paused_at = rank.now;
  rank.driver->occupy(Driver::Occupation{.reason = "x", .since = paused_at + 3s, .until = paused_at + 6s}, rank.now);
  rank.pass(4s);
  std::optional<std::uint64_t> waited_ms;
  while (!waited_ms && rank.now < paused_at + 5s) {
    rank.pass(kSilence / 16);
    for (const auto& report : rank.driver->take_reports())
      if (report.accusation().suspect() == 100) waited_ms = report.accusation().waited_ms();
  }
  ASSERT_TRUE(waited_ms);
  EXPECT_LT(*waited_ms, 1000u);
}

TEST(Driver, SaysOnceWhatTheJobWaitsForHoweverOftenItsNodeIsTold) {
  Alone rank;
  rank.register_it();
  std::vector<std::string> lines;
  set_log([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  set_log_level(LogLevel::warn);
  const auto hear = [&](const std::string& why, bool stands = false) {
    proto::ToNode message;
    message.mutable_waits()->set_why(why);
    message.mutable_waits()->set_stands(stands);
    rank.driver->on_control_message(message, rank.now);
  };
  for (const char* why :
       {"replica 1: 0 of 2 ranks have registered", "replica 1: 0 of 2 ranks have registered",
        "replica 1: 1 of 2 ranks have registered", "replica 2: silent for 30 ms", "replica 2: silent for 1.5 s"})
    hear(why);
  for (int i = 0; i < 2; ++i) hear("its relay", true);
  set_log_level(LogLevel::off);
  set_log({});
  EXPECT_EQ(lines, (std::vector<std::string>{"the job waits for replica 1: 0 of 2 ranks have registered",
                                             "the job waits for replica 1: 1 of 2 ranks have registered",
                                             "the job waits for replica 2: silent for 30 ms",
                                             "the job waits for its relay", "the job waits for its relay"}));
}

TEST(Driver, WhoHasNotCaughtUpWhenTheJobEndsSaysSo) {
  for (const bool catching_up : {true, false}) {
    Alone rank;
    std::string said;
    set_log([&](LogLevel, std::string_view line) { said += line; });
    set_log_level(LogLevel::warn);
    rank.register_it();
    rank.plan_with_peers(2, 1, catching_up);
    proto::ToNode message;
    *message.mutable_plan() = rank.driver->machine().plan();
    message.mutable_plan()->set_committed(1);
    message.mutable_plan()->set_step(2);
    message.mutable_plan()->set_finished(true);
    rank.driver->on_control_message(message, rank.now);
    for (int sixteenths = 0; sixteenths < 80; ++sixteenths) rank.pass(kSilence / 16);  // trainers save, and evaluate
    set_log({});
    EXPECT_TRUE(rank.driver->finished() && !rank.driver->over());
    EXPECT_EQ(said.find("waits for"), std::string::npos) << said;
    for (const auto& made : rank.driver->take_reports()) EXPECT_FALSE(made.has_accusation());
    const std::string line = "the job was finished with step 1 before this replica had caught up: its state is not";
    EXPECT_EQ(said.find(line), catching_up ? 0 : std::string::npos) << said;
  }
}

}  // namespace
}  // namespace rejoin
