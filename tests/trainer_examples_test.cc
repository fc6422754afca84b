// The examples as trainers: a scheduler ends them, and those in two languages are of one job.
#include <gtest/gtest.h>
#include <signal.h>

#include "tests/trainer_support.h"

namespace rejoin::test {
namespace {

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

TEST(MinimalExamples, RefuseArguments) {
  for (const char* program : {"/rejoin-minimal", "/rejoin-minimal-c"}) {
    const auto refused = run({binaries() + program, "--version"});
    EXPECT_EQ(refused.status, 2) << program;
    EXPECT_NE(refused.output.find("no arguments are taken"), std::string::npos) << refused.output;
  }
}

TEST(MinimalExamples, RefuseADevice) {
  for (const char* program : {"/rejoin-minimal", "/rejoin-minimal-c"}) {
    const auto refused = run({binaries() + program}, {"REJOIN_DEVICE=cuda:0", "REJOIN_SOCKET=/nowhere/socket"});
    EXPECT_EQ(refused.status, 2) << program;
    EXPECT_NE(refused.output.find("computes on the CPU"), std::string::npos) << refused.output;
  }
}

// No supervisor is to start them again.
TEST(DemoTrainer, AWrongSettingEndsItWithCodeTwo) {
  const std::vector<std::pair<std::string, std::string>> wrong{
      {"--coding", "3"}, {"--chunk-bytes", "100"}, {"--device", "gpu"}, {"--data-listen", "0.0.0.0"}};
  for (const auto& [flag, value] : wrong) {
    const auto refused =
        run({binaries() + "/rejoin-demo-trainer", "--data", REJOIN_DATA, "--socket", "/nowhere/socket", flag, value});
    EXPECT_EQ(refused.status, 2) << flag << " " << value << ": " << refused.output;
    if (flag != "--device") continue;
    EXPECT_NE(refused.output.find("no device is called 'gpu': there are host, cuda"), std::string::npos)
        << refused.output;
  }
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
