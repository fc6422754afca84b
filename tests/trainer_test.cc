// What the author of a trainer meets: calls that are not due, an optimizer that fails, and how a session ends.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/socket.h>

#include <atomic>
#include <future>

#include "base/fail.h"
#include "base/unix_socket.h"
#include "local.pb.h"
#include "membership/log.h"
#include "membership/node.h"
#include "rejoin/session.h"
#include "tests/daemons.h"

namespace rejoin::test {
namespace {

using namespace std::chrono_literals;
using ::testing::Test;

// However long a crowded machine takes: what happens at once does not wait for it.
constexpr auto kSilence = 10s;
constexpr std::uint64_t kMuch = 3'000'000;  // elements: many slices, which arrive over several steps

struct Trained : Test, Daemons {
  std::vector<std::unique_ptr<Process>> processes;
  TensorId w, b;

  void start(std::uint32_t replicas, std::uint32_t ranks = 1, std::uint64_t steps = 0,
             std::chrono::milliseconds silence = kSilence) {
    silence_ms = std::to_string(silence.count());
    processes.push_back(start_coordinator({"--replicas", std::to_string(replicas), "--ranks", std::to_string(ranks),
                                           "--batch", "8", "--steps", std::to_string(steps)}));
    for (std::uint32_t r = 0; r < replicas; ++r) processes.push_back(start_node(r, {"--connect", coordinator}));
  }
  SessionConfig config(std::uint32_t replica, std::uint32_t rank = 0) const {
    SessionConfig config;
    config.replica = replica;
    config.rank = rank;
    config.socket = socket(replica);
    return config;
  }
  // Two tensors in a bucket each; it has not joined.
  std::unique_ptr<Session> declared(const SessionConfig& config, std::uint64_t count = 1000) {
    auto session = Session::open(config);
    if (!session) return ADD_FAILURE() << session.error().message, nullptr;
    w = (*session)->add({.name = "w", .count = count, .moments = 2}).value();
    b = (*session)->add({.name = "b", .count = 10}).value();
    EXPECT_TRUE((*session)->bucket({w}));
    EXPECT_TRUE((*session)->bucket({b}));
    EXPECT_TRUE((*session)->allocate());
    return std::move(*session);
  }
  std::unique_ptr<Session> joined(std::uint32_t replica, std::uint64_t count = 1000) {
    auto session = declared(config(replica), count);
    if (!session) return nullptr;
    if (auto joined = session->join(); !joined) return ADD_FAILURE() << joined.error().message, nullptr;
    return session;
  }
  // Each element counts the steps.
  static Result<> commit(Session& session) {
    return session.commit([&](const Update& update) {
      for (auto& x : update.of(Session::as<float>(session.weight(update.tensor).value()))) x += 1;
    });
  }
  static Result<> step_once(Session& session) {
    auto step = session.begin_step();
    if (!step) return tl::unexpected(step.error());
    if (!*step) return fail(ErrorCode::not_found, "the job is finished");
    for (BucketId bucket = 0; (*step)->contributes() && bucket < 2; ++bucket)
      if (auto reduced = session.all_reduce(bucket); !reduced) return reduced;
    return commit(session);
  }
  // Runs steps of a session until something in it ends it. Outlived by the session, also where a test fails.
  class Training {
   public:
    Training(Session& session, std::atomic<std::uint64_t>* steps)
        : session_(session), end_(std::async(std::launch::async, [&session, steps] {
            for (;; steps != nullptr ? ++*steps : 0)
              if (auto done = step_once(session); !done) return done.error();
          })) {}
    Training(Training&&) = default;
    ~Training() {
      if (end_.valid()) session_.interrupt();
    }
    Error get() { return end_.get(); }
    bool ends_within(std::chrono::milliseconds limit) { return end_.wait_for(limit) == std::future_status::ready; }

   private:
    Session& session_;
    std::future<Error> end_;
  };
  static Training trains(Session& session, std::atomic<std::uint64_t>* steps = nullptr) {
    return Training(session, steps);
  }
  std::uint64_t committed() const {
    const auto now = status();
    return now.is_null() ? 0 : now.value("committed", std::uint64_t{0});
  }
  std::string log_of(const std::string& name) const { return read_file(file(name + ".out")); }
};

// Runs `what`; a duration that only an event can end, well within the silence.
template <typename What>
std::chrono::milliseconds timed(What what) {
  const auto before = std::chrono::steady_clock::now();
  what();
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - before);
}

#define EXPECT_REFUSED(result, with, ...)                               \
  do {                                                                  \
    const auto refused = (result);                                      \
    ASSERT_FALSE(refused);                                              \
    EXPECT_EQ(refused.error().code, with) << refused.error().message;   \
    for (const char* part : {__VA_ARGS__})                              \
      EXPECT_NE(refused.error().message.find(part), std::string::npos)  \
          << "'" << part << "' is not in: " << refused.error().message; \
  } while (false)

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
  EXPECT_REFUSED(first->commit(throwing), ErrorCode::invalid_argument, "the optimizer threw in the update of step 2",
                 "no such", "kernel", "replica 0 rank 0", "Start the process again");
  for (const auto& later : {first->commit(throwing), first->all_reduce(0), first->join()})
    EXPECT_REFUSED(later, ErrorCode::invalid_argument, "the optimizer threw in the update of step 2");
  EXPECT_REFUSED(first->begin_step(), ErrorCode::invalid_argument, "the optimizer threw in the update of step 2");
  EXPECT_REFUSED(first->state_digest(), ErrorCode::invalid_argument, "the optimizer threw");
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
  EXPECT_REFUSED(session->commit([](const Update&) { throw 7; }), ErrorCode::invalid_argument,
                 "something that is no std::exception");
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

// ---- calls that are not due

TEST_F(Trained, ABucketThatWasForgottenIsNamedAtTheCommit) {
  start(2);
  auto first = joined(0), second = joined(1);
  ASSERT_TRUE(first && second);
  auto other = trains(*second);
  ASSERT_TRUE(*first->begin_step());
  EXPECT_REFUSED(commit(*first), ErrorCode::invalid_argument, "commit() of step 1", "bucket 0 ('w')", "bucket 1 ('b')");
  ASSERT_TRUE(first->all_reduce(0));
  const auto told = timed([&] {
    EXPECT_REFUSED(commit(*first), ErrorCode::invalid_argument, "commit() of step 1", "bucket 1 ('b')");
    EXPECT_EQ(commit(*first).error().message.find("'w'"), std::string::npos);
  });
  EXPECT_LT(told, 1s) << "and nobody else is asked";
  EXPECT_EQ(first->version(), 0u);
  ASSERT_TRUE(first->all_reduce(1));
  EXPECT_TRUE(commit(*first)) << "nothing has happened";
  EXPECT_EQ(first->version(), 1u);
  EXPECT_EQ(first->committed(), 1u);
  second->interrupt();
  other.get();
}

TEST_F(Trained, CallsThatAreNotDueAreRefusedAndChangeNothing) {
  start(1);
  auto session = declared(config(0));
  EXPECT_FALSE(session->version());
  EXPECT_REFUSED(session->begin_step(), ErrorCode::invalid_argument, "begin_step() before join()");
  EXPECT_REFUSED(session->all_reduce(0), ErrorCode::invalid_argument, "all_reduce() before join()");
  EXPECT_REFUSED(commit(*session), ErrorCode::invalid_argument, "commit() before join()");
  ASSERT_TRUE(session->join());
  EXPECT_REFUSED(session->join(), ErrorCode::invalid_argument, "join() comes once");
  EXPECT_REFUSED(session->all_reduce(0), ErrorCode::invalid_argument, "all_reduce(0) before begin_step()");
  EXPECT_REFUSED(commit(*session), ErrorCode::invalid_argument, "commit() without a step");
  ASSERT_TRUE(*session->begin_step());
  EXPECT_REFUSED(session->begin_step(), ErrorCode::invalid_argument, "begin_step() in step 1", "commit()");
  EXPECT_REFUSED(session->all_reduce(2), ErrorCode::invalid_argument, "no bucket 2", "has given 2, numbered from 0");
  ASSERT_TRUE(session->all_reduce(0));
  EXPECT_REFUSED(session->all_reduce(0), ErrorCode::invalid_argument, "bucket 0 is being reduced already");
  ASSERT_TRUE(session->all_reduce(1));
  EXPECT_REFUSED(session->commit(nullptr), ErrorCode::invalid_argument, "without an optimizer");
  ASSERT_TRUE(session->commit([&](const Update&) {
    EXPECT_REFUSED(session->begin_step(), ErrorCode::invalid_argument, "begin_step() inside of an optimizer");
    EXPECT_REFUSED(session->all_reduce(0), ErrorCode::invalid_argument, "all_reduce() inside of an optimizer");
    EXPECT_REFUSED(session->leave(), ErrorCode::invalid_argument, "leave() inside of an optimizer");
    EXPECT_FALSE(session->version()) << "it is between two";
  }));
  EXPECT_EQ(session->version(), 1u);
  EXPECT_REFUSED(commit(*session), ErrorCode::invalid_argument, "commit() without a step");
  EXPECT_TRUE(step_once(*session));
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

// ---- busy

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

// ---- what a step's gradients are the mean of

TEST_F(Trained, AStepSaysHowManyContributeAndAPieceHowManyHave) {
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

// A joiner's pieces are of steps that were decided with different members, and of parts of tensors.
TEST_F(Trained, AJoinersPiecesHaveTheContributorsOfTheirStepAndBordersThatFitEverybodys) {
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

// ---- what replicas must declare alike

TEST_F(Trained, WhoComesWithAnotherFingerprintIsRefusedWithBoth) {
  start(3);
  const auto with = [&](std::uint32_t replica, const std::string& fingerprint) {
    auto session = declared(config(replica));
    EXPECT_TRUE(session->set_fingerprint(fingerprint));
    return session;
  };
  auto first = with(0, "torch 2.15; AdamW lr=0.1"), third = with(2, "torch 2.15; AdamW lr=0.1");
  auto other = with(1, "torch 2.15; AdamW lr=0.2");
  ASSERT_TRUE(first->join());
  ASSERT_TRUE(third->join());
  EXPECT_REFUSED(other->join(), ErrorCode::refused, "its fingerprint is not that of replicas 0, 2",
                 "'torch 2.15; AdamW lr=0.2' here, and 'torch 2.15; AdamW lr=0.1' there, from byte 23 on");
  auto same = with(1, "torch 2.15; AdamW lr=0.1");
  EXPECT_TRUE(same->join());
  auto late = declared(config(0));
  EXPECT_REFUSED(late->set_fingerprint(std::string(4097, 'x')), ErrorCode::invalid_argument,
                 "fingerprint has 4097 bytes; there may be up to");
  EXPECT_REFUSED(first->set_fingerprint("late"), ErrorCode::invalid_argument, "comes after join()");
}

// ---- what is out of range

TEST_F(Trained, EachIsToldAtTheEarliestCallWithItsRange) {
  start(2);
  auto wrong = config(0);
  wrong.transport = "pigeon";
  EXPECT_REFUSED(Session::open(wrong), ErrorCode::invalid_argument, "no transport 'pigeon': use shm, tcp");
  wrong = config(0);
  wrong.chunk_bytes = 100;
  EXPECT_REFUSED(Session::open(wrong), ErrorCode::invalid_argument, "chunks of 100 bytes", "a multiple");
  wrong = config(0);
  wrong.chunks_in_flight = 0;
  EXPECT_REFUSED(Session::open(wrong), ErrorCode::invalid_argument, "0 chunks in flight; there must be 1 to 64");
  wrong = config(0);
  wrong.socket = std::string(200, 's');
  EXPECT_REFUSED(Session::open(wrong), ErrorCode::invalid_argument, "must have 1 to 107 characters");

  auto session = *Session::open(config(0));
  EXPECT_REFUSED(session->add({.name = "w", .count = 8, .moments = 5}), ErrorCode::invalid_argument,
                 "tensor 'w' has 5 moments; there must be 0 to 3");
  EXPECT_REFUSED(session->add({.name = "w", .count = 8, .moments = ~0u}), ErrorCode::invalid_argument,
                 "there must be 0 to 3");
  EXPECT_REFUSED(session->add({.name = "w"}), ErrorCode::invalid_argument,
                 "tensor 'w' has 0 elements; there must be 1");
  EXPECT_REFUSED(session->add({.count = 8}), ErrorCode::invalid_argument, "name has 0 bytes; there must be 1 to 200");
  EXPECT_REFUSED(session->add({.name = "w", .count = 1ull << 30, .elementwise = false}), ErrorCode::invalid_argument,
                 "tensor 'w' of 4.0 GiB is not elementwise");
  EXPECT_REFUSED(session->weight({0}), ErrorCode::invalid_argument, "weight() before allocate()");
  EXPECT_REFUSED(session->state_digest(), ErrorCode::invalid_argument, "before allocate()");
  const TensorId two = *session->add({.name = "two", .count = 8, .moments = 2}),
                 none = *session->add({.name = "none", .count = 8});
  EXPECT_REFUSED(session->add({.name = "two", .count = 9}), ErrorCode::invalid_argument, "a tensor 'two' already");
  Bytes memory(64);
  EXPECT_REFUSED(session->add({.name = "own", .count = 8, .moments = 1}, {memory}), ErrorCode::invalid_argument,
                 "tensor 'own' has 2 columns and memory for 1");
  EXPECT_REFUSED(session->bucket({two, TensorId{7}}), ErrorCode::not_found, "no tensor 7; add() has given 2");
  EXPECT_REFUSED(session->bucket({two, two}), ErrorCode::invalid_argument, "names tensor 'two' twice");
  ASSERT_TRUE(session->bucket({two, none})) << "what was refused has taken none of them";
  ASSERT_TRUE(session->allocate());
  EXPECT_EQ(session->moment(two, 1)->size(), 32u);
  EXPECT_REFUSED(session->moment(two, 3), ErrorCode::not_found, "'two' has no moment 3", "with 2, numbered 0 to 1");
  EXPECT_REFUSED(session->moment(none, 0), ErrorCode::not_found, "'none' was declared without moments");
  EXPECT_REFUSED(session->weight({2}), ErrorCode::not_found, "no tensor 2; add() has given 2, numbered from 0");
  EXPECT_REFUSED(session->gradient({2}), ErrorCode::not_found, "no tensor 2");

  auto elsewhere = config(0);
  elsewhere.replica = 2;
  auto outside = declared(elsewhere);
  EXPECT_REFUSED(outside->join(), ErrorCode::refused, "replica 2 rank 0 is outside this job of 2 replicas");
  elsewhere.replica = 0, elsewhere.rank = 1;
  outside = declared(elsewhere);
  EXPECT_REFUSED(outside->join(), ErrorCode::refused, "replica 0 rank 1 is outside", "1 ranks, both numbered from 0");
}

TEST_F(Trained, AJoinThatFailedMayBeTriedAgain) {
  auto session = declared([&] {
    auto config = SessionConfig();
    config.socket = socket(0);
    return config;
  }());
  EXPECT_REFUSED(session->join(), ErrorCode::unavailable, "start rejoind on this node with --socket");
  start(1);
  ASSERT_TRUE(session->join());
  EXPECT_TRUE(step_once(*session));
}

// ---- leaving

TEST_F(Trained, WhoLeavesLetsTheOthersGoOnAtOnceAndTheLogsSayThatItHasLeft) {
  start(3);
  auto first = joined(0), second = joined(1), third = joined(2);
  ASSERT_TRUE(first && second && third);
  std::atomic<std::uint64_t> steps = 0;
  auto one = trains(*first, &steps), other = trains(*second);
  ASSERT_TRUE(step_once(*third));
  ASSERT_TRUE(*third->begin_step());
  ASSERT_TRUE(third->leave());
  const auto then = steps.load();
  EXPECT_LT(timed([&] { EXPECT_TRUE(eventually([&] { return steps > then + 20; })); }), kSilence);
  // No process has ended, and no connection broke: the session is still there.
  const auto members = status().at("members");
  EXPECT_EQ(members.size(), 2u) << members.dump();
  EXPECT_NE(log_of("node2").find("replica 2 rank 0 has left: of its own accord\n"), std::string::npos)
      << log_of("node2");
  const std::string log = log_of("coordinator");
  EXPECT_NE(log.find("replica 2 is out: rank 0 has left: of its own accord"), std::string::npos) << log;
  EXPECT_EQ(log.find("closed"), std::string::npos) << log;
  EXPECT_REFUSED(third->begin_step(), ErrorCode::cancelled, "this session has left the job");
  EXPECT_REFUSED(third->all_reduce(1), ErrorCode::cancelled, "this session has left the job");
  EXPECT_REFUSED(commit(*third), ErrorCode::cancelled, "this session has left the job");
  EXPECT_TRUE(third->leave()) << "once more";
  EXPECT_TRUE(third->state_digest());
  // What it left undone is trained by the others: nothing is lost.
  first->interrupt(), second->interrupt();
  one.get(), other.get();
  const Ended audit = run({kCli, "audit", file("log/decisions.log")});
  EXPECT_NE(audit.output.find(" 0 lost, 0 repeated"), std::string::npos) << audit.output;
}

// A replica is the unit: what is left of it is put out, and told why.
TEST_F(Trained, WhenOneRankLeavesItsReplicaIsOut) {
  start(2, 2);
  std::atomic<std::uint64_t> steps = 0;
  std::vector<std::unique_ptr<Session>> sessions;
  std::vector<Training> ends;
  for (std::uint32_t i = 0; i < 4; ++i) {
    sessions.push_back(declared(config(i / 2, i % 2)));
    ASSERT_TRUE(sessions.back()->join());
  }
  for (std::uint32_t i = 0; i < 3; ++i) ends.push_back(trains(*sessions[i], i == 0 ? &steps : nullptr));
  ASSERT_TRUE(step_once(*sessions[3]));
  ASSERT_TRUE(sessions[3]->leave());
  ASSERT_TRUE(ends[2].ends_within(kSilence / 2));
  const Error why = ends[2].get();
  EXPECT_EQ(why.code, ErrorCode::cancelled);
  EXPECT_NE(why.message.find("rank 1 has left: of its own accord"), std::string::npos) << why.message;
  const auto then = steps.load();
  EXPECT_TRUE(eventually([&] { return steps > then + 20; }));
  sessions[0]->interrupt(), sessions[1]->interrupt();
  ends[0].get(), ends[1].get();
}

// As where an exception passes through a trainer that catches it further out.
TEST_F(Trained, ASessionThatIsDestroyedHasLeftThoughItsProcessLives) {
  start(2);
  auto first = joined(0), second = joined(1);
  ASSERT_TRUE(first && second);
  std::atomic<std::uint64_t> steps = 0;
  auto one = trains(*first, &steps);
  ASSERT_TRUE(step_once(*second));
  second.reset();
  const auto then = steps.load();
  EXPECT_LT(timed([&] { EXPECT_TRUE(eventually([&] { return steps > then + 20; })); }), kSilence);
  EXPECT_NE(log_of("coordinator").find("rank 0 has left: of its own accord"), std::string::npos)
      << log_of("coordinator");
  first->interrupt();
  one.get();
}

TEST_F(Trained, WhoseDaemonIsAwayIsToldThatNobodyHeardItLeave) {
  start(1);
  silence_ms = "500";
  processes[1] = nullptr;
  std::filesystem::remove(file("node0.json"));
  processes[1] = start_node(0, {"--connect", coordinator});
  auto session = joined(0);
  ASSERT_TRUE(session);
  ASSERT_TRUE(step_once(*session));
  processes[1] = nullptr;
  EXPECT_REFUSED(session->leave(), ErrorCode::unavailable, "was not there to hear that this replica leaves");
  EXPECT_REFUSED(session->begin_step(), ErrorCode::cancelled, "has left");
}

// The processes of a job that has finished end one after the other, its daemons first: nobody complains.
TEST_F(Trained, AfterItsJobASessionIsQuiet) {
  start(1, 1, 3);
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  auto session = joined(0);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(step_once(*session));
  auto step = session->begin_step();
  EXPECT_TRUE(step && !*step);
  EXPECT_EQ(session->version(), 3u);
  const pid_t node = processes[1]->pid();
  ::kill(node, SIGTERM);
  EXPECT_EQ(processes[1]->wait(15s), 0);
  step = session->begin_step();
  EXPECT_TRUE(step && !*step) << "and goes on to be finished";
  EXPECT_TRUE(session->leave());
  session.reset();
  const std::string said = testing::internal::GetCapturedStdout() + testing::internal::GetCapturedStderr();
  EXPECT_EQ(said, "");
}

// ---- interrupts

// A daemon that takes a connection and says nothing.
struct Mute {
  Scratch scratch;
  const std::string path = scratch.path + "/daemon.sock";
  const Fd listener = *listen_unix(path);
};

// The call that `waits` makes returns `cancelled` soon after interrupt(), and so do the next ones.
template <typename Waits>
void expect_interrupted(Session& session, Waits waits) {
  std::atomic<bool> called = false;
  auto waiting = std::async(std::launch::async, [&] {
    called = true;
    return waits();
  });
  while (!called) std::this_thread::yield();
  EXPECT_EQ(waiting.wait_for(200ms), std::future_status::timeout) << "nothing else ends it";
  session.interrupt();
  ASSERT_EQ(waiting.wait_for(kSilence / 2), std::future_status::ready);
  EXPECT_REFUSED(waiting.get(), ErrorCode::cancelled, "interrupt() was called");
}

TEST_F(Trained, AnInterruptEndsAJoinThatWaitsForItsDaemon) {
  const Mute daemon;
  auto config = SessionConfig();
  config.socket = daemon.path;
  auto session = declared(config);
  expect_interrupted(*session, [&] { return session->join(); });
  EXPECT_REFUSED(session->join(), ErrorCode::cancelled, "interrupt() was called");
}

TEST_F(Trained, AnInterruptEndsAJoinThatWaitsForTheCoordinator) {
  start(1);
  processes[0] = nullptr;  // the coordinator
  auto session = declared(config(0));
  expect_interrupted(*session, [&] { return session->join(); });
}

TEST_F(Trained, AnInterruptEndsTheWaitForAStep) {
  start(2);
  auto session = joined(0);  // the other one never comes
  ASSERT_TRUE(session);
  expect_interrupted(*session, [&] { return session->begin_step(); });
  EXPECT_REFUSED(session->begin_step(), ErrorCode::cancelled, "interrupt() was called");
  EXPECT_TRUE(session->leave());
  EXPECT_REFUSED(session->begin_step(), ErrorCode::cancelled, "has left");
}

TEST_F(Trained, AnInterruptEndsTheWaitForACommit) {
  start(2);
  auto first = joined(0), second = joined(1);
  ASSERT_TRUE(first && second);
  ASSERT_TRUE(*first->begin_step());
  ASSERT_TRUE(first->all_reduce(0) && first->all_reduce(1));  // the other one does not
  expect_interrupted(*first, [&] { return commit(*first); });
  EXPECT_REFUSED(first->all_reduce(0), ErrorCode::cancelled, "interrupt() was called");
  EXPECT_EQ(first->version(), 0u) << "it has changed nothing";
  // And the other one goes on alone.
  EXPECT_TRUE(first->leave());
  EXPECT_TRUE(step_once(*second));
  EXPECT_EQ(committed(), 1u);
}

Session* to_interrupt = nullptr;
std::atomic<pthread_t> handled_by;

// Of the process, while its main thread waits: it is that one which takes it, since the library's threads don't.
TEST_F(Trained, ASignalsHandlerMayInterrupt) {
  start(2);
  auto session = joined(0);
  ASSERT_TRUE(session);
  to_interrupt = session.get();
  struct sigaction action {
  }, before{};
  action.sa_handler = [](int) {
    handled_by = ::pthread_self();
    to_interrupt->interrupt();
  };
  action.sa_flags = SA_RESTART;
  ASSERT_EQ(::sigaction(SIGUSR1, &action, &before), 0);
  auto killer = std::async(std::launch::async, [] {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
    ::kill(::getpid(), SIGUSR1);
  });
  EXPECT_REFUSED(session->begin_step(), ErrorCode::cancelled, "interrupt() was called");
  killer.get();
  EXPECT_EQ(handled_by.load(), ::pthread_self());
  ::sigaction(SIGUSR1, &before, nullptr);
}

// The examples', as a scheduler ends them: SIGTERM, at any moment.
struct Example {
  const char* program;
  const char* device;
};
struct Examples : Trained, testing::WithParamInterface<Example> {
  std::unique_ptr<Process> example(std::uint32_t replica) {
    std::vector<std::string> arguments{binaries() + "/" + GetParam().program};
    if (GetParam().device != nullptr)
      arguments.insert(arguments.end(), {"--replica", std::to_string(replica), "--socket", socket(replica), "--data",
                                         REJOIN_DATA, "--params", "20000", "--device", GetParam().device});
    return std::make_unique<Process>(
        arguments, file("trainer" + std::to_string(replica)),
        std::vector<std::string>{"REJOIN_REPLICA=" + std::to_string(replica), "REJOIN_SOCKET=" + socket(replica),
                                 "LD_LIBRARY_PATH=" REJOIN_FAKE_CUDA});
  }
};

TEST_P(Examples, LeaveInOrderAtSigterm) {
  start(2);
  auto first = example(0), second = example(1);
  ASSERT_TRUE(eventually([&] { return committed() > 10; })) << first->output() << second->output();
  ::kill(second->pid(), SIGTERM);
  EXPECT_LT(timed([&] { EXPECT_EQ(second->wait(30s), 128 + SIGTERM) << second->output(); }), kSilence);
  EXPECT_NE(second->output().find("this replica has left"), std::string::npos) << second->output();
  const auto then = committed();
  EXPECT_LT(timed([&] { EXPECT_TRUE(eventually([&] { return committed() > then + 10; })); }), kSilence);
  EXPECT_NE(log_of("coordinator").find("replica 1 is out: rank 0 has left: of its own accord"), std::string::npos)
      << log_of("coordinator");
  EXPECT_EQ(log_of("node1").find("its process"), std::string::npos) << log_of("node1");
  // One that waits for a step, since there is nobody else.
  ::kill(first->pid(), SIGINT);
  EXPECT_EQ(first->wait(30s), 128 + SIGINT) << first->output();
}

TEST_P(Examples, LeaveInOrderWhileTheyWaitForOthers) {
  start(2);
  auto first = example(0);
  ASSERT_TRUE(eventually([&] {  // it is there, and alone
    const std::string told = run({kCli, "status", coordinator_status}).output;
    return told.find("replica 1: 0 of 1") != std::string::npos && told.find("replica 0: 0 of 1") == std::string::npos;
  })) << first->output();
  ::kill(first->pid(), SIGTERM);
  EXPECT_LT(timed([&] { EXPECT_EQ(first->wait(30s), 128 + SIGTERM) << first->output(); }), kSilence);
}

// A replica in C++ and one in C are of one job. The one in C is killed, and comes back.
TEST_F(Trained, ExamplesOfTwoLanguagesHaveTheSameBits) {
  start(2, 1, 1000);
  const auto example = [&](std::uint32_t replica, const char* program, const char* output) {
    return std::make_unique<Process>(
        std::vector<std::string>{binaries() + "/" + program}, file(output),
        std::vector<std::string>{"REJOIN_REPLICA=" + std::to_string(replica), "REJOIN_SOCKET=" + socket(replica)});
  };
  auto first = example(0, "rejoin-minimal", "first"), second = example(1, "rejoin-minimal-c", "second");
  ASSERT_TRUE(eventually([&] { return committed() > 10; })) << first->output() << second->output();
  ::kill(second->pid(), SIGKILL);
  (void)second->wait(30s);
  auto again = example(1, "rejoin-minimal-c", "again");
  EXPECT_EQ(first->wait(60s), 0) << first->output();
  EXPECT_EQ(again->wait(60s), 0) << again->output();
  EXPECT_NE(first->output().find("after step 1000, digest "), std::string::npos) << first->output();
  EXPECT_EQ(first->output().substr(first->output().find("w = ")), again->output().substr(again->output().find("w = ")));
}

INSTANTIATE_TEST_SUITE_P(Of, Examples,
                         testing::Values(Example{"rejoin-minimal", nullptr}, Example{"rejoin-minimal-c", nullptr},
                                         Example{"rejoin-demo-trainer", "host"},
                                         Example{"rejoin-demo-trainer", "cuda:0"}),
                         [](const auto& tested) -> std::string {
                           if (tested.param.device == nullptr)
                             return std::string(tested.param.program).ends_with("-c") ? "MinimalInC" : "Minimal";
                           return tested.param.device == std::string("host") ? "Demo" : "DemoOnAGpu";
                         });

}  // namespace
}  // namespace rejoin::test
