// Logs on a disk that stands still for longer than a silence, with the real programs: nobody is put out for a line.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>

#include "tests/daemon_support.h"

namespace rejoin::test {
namespace {

// Each process has its log there.
struct SlowLogs : testing::Test, Job {
  const std::string stands_still = file("stands_still");
  std::vector<std::unique_ptr<Process>> trainers;
  SlowLogs() {
    ::setenv("LD_PRELOAD", REJOIN_SLOW_FILE, 1);
    ::setenv("SLOW_FILE", stands_still.c_str(), 1);
  }
  ~SlowLogs() override {
    std::filesystem::remove(stands_still);
    ::unsetenv("LD_PRELOAD");
    ::unsetenv("SLOW_FILE");
  }
  // At the socket of that node's.
  void train(std::uint32_t replica, std::uint32_t node) {
    const std::string number = std::to_string(replica);
    trainers.push_back(std::make_unique<Process>(
        std::vector{kMinimal}, file("trainer" + number + ".out"),
        std::vector<std::string>{"REJOIN_REPLICA=" + number, "REJOIN_RANK=0", "REJOIN_SOCKET=" + socket(node)}));
  }
  std::uint64_t committed() const {
    const auto now = status();
    return now.is_null() ? 0 : now.value("committed", std::uint64_t{0});
  }
  std::vector<std::string> contributors() const {
    std::vector<std::string> all;
    const auto now = status();
    if (now.is_null()) return all;
    for (const auto& member : now.at("members"))
      if (member.at("role") == "contributor") all.push_back(member.at("replica").dump());
    return all;
  }
  bool trains_on(std::uint64_t steps) const {
    const auto then = committed();
    return eventually([&] { return committed() > then + steps; });
  }
  // That long, so that who is silent is out.
  bool trains_for_silences() const {
    const auto begun = std::chrono::steady_clock::now();
    const std::chrono::milliseconds silences(3 * std::stoi(silence_ms));
    return eventually([&] { return std::chrono::steady_clock::now() - begun > silences; }) && trains_on(5);
  }
  std::string log() const { return read_file(file("coordinator.out")); }
  void logs_stand_still() const { std::ofstream(stands_still) << "now"; }
  void logs_go_on() const { std::filesystem::remove(stands_still); }
};

// The daemon says that one has ended in the thread that tells the coordinator of the other.
TEST_F(SlowLogs, OfADaemonDoNotTakeAHealthyReplicaWithOneThatEnds) {
  start(3, 0);
  train(0, 0), train(1, 0), train(2, 1);
  ASSERT_TRUE(eventually([&] { return committed() > 5 && contributors().size() == 3; })) << log();
  logs_stand_still();
  ASSERT_EQ(::kill(trainers[1]->pid(), SIGKILL), 0);
  const std::vector<std::string> others{"0", "2"};
  ASSERT_TRUE(eventually([&] { return contributors() == others; })) << status().dump();
  EXPECT_TRUE(trains_for_silences()) << status().dump();
  EXPECT_EQ(contributors(), others);
  logs_go_on();
  EXPECT_TRUE(eventually([&] { return read_file(file("node0.out")).find("replica 1 rank 0: ") != std::string::npos; }));
}

// A trainer says so in the thread that gives its signs of life.
TEST_F(SlowLogs, OfTrainersWhoseDaemonIsStartedAgainKeepNobodySilent) {
  start(2, 0);
  train(0, 0), train(1, 1);
  ASSERT_TRUE(eventually([&] { return committed() > 5 && contributors().size() == 2; })) << log();
  logs_stand_still();
  processes[1] = nullptr;
  processes[1] = start_node(0, {"--connect", coordinator});
  EXPECT_TRUE(trains_for_silences()) << status().dump();
  EXPECT_EQ(contributors().size(), 2u);
  logs_go_on();
  const auto said = [&](const char* what) { return trainers[0]->output().find(what) != std::string::npos; };
  EXPECT_TRUE(eventually([&] { return said("the daemon is gone") && said("registered again with the daemon"); }))
      << trainers[0]->output();
  EXPECT_EQ(log().find(" is out: "), std::string::npos) << log();
}

// It waits for its last lines, and not for ever.
TEST_F(SlowLogs, KeepNoDaemonFromEnding) {
  start(1, 0);
  logs_stand_still();
  for (const auto& process : processes) ASSERT_EQ(::kill(process->pid(), SIGTERM), 0);
  for (const auto& process : processes) EXPECT_NE(process->wait(std::chrono::seconds(15)), -1);
  EXPECT_TRUE(std::filesystem::exists(stands_still));
}

// Nobody reads its standard error any more, and it has something to say in its own thread.
TEST(UnreadLog, EndsNoTrainer) {
  Job job;
  job.start(1, 0);
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  ASSERT_EQ(::close(ends[0]), 0);
  const pid_t trainer = ::fork();
  if (trainer == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::signal(SIGPIPE, SIG_DFL);
    ::dup2(ends[1], STDERR_FILENO);
    auto environment = job.environment(0);
    environment.emplace_back("REJOIN_FLIGHT_DIR=/proc/none");  // which is a warning
    for (auto& variable : environment) ::putenv(variable.data());
    ::execl(kMinimal.c_str(), kMinimal.c_str(), nullptr);
    ::_exit(127);
  }
  ::close(ends[1]);
  EXPECT_TRUE(eventually([&] { return job.status().value("committed", 0) > 5; })) << job.status().dump();
  int status = 0;
  EXPECT_EQ(::waitpid(trainer, &status, WNOHANG), 0) << status;
  ::kill(trainer, SIGKILL);
  ::waitpid(trainer, &status, 0);
}

}  // namespace
}  // namespace rejoin::test
