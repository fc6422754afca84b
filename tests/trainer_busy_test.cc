// Trainers that have said that they are busy: for how long they are waited for, and what everybody says of it.
#include <gtest/gtest.h>

#include <optional>

#include "tests/trainer_support.h"

namespace rejoin::test {
namespace {

// Two that have run steps enough to know what is usual; the second goes on in a thread.
struct Busy : Trained {
  std::unique_ptr<Session> first, second;
  std::optional<Training> other;

  void start_two(std::chrono::milliseconds between_steps = SessionConfig().between_steps) {
    start(2, 1, 0, 1s);
    auto its = config(0);
    its.between_steps = between_steps;
    first = declared(its), second = joined(1);
    ASSERT_TRUE(first && second && first->join());
    other.emplace(trains(*second));
    for (int i = 0; i < 8; ++i) ASSERT_TRUE(step_once(*first));
  }
  std::string told() const { return run({kCli, "status", coordinator_status}).output; }
  bool tells(const std::string& what) const {
    return eventually([&] { return told().find(what) != std::string::npos; });
  }
  std::size_t members() const { return status().at("members").size(); }
};

TEST_F(Busy, WithinAStepOneIsWaitedForAndTheStatusSaysWithWhatItIsBusy) {
  ASSERT_NO_FATAL_FAILURE(start_two());
  ASSERT_TRUE(*first->begin_step());
  ASSERT_TRUE(first->all_reduce(0));
  ASSERT_TRUE(first->busy(60s, "a check\npoint"));
  EXPECT_FALSE(eventually([&] { return members() != 2; }, 4s)) << "four silences";
  EXPECT_TRUE(tells("replica 0 rank 0: its reduction of step 9")) << told();
  EXPECT_TRUE(tells("the step waits for its trainer, which has been busy with 'a check?point' for ")) << told();
  EXPECT_TRUE(tells(" s, of the 60.0 s that it may be; replica 1 waits for it: ")) << told();
  ASSERT_TRUE(first->done());
  ASSERT_TRUE(first->all_reduce(1));
  ASSERT_TRUE(commit(*first));
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(step_once(*first));
  EXPECT_EQ(status().at("epoch"), 1u) << status().dump();
  first->interrupt(), second->interrupt();
  other->get();
}

TEST_F(Busy, BetweenStepsOneIsWaitedForLongerThanAnybodyMayTake) {
  ASSERT_NO_FATAL_FAILURE(start_two(200ms));
  ASSERT_TRUE(first->busy(60s, "evaluating"));
  EXPECT_FALSE(eventually([&] { return members() != 2; }, 4s)) << "four silences";
  EXPECT_TRUE(tells("its trainer, which has been busy with 'evaluating' for ")) << told();
  ASSERT_TRUE(first->done());
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(step_once(*first));
  EXPECT_EQ(status().at("epoch"), 1u) << status().dump();
  first->interrupt(), second->interrupt();
  other->get();
}

TEST_F(Busy, OneMayBeBeforeItHasJoined) {
  start(1);
  first = declared(config(0));
  ASSERT_TRUE(first->busy(60s, "compiling"));
  ASSERT_TRUE(first->join());
  EXPECT_TRUE(tells("its trainer, which has been busy with 'compiling' for ")) << told();
  ASSERT_TRUE(first->done());
  EXPECT_TRUE(step_once(*first));
}

TEST_F(Busy, ForLongerThanItSaidOneIsOutAndEverybodySaysWhy) {
  ASSERT_NO_FATAL_FAILURE(start_two());
  ASSERT_TRUE(*first->begin_step());
  ASSERT_TRUE(first->busy(500ms, "evaluating"));
  EXPECT_TRUE(eventually([&] { return committed() > 10; })) << "the other one goes on: " << told();
  const std::string log = log_of("coordinator");
  EXPECT_NE(log.find("replica 0 is out"), std::string::npos) << log;
  EXPECT_NE(log.find("its trainer, which has been busy with 'evaluating' for"), std::string::npos) << log;
  EXPECT_NE(log.find("longer than the 0.5 s that it had asked for"), std::string::npos) << log;
  EXPECT_TRUE(eventually([&] {
    const auto refused = commit(*first);  // without its buckets, which changes nothing
    return !refused && refused.error().code == ErrorCode::cancelled;
  }));
  EXPECT_REFUSED(first->done(), ErrorCode::cancelled, "this replica is out of the job", "evaluating");
  EXPECT_REFUSED(first->all_reduce(0), ErrorCode::cancelled, "this replica is out of the job", "evaluating");
  second->interrupt();
  other->get();
}

TEST_F(Busy, WhatCanNotBeIsRefusedByName) {
  start(1);
  first = joined(0);
  ASSERT_TRUE(first);
  EXPECT_REFUSED(first->busy(0s, "x"), ErrorCode::invalid_argument, "'x' for up to 0 ms; there must be 1 to 604800000");
  EXPECT_REFUSED(first->busy(8 * 24h, "x"), ErrorCode::invalid_argument, "there must be 1 to 604800000");
  EXPECT_REFUSED(first->busy(1s, ""), ErrorCode::invalid_argument, "a reason of 0 bytes; there must be 1 to 200");
  EXPECT_REFUSED(first->busy(1s, std::string(201, 'x')), ErrorCode::invalid_argument, "a reason of 201 bytes");
  EXPECT_REFUSED(first->done(), ErrorCode::invalid_argument, "done() without busy()");
  ASSERT_TRUE(first->busy(1s, "one"));
  EXPECT_REFUSED(first->busy(1s, "two"), ErrorCode::invalid_argument, "with 'two', but busy with 'one' already");
  ASSERT_TRUE(step_once(*first)) << "it may go on for some steps";
  ASSERT_TRUE(first->done());
  first->interrupt();
  EXPECT_REFUSED(first->busy(1s, "x"), ErrorCode::cancelled, "interrupt() was called");
  EXPECT_REFUSED(first->done(), ErrorCode::cancelled, "interrupt() was called");
}

}  // namespace
}  // namespace rejoin::test
