// Calls that are not due, declarations that differ, values out of range: each refused by name, and nothing changes.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <thread>

#include "base/bytes.h"
#include "base/unix_socket.h"
#include "tests/trainer_support.h"

namespace rejoin::test {
namespace {

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
    EXPECT_REFUSED(session->end_update(), ErrorCode::invalid_argument,
                   "end_update() without an update: begin_update()");
    EXPECT_EQ(session->abandon_update("no reason").code, ErrorCode::invalid_argument);
    EXPECT_FALSE(session->version()) << "it is between two";
  }));
  EXPECT_EQ(session->version(), 1u);
  EXPECT_REFUSED(commit(*session), ErrorCode::invalid_argument, "commit() without a step");
  ASSERT_TRUE(*session->begin_step());
  ASSERT_TRUE(session->all_reduce(0) && session->all_reduce(1));
  ASSERT_TRUE(*session->begin_update());
  EXPECT_REFUSED(session->leave(), ErrorCode::invalid_argument, "before end_update(), or abandon_update(), of step 2");
  EXPECT_TRUE(session->end_update());
  EXPECT_TRUE(step_once(*session));
}

TEST_F(Trained, WhoLooksOnceAtWhatIsReducedMayForgetItsCallWithinIt) {
  start(1);
  auto session = joined(0);
  std::vector<std::uint64_t> seen;
  const std::string here(100, 'x');  // which has to live until the call returns
  session->when_reduced([&, here](std::uint64_t step) {
    session->when_reduced({});
    seen.push_back(step);
    EXPECT_EQ(here, std::string(100, 'x'));
  });
  ASSERT_TRUE(step_once(*session));
  ASSERT_TRUE(step_once(*session));
  EXPECT_EQ(seen, std::vector<std::uint64_t>{1});
  ASSERT_TRUE(*session->begin_step());
  ASSERT_TRUE(session->all_reduce(0) && session->all_reduce(1));
  session->when_reduced([](std::uint64_t) { throw std::runtime_error("no such tensor"); });
  EXPECT_REFUSED(commit(*session), ErrorCode::cancelled,
                 "when_reduced()'s function threw in the update of step 3: no such tensor", "Start the process again");
}

// As a call of Python's does, where a signal's handler raises.
TEST_F(Trained, AJoinWhoseWaitingThrowsMayBeTriedAgain) {
  struct Signal {};
  bool throws = true;
  auto session = declared([&] {
    auto config = this->config(0);
    config.while_waiting = [&] {
      if (throws) throw Signal();
    };
    return config;
  }());
  EXPECT_THROW((void)session->join(), Signal);
  throws = false;
  start(1);
  ASSERT_TRUE(session->join());
  EXPECT_TRUE(step_once(*session));
}

// Its daemon writes to it, as soon as it is admitted: a position would be one of step 0 with other weights.
TEST_F(Trained, WhoHasJoinedHasNoPositionBeforeItsFirstStep) {
  start(2);
  auto first = joined(0);
  EXPECT_REFUSED(first->position(), ErrorCode::unavailable, "has not begun one");
  auto second = joined(1);
  std::atomic<std::uint64_t> steps = 0;
  auto trained = trains(*first, &steps);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(step_once(*second));
  EXPECT_EQ(second->position()->step(), 3u);
  second.reset();
  second = joined(1);
  EXPECT_REFUSED(second->position(), ErrorCode::unavailable, "has not begun one");
  ASSERT_TRUE(eventually([&] { return second->begin_step().value()->contributes() || !commit(*second); }));
  EXPECT_TRUE(second->position());
}

// ---- processes that end, or fork, while a session lives

// What is destroyed last was made first, and a session may have been asked for by a static object.
TEST_F(Trained, AProcessMayEndWithASessionThatNobodyHasDestroyed) {
  start(1);
  const pid_t child = ::fork();
  if (child == 0) {
    static std::unique_ptr<Session> kept;
    kept = joined(0);
    std::exit(kept && step_once(*kept) && kept->leave() ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST_F(Trained, AChildThatDestroysOrInterruptsASessionOfItsParentsChangesNothing) {
  start(2);
  auto first = joined(0), second = joined(1);
  auto trained = trains(*first);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(step_once(*second));
  const auto in_child = [&](const std::function<void()>& does) {
    const pid_t child = ::fork();
    if (child == 0) does(), ::_exit(0);
    int status = -1;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  };
  in_child([&] { second->interrupt(); });
  // It and the other replica wait for this one, and nothing spins: of the next second little is used.
  const auto cpu = [] {
    timespec used{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return std::chrono::seconds(used.tv_sec) + std::chrono::nanoseconds(used.tv_nsec);
  };
  const auto before = cpu();
  EXPECT_FALSE(eventually([&] { return cpu() - before > 500ms; }, 1s));
  in_child([&] {
    ::alarm(20);
    for (const auto& refused : {second->check(), step_once(*second), second->leave()})
      if (refused || refused.error().message.find("is a child of it") == std::string::npos) ::_exit(1);
  });
  in_child([&] { second.reset(); });
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(step_once(*second));
  EXPECT_EQ(status().at("epoch"), 1);
  second->interrupt();
}

// A supervisor may start a program with them closed, or the program closes them, and prints nevertheless.
TEST_F(Trained, WhatIsPrintedWithoutStandardDescriptorsIsNotInTheState) {
  start(1);
  for (const bool closed_at_first : {true, false}) {
    const pid_t child = ::fork();
    if (child == 0) {
      const auto close_all = [] { ::close(0), ::close(1), ::close(2); };
      if (closed_at_first) close_all();
      auto opened = Session::open(config(0));
      if (!closed_at_first) close_all();
      auto session = std::move(*opened);
      const TensorId all = *session->add({.name = "all", .count = 1000, .moments = 2});
      if (!session->bucket({all}) || !session->allocate() || !session->join()) ::_exit(2);
      const auto before = session->state_digest();
      for (int i = 0; i < 100; ++i)
        for (const int fd : {0, 1, 2}) (void)!::write(fd, "a step is done\n", 15);
      ::_exit(before && session->state_digest().value() == *before ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << closed_at_first;
  }
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
  wrong.coding = "16";
  EXPECT_REFUSED(Session::open(wrong), ErrorCode::invalid_argument, "--coding (REJOIN_CODING)", "off, auto, 8 and 4");
  wrong = config(0);
  wrong.coding_error = 2;
  EXPECT_REFUSED(Session::open(wrong), ErrorCode::invalid_argument, "a coding error of 2; it must be above 0");
  wrong = config(0);
  wrong.socket = std::string(200, 's');
  EXPECT_REFUSED(Session::open(wrong), ErrorCode::invalid_argument, "must have 1 to 107 characters");

  auto session = *Session::open(config(0));
  EXPECT_REFUSED(session->add({.name = "w", .count = 8, .moments = 8}), ErrorCode::invalid_argument,
                 "tensor 'w' has 8 moments; there must be 0 to 7");
  EXPECT_REFUSED(session->add({.name = "w", .count = 8, .moments = ~0u}), ErrorCode::invalid_argument,
                 "there must be 0 to 7");
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
  const TensorSpec mixed{.name = "mixed",
                         .type = DataType::bfloat16,
                         .count = 8,
                         .moments = 2,
                         .moment_types = {DataType::float32, DataType::float64},
                         .gradient_type = DataType::float32};
  auto wrong_types = mixed;
  wrong_types.moment_types.pop_back();
  EXPECT_REFUSED(session->add(wrong_types), ErrorCode::invalid_argument, "'mixed' has 2 moments and types for 1");
  const TensorId typed = *session->add(mixed),
                 narrow = *session->add({.name = "narrow", .type = DataType::bfloat16, .count = 8});
  EXPECT_REFUSED(session->bucket({typed, narrow}), ErrorCode::invalid_argument,
                 "mixes gradients of bfloat16 and float32");
  EXPECT_REFUSED(session->set_card(std::string(1025, 'x')), ErrorCode::invalid_argument, "1025 bytes");
  ASSERT_TRUE(session->bucket({two, none, typed})) << "what was refused has taken none of them";
  ASSERT_TRUE(session->bucket({narrow}));
  ASSERT_TRUE(session->allocate());
  EXPECT_EQ(session->weight(typed)->size(), 16u);
  EXPECT_EQ(session->moment(typed, 0)->size(), 32u);
  EXPECT_EQ(session->moment(typed, 1)->size(), 64u);
  EXPECT_EQ(session->gradient(typed)->size(), 32u);
  EXPECT_EQ(session->reduced(typed)->size(), 32u);
  EXPECT_EQ(session->moment(two, 1)->size(), 32u);
  EXPECT_REFUSED(session->bucket({two}, {}), ErrorCode::invalid_argument, "without its memory");
  EXPECT_REFUSED(session->moment(two, 3), ErrorCode::not_found, "'two' has no moment 3", "with 2, numbered 0 to 1");
  EXPECT_REFUSED(session->moment(none, 0), ErrorCode::not_found, "'none' was declared without moments");
  EXPECT_REFUSED(session->weight({4}), ErrorCode::not_found, "no tensor 4; add() has given 4, numbered from 0");
  EXPECT_REFUSED(session->gradient({4}), ErrorCode::not_found, "no tensor 4");

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
    auto config = this->config(0);
    config.patience = std::chrono::milliseconds(200);
    return config;
  }());
  EXPECT_REFUSED(session->join(), ErrorCode::unavailable, "start rejoind on this node with --socket");
  start(1);
  ASSERT_TRUE(session->join());
  EXPECT_TRUE(step_once(*session));
}

// Its kernel takes no more who wait for it than it has room for.
TEST_F(Trained, ADaemonThatIsStoppedAndHasManyWaitingIsWaitedForWithPatience) {
  auto config = this->config(0);
  config.patience = std::chrono::milliseconds(200);
  const auto stopped = listen_unix(config.socket);
  for (int i = 0; i < 1000 && connect_unix(config.socket); ++i) {
  }
  bool waited = false;
  config.while_waiting = [&] { waited = true; };
  auto session = declared(config);
  EXPECT_REFUSED(session->join(), ErrorCode::unavailable, "too many wait there to be accepted");
  EXPECT_TRUE(waited);
}

TEST_F(Trained, ADaemonThatStartsAfterItsTrainerIsWaitedFor) {
  bool started = false;
  auto config = this->config(0);
  config.while_waiting = [&] {
    if (!std::exchange(started, true)) start(1);
  };
  auto session = declared(config);
  ASSERT_TRUE(session->join());
  EXPECT_TRUE(started);
  EXPECT_TRUE(step_once(*session));
}

TEST_F(Trained, ADaemonThatEndsWhileARankRegistersIsFollowedByTheNext) {
  start(1);
  Process& daemon = *processes.back();
  ASSERT_EQ(::kill(daemon.pid(), SIGSTOP), 0);  // so that it takes the connection and says nothing
  bool ended = false;
  auto config = this->config(0);
  config.while_waiting = [&] {
    if (std::exchange(ended, true)) return;
    ASSERT_EQ(::kill(daemon.pid(), SIGKILL), 0);
    processes.push_back(start_node(0, {"--connect", coordinator}));
  };
  auto session = declared(config);
  const auto joined = session->join();
  ASSERT_TRUE(joined) << joined.error().message;
  EXPECT_TRUE(ended);
  EXPECT_TRUE(step_once(*session));
}

TEST_F(Trained, ADaemonWithARelativeNameIsFoundAgainFromAnotherDirectory) {
  start(1);
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(scratch.path);
  auto config = this->config(0);
  config.socket = std::filesystem::path(config.socket).filename();
  config.patience = 5s;
  auto session = declared(config);
  std::filesystem::current_path("/");
  const auto joined = session->join();
  std::filesystem::current_path(before);
  ASSERT_TRUE(joined) << joined.error().message;
  EXPECT_TRUE(step_once(*session));
}

TEST_F(Trained, WhoWaitsForADaemonCanBeInterrupted) {
  auto config = this->config(0);
  Session* waits = nullptr;
  config.while_waiting = [&] { waits->interrupt(); };
  auto session = declared(config);
  waits = session.get();
  EXPECT_REFUSED(session->join(), ErrorCode::cancelled, "interrupt");
}

}  // namespace
}  // namespace rejoin::test
