// A trainer's steps: what they and their updates say, and an optimizer that throws in one.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <future>
#include <new>
#include <stdexcept>
#include <utility>

#include "base/bytes.h"
#include "base/text.h"
#include "tests/trainer_support.h"

// A thread that asks for more at once gets none, as where there is a limit to memory.
static thread_local std::size_t most_at_once = ~std::size_t{0};
void* operator new(std::size_t size) {
  void* const made = size <= most_at_once ? std::malloc(size) : nullptr;
  if (made == nullptr) throw std::bad_alloc();
  return made;
}
void operator delete(void* gone) noexcept { std::free(gone); }
void operator delete(void* gone, std::size_t) noexcept { std::free(gone); }

namespace rejoin::test {
namespace {

// ---- the optimizer throws

TEST_F(Trained, WhatTheOptimizerThrowsIsTheCallersErrorAndEndsTheSession) {
  start(2);
  auto first = joined(0), second = joined(1);
  ASSERT_TRUE(first && second);
  auto other = trains(*second);
  ASSERT_TRUE(step_once(*first));
  ASSERT_TRUE(*first->begin_step());
  ASSERT_TRUE(first->all_reduce(0));
  ASSERT_TRUE(first->all_reduce(1));
  int calls = 0;
  const auto throwing = [&](const Update&) {
    if (++calls == 2) throw std::runtime_error("no such \xff kernel\n");
  };
  EXPECT_REFUSED(first->commit(throwing), ErrorCode::cancelled, "the optimizer threw in the update of step 2",
                 "no such", "kernel", "replica 0 rank 0", "Start the process again");
  for (const auto& later : {first->commit(throwing), first->all_reduce(0), first->join(), first->check()})
    EXPECT_REFUSED(later, ErrorCode::cancelled, "the optimizer threw in the update of step 2");
  EXPECT_REFUSED(first->begin_step(), ErrorCode::cancelled, "the optimizer threw in the update of step 2");
  EXPECT_REFUSED(first->state_digest(), ErrorCode::cancelled, "the optimizer threw");
  EXPECT_REFUSED(first->position(), ErrorCode::cancelled, "the optimizer threw");
  EXPECT_FALSE(first->version()) << "half of it is updated";
  EXPECT_EQ(calls, 2);
  // The other one goes on at once, though this process lives on, and everybody says why.
  EXPECT_LT(timed([&] { EXPECT_TRUE(eventually([&] { return committed() > 20; })) << status().dump(); }), kSilence);
  EXPECT_NE(log_of("coordinator").find("it has left: the optimizer threw in the update of step 2"), std::string::npos)
      << log_of("coordinator");
  EXPECT_TRUE(first->leave()) << "it has, already";
  second->interrupt();
  EXPECT_EQ(other.get().code, ErrorCode::cancelled);
}

TEST_F(Trained, AnOptimizerThatThrowsSomethingElseIsNoAbortEither) {
  start(1);
  auto session = joined(0);
  ASSERT_TRUE(session);
  ASSERT_TRUE(*session->begin_step());
  ASSERT_TRUE(session->all_reduce(0) && session->all_reduce(1));
  EXPECT_REFUSED(session->commit([](const Update&) { throw 7; }), ErrorCode::cancelled,
                 "something that is no std::exception");
}

// A trainer that goes on after that would keep all others in this step.
TEST_F(Trained, AnUpdateThatThereIsNoMemoryForEndsTheSession) {
  start(1);
  auto session = Session::open(config(0)).value();
  std::vector<TensorId> tensors;
  for (int i = 0; i < 1000; ++i) tensors.push_back(session->add({.name = fmt::format("t{}", i), .count = 1}).value());
  ASSERT_TRUE(session->bucket(tensors) && session->allocate() && session->join());
  ASSERT_TRUE(*session->begin_step());
  ASSERT_TRUE(session->all_reduce(0));
  most_at_once = 1000;
  const auto begun = session->begin_update();
  most_at_once = ~std::size_t{0};
  EXPECT_REFUSED(begun, ErrorCode::cancelled, "memory ran out in the update of step 1", "replica 0 rank 0",
                 "Start the process again");
  EXPECT_REFUSED(session->begin_step(), ErrorCode::cancelled, "memory ran out");
  EXPECT_REFUSED(session->position(), ErrorCode::cancelled, "memory ran out");
  EXPECT_FALSE(session->version());
}

// Page and locks are the parent's, whose update goes on.
TEST_F(Trained, AnUpdateThatFailsInAChildOfTheProcessIsNotItsParents) {
  start(1);
  auto session = joined(0);
  ASSERT_TRUE(*session->begin_step());
  ASSERT_TRUE(session->all_reduce(0) && session->all_reduce(1));
  ASSERT_TRUE(*session->begin_update());
  const auto ends_well = [](pid_t child) {
    int status = -1;
    return ::waitpid(child, &status, 0) == child && status == 0;
  };
  const auto exit_told = [](const std::string& message) {
    ::_exit(message.find("is a child of it") != std::string::npos ? 0 : 1);
  };
  pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    exit_told(session->abandon_update("in a child").message);
  }
  EXPECT_TRUE(ends_well(child));
  EXPECT_TRUE(session->end_update());

  ASSERT_TRUE(*session->begin_step());
  ASSERT_TRUE(session->all_reduce(0) && session->all_reduce(1));
  child = -1;
  const auto committed = session->commit([&](const Update&) {
    if (child >= 0 || (child = ::fork()) != 0) return;
    ::alarm(20);
    throw std::runtime_error("in a child");
  });
  if (child == 0) exit_told(committed ? "" : committed.error().message);
  EXPECT_TRUE(ends_well(child));
  EXPECT_TRUE(committed);
  EXPECT_TRUE(step_once(*session));
}

// A state that is updated in part is nobody's source: who starts afresh gets the other replica's, whole.
TEST_F(Trained, AJoinerIsServedNothingOfAnUpdateThatBrokeOff) {
  start(2);
  auto first = joined(0, kMuch), second = joined(1, kMuch);
  ASSERT_TRUE(first && second);
  std::atomic<std::uint64_t> steps = 0;
  auto other = trains(*second, &steps);
  ASSERT_TRUE(step_once(*first));
  ASSERT_TRUE(*first->begin_step());
  ASSERT_TRUE(first->all_reduce(0) && first->all_reduce(1));
  EXPECT_FALSE(first->commit([&](const Update& update) {
    const auto its = update.of(Session::as<float>(*first->weight(update.tensor)));
    std::fill(its.begin(), its.end(), -1e9f);
    throw std::runtime_error("in the middle");
  }));
  auto again = joined(0, kMuch);  // its next instance; the one that failed is still there
  ASSERT_TRUE(again);
  bool contributed = false;
  for (int i = 0; i < 10'000 && !contributed; ++i) {
    auto step = again->begin_step();
    ASSERT_TRUE(step && *step);
    contributed = (*step)->contributes();
    if (contributed) break;
    ASSERT_TRUE(commit(*again));
  }
  ASSERT_TRUE(contributed);
  const auto n = static_cast<float>(*again->version());
  for (const float x : Session::as<float>(*again->weight(w))) ASSERT_EQ(x, n);
  again->interrupt();
  ASSERT_TRUE(again->leave());
  second->interrupt();
  other.get();
}

TEST(Printable, TextOfUnknownOriginIsOneLineOfUtf8) {
  EXPECT_EQ(printable("2 × 3 ≥ 𝄞", 100), "2 × 3 ≥ 𝄞");
  EXPECT_EQ(printable("a\nb\x7f\x01", 100), "a?b??");
  EXPECT_EQ(printable("\xff\xc3[\xe2\x82", 100), "??[??") << "half a character is none";
  EXPECT_EQ(printable("\xc0\xaf\xed\xa0\x80\xf4\x90\x80\x80", 100), "?????????")
      << "nor too long, nor a surrogate, nor beyond the last";
  EXPECT_EQ(printable("ab×", 3), "ab") << "cut behind a whole one";
  EXPECT_EQ(printable("ab×", 4), "ab×");
}

TEST(WithoutTimes, ATextIsTheSameWhileTimesInItGoOn) {
  EXPECT_EQ(without_times("rank 2, for 30 ms: 1.5 s; 2 of 3 ranks in 20 slots, 7 s"),
            "rank 2, for : ; 2 of 3 ranks in 20 slots, ");
  EXPECT_EQ(without_times("10.0.0.7:12 ms"), "10.0.0.7:");
  EXPECT_EQ(without_times("4 m 5"), "4 m 5");
  EXPECT_EQ(without_times(""), "");
}

// ---- what a step's gradients are the mean of, and the version after it

TEST_F(Trained, AStepSaysHowManyContributeAndAnUpdateHowManyHave) {
  start(3);
  std::vector<std::unique_ptr<Session>> sessions;
  for (std::uint32_t r = 0; r < 3; ++r) sessions.push_back(joined(r));
  for (auto& session : sessions) {
    ASSERT_TRUE(session);
    auto step = session->begin_step();
    ASSERT_TRUE(step && *step);
    EXPECT_EQ((*step)->contributors(), 3u);
  }
  for (auto r : {0, 1})
    for (BucketId bucket : {0, 1}) ASSERT_TRUE(sessions[r]->all_reduce(bucket));
  ASSERT_TRUE(sessions[2]->leave());
  const auto contributors = [](Session& session) {
    std::vector<std::uint32_t> of;
    auto done = session.commit([&](const Update& update) { of.push_back(update.contributors); });
    EXPECT_TRUE(done) << done.error().message;
    return of;
  };
  auto other = std::async(std::launch::async, [&] { return contributors(*sessions[1]); });
  EXPECT_EQ(contributors(*sessions[0]), (std::vector<std::uint32_t>{2, 2}));
  EXPECT_EQ(other.get(), (std::vector<std::uint32_t>{2, 2}));
  EXPECT_EQ((*sessions[0]->begin_step())->contributors(), 2u);
}

// A joiner's updates are of steps that were decided with different members, and of parts of tensors.
TEST_F(Trained, AJoinersUpdatesHaveTheContributorsOfTheirStepAndBordersThatFitEverybodys) {
  start(2);
  auto first = joined(0, kMuch), second = joined(1, kMuch);
  ASSERT_TRUE(first && second);
  auto other = trains(*second);
  ASSERT_TRUE(step_once(*first));
  ASSERT_TRUE(first->leave());
  auto again = joined(0, kMuch);
  ASSERT_TRUE(again);
  std::size_t parts = 0;
  bool contributes = false;
  for (int i = 0; i < 10'000 && !contributes; ++i) {
    auto step = again->begin_step();
    ASSERT_TRUE(step && *step);
    contributes = (*step)->contributes();
    EXPECT_EQ((*step)->contributors(), contributes ? 2u : 1u);
    if (contributes) break;
    ASSERT_TRUE(again->commit([&](const Update& update) {
      EXPECT_EQ(update.contributors, 1u);
      const std::uint64_t count = update.tensor.index == w.index ? kMuch : 10, end = update.first + update.count;
      EXPECT_EQ(update.first % 64, 0u);
      EXPECT_TRUE(end % 64 == 0 || end == count) << end;
      parts += end < count;
      for (auto& x : update.of(Session::as<float>(again->weight(update.tensor).value()))) x += 1;
    }));
  }
  EXPECT_TRUE(contributes);
  EXPECT_GT(parts, 0u);
  again->interrupt(), second->interrupt();
  other.get();
}

TEST_F(Trained, AJoinerHasNothingToReduceAndNoVersionUntilItsStateIsWhole) {
  start(2);
  auto first = joined(0, kMuch), second = joined(1, kMuch);
  ASSERT_TRUE(first && second);
  EXPECT_FALSE(second->version()) << "the daemon may write to it, for all that it knows";
  std::atomic<std::uint64_t> steps = 0;
  auto other = trains(*first, &steps);
  ASSERT_TRUE(step_once(*second));
  EXPECT_EQ(second->version(), 1u);
  ASSERT_TRUE(second->leave());
  EXPECT_EQ(second->version(), 1u) << "what it left with";
  second = joined(1, kMuch);
  ASSERT_TRUE(second);
  bool followed = false;
  for (int i = 0; i < 10'000; ++i) {
    auto step = second->begin_step();
    ASSERT_TRUE(step && *step);
    if ((*step)->contributes()) {
      EXPECT_EQ(second->version(), (*step)->number() - 1);
      break;
    }
    if (!std::exchange(followed, true)) {
      EXPECT_REFUSED(second->all_reduce(0), ErrorCode::invalid_argument, "in which this replica catches up");
      EXPECT_FALSE(second->version());
    }
    ASSERT_TRUE(commit(*second));
    EXPECT_EQ(second->committed(), (*step)->number());
    // It says a version only when each element has that of all steps until then.
    const auto version = second->version();
    if (!version) continue;
    const auto n = static_cast<float>(*version);
    for (const float x : Session::as<float>(*second->weight(w))) ASSERT_EQ(x, n);
  }
  EXPECT_TRUE(followed);
  first->interrupt();
  other.get();
}

}  // namespace
}  // namespace rejoin::test
