// Threads of the daemon that stand still, as in a driver that does not return.
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#include <filesystem>
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
  void stop(const std::set<pid_t>& threads) {
    int release[2], stopped[2];
    ASSERT_EQ(::pipe(release), 0);
    ASSERT_EQ(::pipe(stopped), 0);
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
    EXPECT_EQ(::read(stopped[0], &byte, 1), 1) << "they can't be stopped";
    ::close(stopped[0]);
    release_ = Fd(release[1]);
  }
  void go_on() {
    release_.reset();
    if (tracer_ > 0) ::waitpid(std::exchange(tracer_, 0), nullptr, 0);
  }

 private:
  pid_t tracer_ = 0;
  Fd release_;
};

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
  stands.stop(others);
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
  stands.stop(others);
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
