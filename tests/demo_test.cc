// The main job end to end, through the demo: the real binaries, killed and stopped at chosen and random points.
#include <random>

#include "tests/demo_support.h"

namespace rejoin::test {
namespace {

TEST(Demo, AKilledReplicaComesBackWithTheSameBitsAndNobodyRecomputes) {
  const auto report = demo({"--steps", "120", "--kill", "1.0@30"});
  expect_sound(report, 120, {"kill"});
  EXPECT_EQ(report.at("catch_ups").size(), 2u) << "both ranks of the replica";
  EXPECT_LT(report.at("loss").at("last").get<double>(), report.at("loss").at("first").get<double>() - 1) << "it learns";
  for (const char* key : {"replicas", "ranks", "params", "events", "step_ms", "digests"})
    EXPECT_TRUE(report.contains(key)) << key;
}

TEST(Demo, WithoutAFailureNothingIsReported) {
  const auto report = demo({"--steps", "40", "--no-kill"});
  expect_sound(report, 40, {});
}

TEST(Demo, TwoReplicasDieAtOnce) {
  expect_sound(demo({"--steps", "150", "--replicas", "4", "--ranks", "1", "--kill", "1.0@30,3.0@30"}), 150,
               {"kill", "kill"});
}

// So many that small buckets are reduced in rounds of doubling.
TEST(Demo, OneOfTwentyReplicasDies) {
  expect_sound(demo({"--steps", "150", "--replicas", "20", "--ranks", "1", "--params", "20000", "--batch", "1",
                     "--kill", "1.0@10", "--silence-ms", "10000"}),
               150, {"kill"});
}

// There are spares for one that is lost. Four at once are more; and what has come back is connected anew.
TEST(Demo, OfReplicasThatAreNotAllConnectedSomeDieAndComeBack) {
  const auto report = demo({"--steps", "300", "--replicas", "16", "--ranks", "1", "--params", "20000", "--batch", "1",
                            "--kill", "1.0@10,2.0@60,5.0@60,9.0@60,12.0@60", "--silence-ms", "10000"},
                           {"REJOIN_FULL_MESH_MEMBERS=4"});
  expect_sound(report, 300, {"kill", "kill", "kill", "kill", "kill"});
  const auto& links = report.at("links");
  ASSERT_GT(links.size(), 2u);
  EXPECT_LT(links.at(0).at("most"), 15) << "not with all others";
  for (std::size_t i = 0; i < 2; ++i) EXPECT_EQ(links.at(i).at("missing"), 0) << links.at(i).dump();
}

TEST(Demo, AllButOneDieAtOnce) {
  expect_sound(demo({"--steps", "160", "--kill", "0.1@30,2.0@30", "--params", "600000"}), 160, {"kill", "kill"});
}

TEST(Demo, EverythingDiesAndStartsAgainFromWhatIsLeft) {
  expect_sound(demo({"--steps", "80", "--kill", "0.1@30,1.0@30,2.1@30"}), 80, {"kill", "kill", "kill"});
}

TEST(Demo, AStoppedProcessIsOutAfterItsSilence) {
  const auto report = demo({"--steps", "120", "--hang", "2.1@30", "--silence-ms", "500"});
  expect_sound(report, 120, {"hang"});
}

TEST(Demo, ADaemonIsKilledAndItsTrainersFindTheNextOne) {
  const auto report = demo({"--steps", "120", "--kill-daemon", "1@40"});
  expect_sound(report, 120, {"kill_daemon"});
  EXPECT_TRUE(report.at("catch_ups").empty()) << "the trainers outlive their daemon";
}

TEST(Demo, TheCoordinatorIsKilledAndGoesOnFromItsLog) {
  const auto report = demo({"--steps", "120", "--kill-coordinator", "40"});
  expect_sound(report, 120, {"kill_coordinator"});
  EXPECT_TRUE(report.at("catch_ups").empty()) << "nobody is lost with the coordinator";
}

// A stream slow enough to be met under way.
const std::vector<std::string> kSlowStream{"REJOIN_STREAM_LIMIT=40"};

TEST(Demo, AStoppedCoordinatorPutsNobodyOut) {
  const auto report = demo({"--steps", "120", "--pause-coordinator", "40", "--pause-ms", "3500"});
  expect_sound(report, 120, {"pause_coordinator"});
  expect_nobody_out(report);
}

TEST(Demo, ASuspendedMachineGoesOnAtTheNextStep) {
  const auto report = demo({"--steps", "120", "--pause-all", "40", "--pause-ms", "5000"});
  expect_sound(report, 120, {"pause_all"});
  expect_nobody_out(report);
}

// Its processes are found as a user would find them: by what they were started with.
pid_t child_of(pid_t parent, const std::string& argument) {
  std::ifstream children("/proc/" + std::to_string(parent) + "/task/" + std::to_string(parent) + "/children");
  for (pid_t pid = 0; children >> pid;)
    if (read_file("/proc/" + std::to_string(pid) + "/cmdline").find(argument) != std::string::npos) return pid;
  return 0;
}

TEST(Demo, WhoIsKilledFromOutsideIsStartedAgain) {
  Scratch scratch;
  const std::string json = scratch.path + "/report.json", output = scratch.path + "/out";
  Process process({binaries() + "/rejoin-demo", "--data", REJOIN_DATA, "--json", json, "--no-baseline", "--no-kill",
                   "--params", "300000", "--steps", "200"},
                  output);
  ASSERT_TRUE(eventually([&] { return read_file(output).find("2=contributor") != std::string::npos; }));
  for (const char* victim : {"--coordinator", "node1"}) {
    const pid_t pid = child_of(process.pid(), victim);
    ASSERT_GT(pid, 0) << victim;
    ASSERT_EQ(::kill(pid, SIGKILL), 0);
    EXPECT_TRUE(eventually([&] {
      const pid_t now = child_of(process.pid(), victim);
      return now > 0 && now != pid;
    })) << victim;
  }
  ASSERT_EQ(process.wait(std::chrono::seconds(60)), 0) << process.output();
  const auto report = nlohmann::json::parse(read_file(json), nullptr, false);
  expect_sound(report, 200, {});
  EXPECT_TRUE(report.at("catch_ups").empty()) << "no trainer was lost";
  EXPECT_EQ(report.at("rolled_back_steps"), 0);
}

TEST(Demo, ASourceDiesDuringTheCatchUp) {
  expect_sound(
      demo({"--steps", "150", "--kill", "1.0@20", "--kill-source", "--params", "1500000", "--batch", "4"}, kSlowStream),
      150, {"kill", "kill_source"});
}

TEST(Demo, TheJoinerDiesDuringItsCatchUp) {
  expect_sound(
      demo({"--steps", "150", "--kill", "1.0@20", "--kill-joiner", "--params", "1500000", "--batch", "4"}, kSlowStream),
      150, {"kill", "kill_joiner"});
}

// State and gradients in the memory of a GPU, which all processes share: one made of software, which no host can touch.
TEST(Demo, OnAGpuAKilledReplicaComesBackWithTheSameBits) {
  const std::vector<std::string> gpu{"LD_LIBRARY_PATH=" REJOIN_FAKE_CUDA};
  const auto report = demo({"--steps", "30", "--kill", "1.0@6", "--device", "cuda:0", "--params", "100000"}, gpu);
  expect_sound(report, 30, {"kill"});
  EXPECT_EQ(report.at("catch_ups").size(), 2u) << report.at("events").dump(1);
}

// … coded, too: by a coder of its own, with the bits of the host's.
TEST(Demo, OnAGpuCodedGradientsGiveTheSameBitsAsOnTheHost) {
  const auto run = [](const std::string& device, const std::string& coding) {
    return demo({"--steps", "6", "--no-kill", "--ranks", "1", "--params", "400000", "--device", device},
                {"LD_LIBRARY_PATH=" REJOIN_FAKE_CUDA, "REJOIN_CODING=" + coding});
  };
  const auto coded = run("cuda:0", "4");
  expect_sound(coded, 6, {});
  EXPECT_EQ(coded.at("digests"), run("host", "4").at("digests"));
  EXPECT_NE(coded.at("digests"), run("host", "off").at("digests")) << "nothing was coded";
}

// … where the trainer's framework has allocated them: in blocks, or mapped in segments.
TEST(Demo, InAFrameworksMemoryItIsTheSame) {
  const std::vector<std::string> gpu{"LD_LIBRARY_PATH=" REJOIN_FAKE_CUDA};
  const std::vector<std::string> common{"--kill",      "1.0@6", "--device", "cuda:0",
                                        "--transport", "tcp",   "--params", "100000"};
  for (const auto& [state, steps, daemon] : {std::tuple{"pool", "30", ""}, {"expandable", "40", "2@24"}}) {
    std::vector<std::string> arguments = common;
    arguments.insert(arguments.end(), {"--steps", steps, "--state", state});
    std::vector<std::string> faults{"kill"};
    if (*daemon) {
      arguments.insert(arguments.end(), {"--kill-daemon", daemon});
      faults.emplace_back("kill_daemon");
    }
    const auto report = demo(arguments, gpu);
    expect_sound(report, std::stoi(steps), faults);
    EXPECT_EQ(report.at("catch_ups").size(), 2u) << state << "\n" << report.at("events").dump(1);
  }
}

// … nor is a digest, as on a card that others keep busy: heartbeats go on, and the others wait for the step's report.
TEST(Demo, AnAuditOfAGpuThatTakesLongerThanTheSilenceIsNoFailure) {
  const auto report = demo(
      {"--steps", "20", "--replicas", "2", "--ranks", "1", "--no-kill", "--device", "cuda:0", "--silence-ms", "1000"},
      {"LD_LIBRARY_PATH=" REJOIN_FAKE_CUDA, "REJOIN_FAKE_CUDA=slow_digest=4000"});
  expect_sound(report, 20, {});
  EXPECT_TRUE(report.at("catch_ups").empty()) << "somebody was put out";
  EXPECT_GE(report.at("events").back().at("t_ms").get<double>(), 4000) << "no digest took long";
}

TEST(Demo, StepsLongerThanTheSilenceAreNoFailure) {
  const auto report =
      demo({"--steps", "24", "--kill", "1.0@5", "--silence-ms", "150", "--params", "3000000", "--batch", "48"});
  expect_sound(report, 24, {"kill"});
  for (const auto& event : report.at("events"))
    if (event.at("kind") == "epoch" && event.contains("reason"))
      EXPECT_EQ(event.at("reason").get<std::string>().find("waits for"), std::string::npos) << event.dump();
  if (report.at("step_ms").at("median").get<double>() < 150)
    GTEST_SKIP() << "this machine computes a step faster than the silence";
}

TEST(Demo, OverTcpItIsTheSame) {
  expect_sound(demo({"--steps", "120", "--kill", "0.0@30", "--transport", "tcp"}), 120, {"kill"});
}

TEST(Demo, OverTwoTcpRailsItIsTheSame) {
  expect_sound(demo({"--steps", "120", "--kill", "1.1@30", "--transport", "tcp:127.0.0.1,127.0.0.2"}), 120, {"kill"});
}

TEST(Demo, RandomKillsAtRandomSteps) {
  std::mt19937_64 random(seed_of_this_run());
  std::string kills;
  // Different replicas, some steps apart or together.
  std::vector<unsigned> replicas{0, 1, 2};
  std::shuffle(replicas.begin(), replicas.end(), random);
  for (unsigned i = 0; i < 2; ++i)
    kills += (i ? "," : "") + std::to_string(replicas[i]) + "." + std::to_string(random() % 2) + "@" +
             std::to_string(10 + random() % 60);
  SCOPED_TRACE("--kill " + kills);
  expect_sound(demo({"--steps", "250", "--kill", kills}), 250, {"kill", "kill"});
}

TEST(Demo, ATraceOfAllProcessesIsWritten) {
  Scratch scratch;
  const std::string trace = scratch.path + "/trace.json";
  demo({"--steps", "60", "--kill", "1.0@20", "--trace", trace});
  const auto json = nlohmann::json::parse(read_file(trace), nullptr, false);
  ASSERT_FALSE(json.is_discarded());
  std::set<std::string> names;
  for (const auto& event : json.at("traceEvents"))
    if (event.at("ph") == "M") names.insert(event.at("args").at("name").get<std::string>());
  for (const char* who : {"coordinator", "node0", "r0.0", "r1.1", "demo"}) EXPECT_TRUE(names.contains(who)) << who;
}

// As from a terminal, where a second Ctrl-C often follows.
TEST(Demo, AnInterruptEndsItAndLeavesNothing) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    Scratch scratch;
    const std::string output = scratch.path + "/out";
    Process process({binaries() + "/rejoin-demo", "--data", REJOIN_DATA, "--no-baseline", "--no-kill", "--params",
                     "300000", "--steps", "1000000"},
                    output);
    ASSERT_TRUE(eventually([&] { return read_file(output).find("2=contributor") != std::string::npos; }));
    const std::string said = read_file(output);
    const auto at = said.find("/tmp/rejoin-demo-");
    ASSERT_NE(at, std::string::npos) << said;
    const std::string directory = said.substr(at, said.find('\n', at) - at);
    ASSERT_TRUE(std::filesystem::exists(directory)) << directory;
    const auto addresses = nlohmann::json::parse(read_file(directory + "/run/coordinator.json"));
    EXPECT_NE(said.find("the page is at http://" + addresses.at("status").get<std::string>() + "/\n"),
              std::string::npos)
        << said;
    const pid_t coordinator = child_of(process.pid(), "--coordinator"),
                trainer = child_of(process.pid(), "rejoin-demo-trainer");
    ASSERT_GT(coordinator, 0);
    ASSERT_GT(trainer, 0);
    ::kill(process.pid(), signal);
    ::kill(process.pid(), signal);
    EXPECT_EQ(process.wait(std::chrono::seconds(15)), 128 + signal) << process.output();
    EXPECT_NE(process.output().find(std::string("rejoin-demo: interrupted by SIG") + ::sigabbrev_np(signal)),
              std::string::npos)
        << process.output();
    EXPECT_FALSE(std::filesystem::exists(directory)) << "the job key is in it";
    for (const pid_t child : {coordinator, trainer}) EXPECT_EQ(::kill(child, 0), -1) << child;
  }
}

// While it waits for a daemon that can't come up, as far as it can tell.
TEST(Demo, AnInterruptEndsItWhileItStarts) {
  Scratch scratch;
  const std::string output = scratch.path + "/out", bin = scratch.path + "/bin";
  std::filesystem::create_directory(bin);
  std::filesystem::copy_file(binaries() + "/rejoin-demo", bin + "/rejoin-demo");
  scratch.write("bin/rejoind", "#!/bin/sh\necho up\nexec sleep 100\n", 0700);
  Process process({bin + "/rejoin-demo", "--data", REJOIN_DATA}, output);
  ASSERT_TRUE(eventually([&] { return child_of(process.pid(), "sleep") > 0; }));
  const pid_t child = child_of(process.pid(), "sleep");
  ::kill(process.pid(), SIGINT);
  EXPECT_EQ(process.wait(std::chrono::seconds(5)), 128 + SIGINT) << process.output();
  EXPECT_EQ(::kill(child, 0), -1);
}

TEST(Demo, ADaemonThatDoesNotComeUpEndsItAtOnce) {
  const Ended ended = run({binaries() + "/rejoin-demo", "--data", REJOIN_DATA, "--transport", "bogus"});
  EXPECT_EQ(ended.status, 1);
  EXPECT_NE(ended.output.find("no transport 'bogus': use shm, tcp"), std::string::npos) << ended.output;
  EXPECT_NE(ended.output.find("a daemon ended before it was up"), std::string::npos) << ended.output;
  const auto at = ended.output.find("/tmp/rejoin-demo-");
  ASSERT_NE(at, std::string::npos) << ended.output;
  EXPECT_FALSE(std::filesystem::exists(ended.output.substr(at, ended.output.find('\n', at) - at)));
}

TEST(Demo, WhereItsDirectoryCannotBeMadeItSaysSo) {
  const Ended ended = run({binaries() + "/rejoin-demo", "--data", REJOIN_DATA}, {"TMPDIR=/proc"});
  EXPECT_EQ(ended.status, 1) << ended.output;
  EXPECT_NE(ended.output.find("rejoin-demo: /proc/rejoin-demo-"), std::string::npos) << ended.output;
  EXPECT_NE(ended.output.find("set TMPDIR to a directory that can be written to"), std::string::npos) << ended.output;
}

TEST(Demo, OfARunWithoutSurvivorsItTellsWhatCanBeMeasured) {
  const Ended ended = run({binaries() + "/rejoin-demo", "--data", REJOIN_DATA, "--no-baseline", "--params", "20000",
                           "--steps", "40", "--replicas", "1", "--kill", "0.0@10"});
  EXPECT_EQ(ended.status, 0) << ended.output;
  EXPECT_NE(ended.output.find("kill of replica 0 at step 10: seen after "), std::string::npos) << ended.output;
  EXPECT_EQ(ended.output.find("-1.0 ms"), std::string::npos) << ended.output;
}

TEST(Demo, ATrainersFailureIsShownInItsOwnWords) {
  const Ended ended = run({binaries() + "/rejoin-demo", "--data", "/dev/null", "--quiet"});
  EXPECT_EQ(ended.status, 1) << ended.output;
  EXPECT_NE(ended.output.find(" ended with "), std::string::npos) << ended.output;
  EXPECT_NE(ended.output.find("/dev/null", ended.output.find(".out: ")), std::string::npos) << ended.output;
  const auto kept = ended.output.find("/tmp/rejoin-demo-");
  ASSERT_NE(kept, std::string::npos) << ended.output;
  std::filesystem::remove_all(ended.output.substr(kept, std::string("/tmp/rejoin-demo-XXXXXX").size()));
}

TEST(Demo, AFaultThatDidNotComeAboutIsNamed) {
  const Ended ended = run({binaries() + "/rejoin-demo", "--data", REJOIN_DATA, "--replicas", "2", "--ranks", "1",
                           "--params", "20000", "--steps", "4", "--kill", "1.0@3", "--kill-source", "--no-baseline"});
  EXPECT_EQ(ended.status, 0) << ended.output;
  EXPECT_NE(ended.output.find("--kill-source did not come about: nobody caught up from it before the last step\n"),
            std::string::npos)
      << ended.output;
}

// Before anything has run: in it the fault would have no effect, or another one.
TEST(Demo, WhatCannotBeDoneIsRefusedAsItWasTyped) {
  struct Case {
    std::vector<std::string> arguments;
    std::string says;
  };
  const std::string run_of = " is outside this run of 3 replicas × 2 ranks and 150 steps: ";
  for (const auto& [arguments, says] : std::vector<Case>{
           {{"--kill", "7.0@3"}, "--kill 7.0@3" + run_of + "a replica from 0 to 2"},
           {{"--kill", "1.0@9999"}, "--kill 1.0@9999" + run_of + "a step from 1 to 149"},
           {{"--hang", "1.2@3"}, "--hang 1.2@3" + run_of},
           {{"--kill-daemon", "7@50"}, "--kill-daemon 7@50" + run_of},
           {{"--drift", "5@10"}, "--drift 5@10" + run_of},
           {{"--replicas", "2", "--drift", "1@10"}, "--drift 1@10: it takes three replicas to say which one differs"},
           {{"--replicas", "1", "--flip-bit", "10"}, "--flip-bit 10: one replica has nobody to compare"},
           {{"--kill-coordinator", "100000"}, "--kill-coordinator 100000" + run_of},
           {{"--pause-coordinator", "150"}, "--pause-coordinator 150" + run_of},
           {{"--pause-all", "150"}, "--pause-all 150" + run_of},
           {{"--flip-bit", "99999"}, "--flip-bit 99999" + run_of},
           {{"--kill-coordinator", "0"}, "--kill-coordinator: Value 0 not in range 1 to 1000000"},
           {{"--kill-leader", "10"}, "--kill-leader 10: there is one coordinator, and no etcd; give --store etcd, too"},
           {{"--pause-etcd", "10"}, "--pause-etcd 10: there is one coordinator, and no etcd"},
           {{"--store", "etcd", "--kill-leader", "150"}, "--kill-leader 150" + run_of},
           {{"--store", "etcd", "--kill-coordinator", "10"},
            "--kill-coordinator 10: with --store etcd there are several"},
           {{"--no-kill", "--store", "etcd", "--kill-etcd", "10"}, "--no-kill and --kill-etcd 10: "},
           {{"--kill", "one"}, "--kill one is not of the form REPLICA.RANK@STEP, e.g. 1.0@40"},
           {{"--kill-daemon", "one"}, "--kill-daemon one is not of the form REPLICA@STEP, e.g. 1@40"},
           {{"--no-kill", "--kill", "1.0@10"}, "--no-kill and --kill 1.0@10: nothing is killed, or that is"},
           {{"--no-kill", "--hang", "1.0@10"}, "--no-kill and --hang 1.0@10: "},
           {{"--no-kill", "--kill-daemon", "1@10"}, "--no-kill and --kill-daemon 1@10: "},
           {{"--no-kill", "--kill-coordinator", "10"}, "--no-kill and --kill-coordinator 10: "},
           {{"--no-kill", "--kill-source"}, "--no-kill and --kill-source: "},
           {{"--no-kill", "--kill-joiner"}, "--no-kill and --kill-joiner: "},
           {{"--kill-source", "--kill-daemon", "1@10"}, "--kill-source: nobody catches up in this run"},
           {{"--kill", "1.0@40", "--kill", "1.0@40"}, "--kill 1.0@40: --kill 1.0@40 ends replica 1 already"},
           {{"--kill", "1.0@40", "--hang", "1.1@60"}, "--hang 1.1@60: --kill 1.0@40 ends replica 1 already"},
           {{"--json", "/nope/x"}, "--json /nope/x: it could not be written: No such file or directory"},
           {{"--trace", "/nope/x"}, "--trace /nope/x: it could not be written: No such file or directory"},
           {{"--json", "/tmp"}, "--json /tmp: /tmp is a directory"},
           {{"--json", "/dev/null/x"}, "--json /dev/null/x: /dev/null is no directory"},
           {{"--log-level", "loud"}, "--log-level: loud not in {trace,debug,info,warn,error,off}"},
       }) {
    std::vector<std::string> whole{binaries() + "/rejoin-demo", "--data", REJOIN_DATA};
    whole.insert(whole.end(), arguments.begin(), arguments.end());
    const Ended ended = run(whole);
    EXPECT_EQ(ended.status, 2) << ended.output;
    EXPECT_NE(ended.output.find(says), std::string::npos) << "wanted: " << says << "\ngot: " << ended.output;
    EXPECT_EQ(ended.output.find("/tmp/rejoin-demo-"), std::string::npos) << "it has begun: " << ended.output;
  }
}

}  // namespace
}  // namespace rejoin::test
