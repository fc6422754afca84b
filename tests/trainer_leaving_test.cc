// How a session ends before its job does: it leaves, is destroyed, or is interrupted.
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <future>

#include "base/fd.h"
#include "base/tests/cancelled_thread.h"
#include "base/unix_socket.h"
#include "tests/trainer_support.h"

namespace rejoin::test {
namespace {

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

// What comes next, who else is there, and that one of them is lost, is told with each step.
TEST_F(Trained, AStepTellsWhatComesNextAndWhoIsThereAsLongAsAllAre) {
  start(2);
  std::vector<std::unique_ptr<Session>> sessions;
  for (std::uint32_t replica : {0, 1}) {
    sessions.push_back(declared(config(replica)));
    ASSERT_TRUE(sessions.back()->set_card("card of " + std::to_string(replica)));
    ASSERT_TRUE(sessions.back()->join());
    EXPECT_REFUSED(sessions.back()->set_card("late"), ErrorCode::invalid_argument, "after join()");
  }
  std::vector<std::vector<Session::Step::Batch>> coming(2);
  for (std::uint64_t number = 1; number <= 3; ++number) {
    std::vector<Session::Step> steps;
    for (std::uint32_t replica : {0, 1}) {
      steps.push_back(**sessions[replica]->begin_step());
      const auto& step = steps.back();
      EXPECT_EQ(step.weight(), 1u);
      EXPECT_TRUE(step.settled());
      ASSERT_EQ(step.cards().size(), 2u);
      for (const auto& [of, text] : step.cards()) EXPECT_EQ(text, "card of " + std::to_string(of));
      if (number == 1) coming[replica] = step.upcoming(2);
      else EXPECT_EQ(step.batch(), coming[replica].at(number - 2));
      EXPECT_TRUE(sessions[replica]->intact(0ms));
      for (BucketId bucket : {0, 1}) ASSERT_TRUE(sessions[replica]->all_reduce(bucket));
    }
    EXPECT_EQ(steps[0].epoch(), steps[1].epoch());
    auto other = std::async(std::launch::async, [&] { return commit(*sessions[1]); });
    EXPECT_TRUE(commit(*sessions[0]));
    EXPECT_TRUE(other.get());
  }
  ASSERT_TRUE(*sessions[0]->begin_step());
  ASSERT_TRUE(sessions[1]->leave());
  EXPECT_LT(timed([&] { EXPECT_FALSE(sessions[0]->intact(2 * kSilence)); }), kSilence);
}

// The decision of a step brings the epoch in which somebody joins, while trainers may still be in the step.
TEST_F(Trained, WhoJoinsIsNoLossToTheStepThatIsDecided) {
  start(3);
  auto first = joined(0), second = joined(1), third = joined(2);
  ASSERT_TRUE(first && second && third);
  std::uint64_t epoch = 0;
  const auto end_step = [&] {
    auto other = std::async(std::launch::async, [&] { return step_once(*second); });
    for (BucketId bucket : {0, 1}) EXPECT_TRUE(first->all_reduce(bucket));
    EXPECT_TRUE(commit(*first));
    EXPECT_TRUE(other.get());
  };
  const auto begin_step = [&] {
    const auto step = first->begin_step();
    ASSERT_TRUE(step && *step);
    epoch = (*step)->epoch();
  };
  begin_step();
  ASSERT_TRUE(*third->begin_step());
  ASSERT_TRUE(third->leave());
  EXPECT_LT(timed([&] { EXPECT_FALSE(first->intact(2 * kSilence)); }), kSilence);
  end_step();
  EXPECT_FALSE(first->intact(0ms)) << "somebody was lost before the step was decided";
  begin_step();
  end_step();
  const auto of_two = epoch;
  third = joined(2);
  ASSERT_TRUE(third);
  const auto catching_up = trains(*third);
  while (epoch == of_two && !HasFailure()) {
    begin_step();
    end_step();
    EXPECT_TRUE(first->intact(0ms));
  }
  ASSERT_TRUE(second->leave());
  EXPECT_LT(timed([&] { EXPECT_FALSE(first->intact(2 * kSilence)); }), kSilence);
}

// The mean is over samples: of one replica, too, which has all of them.
TEST_F(Trained, AJobOfAConstantBatchTakesTrainersThatWeighTheirGradients) {
  processes.push_back(start_coordinator({"--replicas", "1", "--ranks", "1", "--batch", "24", "--constant-batch"}));
  processes.push_back(start_node(0, {"--connect", coordinator}));
  {
    const auto session = joined(0);
    ASSERT_TRUE(session);
    EXPECT_REFUSED(session->begin_step(), ErrorCode::refused, "--balance-batches", "Step::weight()");
  }
  const auto session = declared(config(0));
  session->use_weights();
  ASSERT_TRUE(session->join());
  const auto step = session->begin_step();
  ASSERT_TRUE(step && *step);
  EXPECT_EQ((*step)->weight(), 24u);
  EXPECT_EQ((*step)->batch(), (Session::Step::Batch{{0, 24}}));
  for (auto& value : Session::as<float>(*session->gradient(w))) value = 0.5f * 24;
  for (BucketId bucket : {0, 1}) ASSERT_TRUE(session->all_reduce(bucket));
  ASSERT_TRUE(session->commit([&](const Update& update) {
    for (const float value : update.gradient_as<float>()) EXPECT_EQ(value, update.tensor == w ? 0.5f : 0.0f);
  }));
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

TEST_F(Trained, AThreadThatIsBeingCancelledInterruptsAndDestroysASession) {
  start(1);
  auto session = joined(0);
  ASSERT_TRUE(session);
  ASSERT_TRUE(step_once(*session));
  EXPECT_TRUE(in_cancelled_thread([&] { session->interrupt(), session.reset(); }).came_back);
  EXPECT_TRUE(eventually([&] { return log_of("coordinator").find("has left") != std::string::npos; }))
      << log_of("coordinator");
}

TEST_F(Trained, WhoHasLeftBeforeItHasJoinedIsOutToo) {
  auto session = declared(config(0));
  EXPECT_REFUSED(session->check(), ErrorCode::invalid_argument, "check() before join()");
  EXPECT_TRUE(session->leave());
  EXPECT_REFUSED(session->check(), ErrorCode::cancelled, "has left the job");
  EXPECT_REFUSED(session->begin_step(), ErrorCode::cancelled, "has left the job");
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
  config.flight = "off";
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
  EXPECT_TRUE(first->check());
  expect_interrupted(*first, [&] { return commit(*first); });
  EXPECT_REFUSED(first->check(), ErrorCode::cancelled, "interrupt() was called");
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

}  // namespace
}  // namespace rejoin::test
