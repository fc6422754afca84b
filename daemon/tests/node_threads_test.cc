// Threads of the daemon that stand still, as in a driver that does not return.
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#include <filesystem>
#include <future>
#include <nlohmann/json.hpp>

#include "daemon/standstill.h"
#include "daemon/tests/one_node.h"

namespace rejoin::daemon {
namespace {

std::set<pid_t> threads() {
  std::set<pid_t> all;
  for (const auto& one : std::filesystem::directory_iterator("/proc/self/task"))
    all.insert(std::stoi(one.path().filename().string()));
  return all;
}

// Threads of this process, which another one traces and stops until this goes: signals they have blocked.
class Stands {
 public:
  ~Stands() { go_on(); }
  bool stop(const std::set<pid_t>& threads) {  // false: the system does not let us
    int release[2], stopped[2];
    EXPECT_EQ(::pipe(release), 0);
    EXPECT_EQ(::pipe(stopped), 0);
    tracer_ = ::fork();
    if (tracer_ == 0) {
      ::close(release[1]);
      char byte = 0;
      (void)!::read(release[0], &byte, 1);  // it may trace now
      for (const pid_t thread : threads)
        if (::ptrace(PTRACE_SEIZE, thread, nullptr, nullptr) != 0 ||
            ::ptrace(PTRACE_INTERRUPT, thread, nullptr, nullptr) != 0 || ::waitpid(thread, nullptr, __WALL) != thread)
          ::_exit(1);
      (void)!::write(stopped[1], &byte, 1);
      (void)!::read(release[0], &byte, 1);
      ::_exit(0);  // they go on
    }
    ::prctl(PR_SET_PTRACER, tracer_, 0, 0, 0);
    char byte = 0;
    EXPECT_EQ(::write(release[1], &byte, 1), 1);
    ::close(stopped[1]);
    ::close(release[0]);
    const bool stand = ::read(stopped[0], &byte, 1) == 1;
    ::close(stopped[0]);
    release_ = Fd(release[1]);
    return stand;
  }
  void go_on() {
    release_.reset();
    if (tracer_ > 0) ::waitpid(std::exchange(tracer_, 0), nullptr, 0);
  }

 private:
  pid_t tracer_ = 0;
  Fd release_;
};

constexpr const char* kForbidden = "ptrace is forbidden here";

struct NodeThreads : OneNode {
  Stands stands;
  std::set<pid_t> before = threads();
  std::set<pid_t> others;  // of the server: its own is the test's

  void SetUp() override {
    start(milliseconds(300));
    others = threads();
    std::erase_if(others, [this](pid_t thread) { return before.contains(thread); });
    ASSERT_GE(others.size(), 2u);
  }
  void TearDown() override {
    stands.go_on();
    server.reset();
  }
  std::string standing() const {
    const auto status = server->status();
    std::string all;
    for (const auto& line : status.at("standing")) all += line.get<std::string>() + "\n";
    return all;
  }
  // A child of fork() has this thread alone: all others stand still in it.
  void ends_without_its_threads() {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(10);  // trainers have no daemon meanwhile
      server.reset();
      ::_exit(0);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1) << status;
  }
};

TEST_F(NodeThreads, ACatchUpThreadThatStandsStillIsToldOfAndACatchUpThatWaitsForIt) {
  RawTrainer trainer(socket);
  register_as(0, trainer);
  ASSERT_TRUE(comes_true([&] { return std::ranges::any_of(reports, &proto::FromNode::has_rank_up); }));
  const auto up = std::ranges::find_if(reports, &proto::FromNode::has_rank_up)->rank_up();
  proto::ToNode registered, plan;
  registered.mutable_registered()->set_instance(up.instance());
  registered.mutable_registered()->set_incarnation(9);
  plan.mutable_plan()->set_epoch(1);
  auto& member = *plan.mutable_plan()->add_members();
  member.set_replica(0);
  member.set_incarnation(9);
  member.set_catching_up(true);
  for (const auto* message : {&registered, &plan}) coordinator.send(node, message->SerializeAsString());
  if (!stands.stop(others)) GTEST_SKIP() << kForbidden;
  const auto beats = [&](const auto& condition) {
    return comes_true([&] { return trainer.say(heartbeat()), condition(); });
  };
  std::string line;
  ASSERT_TRUE(beats([&] { return (line = standing()) != ""; }));
  EXPECT_EQ(line.find("this daemon's thread that catches up has stood still for"), 0u) << line;
  EXPECT_NE(line.find("end this daemon, which is started again"), std::string::npos) << line;
  const auto told = [](const proto::FromNode& one) {
    return one.report().unreached().find("rank 0: this daemon's thread that catches up") == 0;
  };
  EXPECT_TRUE(beats([&] { return std::ranges::any_of(reports, told); }));
  stands.go_on();
  EXPECT_TRUE(beats([&] { return standing() == ""; }));
}

TEST_F(NodeThreads, WhoWaitsForTheThreadThatOpensStatesHearsThatItStands) {
  if (!stands.stop(others)) GTEST_SKIP() << kForbidden;
  ASSERT_TRUE(comes_true([&] { return standing().find("that opens what trainers offer") != std::string::npos; }));
  ends_without_its_threads();
  RawTrainer trainer(socket);
  trainer.register_as(0);
  std::string waits;
  ASSERT_TRUE(comes_true([&] {
    if (const auto heard = trainer.hear(); heard && heard->kind_case() == proto::ToTrainer::kWaits)
      waits = heard->waits();
    return waits != "";
  }));
  EXPECT_NE(waits.find("this daemon's thread that opens what trainers offer has stood still for"), std::string::npos);
  EXPECT_TRUE(comes_true([&] { return standing().find(waits.substr(0, 60)) != std::string::npos; }));
  stands.go_on();
  EXPECT_TRUE(comes_true([&] {
    const auto heard = trainer.hear();
    return heard && heard->has_welcome();
  }));
  EXPECT_TRUE(comes_true([&] { return standing() == ""; }));
}

TEST_F(NodeThreads, ADaemonOfTrainersWaitsForItsThreadsForAPartOfTheSilence) {
  RawTrainer trainer(socket);
  register_as(0, trainer);
  ends_without_its_threads();
}

TEST_F(OneNode, WhatWasOpenedForATrainerAndNotTakenYetEndsWithTheDaemon) {
  const auto before = threads();
  start(std::chrono::seconds(20), "tcp");
  RawTrainer taken(socket), trainer(socket);
  taken.register_as_of_gpu(1);
  ASSERT_TRUE(comes_true([&] {
    const auto heard = taken.hear();
    return heard && heard->has_welcome();
  }));
  trainer.register_as_of_gpu(0);
  ASSERT_TRUE(comes_true([&] { return trainer.unread() == 0; }));  // it is being opened, and nobody takes it
  server.reset();
  EXPECT_EQ(threads(), before);
}

TEST(Opener, EachOfTheTasksThatWaitForItIsATurn) {
  std::promise<void> may_go_on;
  std::vector<std::uint64_t> turns;
  Opener opener;
  opener.post([&, may = may_go_on.get_future()] { may.wait(); });
  for (int i = 0; i < 3; ++i) opener.post([&] { turns.push_back(opener.turns()); });
  opener.ask();
  EXPECT_FALSE(opener.ends_within(Duration{}));
  may_go_on.set_value();
  EXPECT_TRUE(opener.ends_within(std::chrono::seconds(20)));
  EXPECT_EQ(turns, (std::vector<std::uint64_t>{1, 2, 3}));
}

TEST(StreamThread, EachOfTheCommandsThatWaitForItIsATurn) {
  const auto stream = *StreamThread::start("tcp", device::make_host(), false, "127.0.0.1:0", {},
                                           {.silence = std::chrono::seconds(2)}, [](auto) {});
  std::promise<void> may_go_on;
  std::promise<std::uint64_t> first, second;
  stream->post([may = may_go_on.get_future().share()](auto&, auto) { may.wait(); });
  stream->post([&](auto&, auto) { first.set_value(stream->turns()); });
  stream->post([&](auto&, auto) { second.set_value(stream->turns()); });
  may_go_on.set_value();
  EXPECT_LT(first.get_future().get(), second.get_future().get());
}

// Its thread waits for one of the trainer's, and that is what is to be seen to.
TEST(Standstill, OfAGpusStreamNamesTheTrainer) {
  const auto why = why_it_stands_for_a_gpu(1234, std::chrono::seconds(12));
  EXPECT_NE(why.find("stood still for 12 s: it, or more likely the thread rejoin-memory of trainer 1234 that"),
            why.npos)
      << why;
  EXPECT_NE(why.find("end that trainer"), why.npos) << why;
  EXPECT_EQ(why.find("end this daemon"), why.npos) << why;
}

// Both were stopped: that is no standstill of the one.
TEST(Standstill, TimeInWhichNobodyLookedDoesNotCount) {
  const Duration silence = std::chrono::seconds(1);
  Standstill still;
  TimePoint now{std::chrono::hours(1)};
  EXPECT_EQ(still.look(1, now, silence), Duration{});
  EXPECT_EQ(still.look(1, now += 60 * silence, silence), Duration{});
  for (int i = 0; i < 10; ++i) EXPECT_EQ(still.look(1, now += silence / 2, silence), Duration{});
  EXPECT_EQ(still.look(1, now += silence / 2, silence), 11 * silence / 2);
  EXPECT_EQ(still.look(2, now += silence / 2, silence), Duration{});
}

}  // namespace
}  // namespace rejoin::daemon
