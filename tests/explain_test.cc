// What `rejoin explain` and `rejoin trace` make of a demo job in which processes were killed and stopped: the
// recordings that those left behind are all that they are given.
#include <gmock/gmock.h>

#include <map>

#include "tests/daemons.h"
#include "tests/demo_support.h"

namespace rejoin::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

std::string explain(const std::string& recordings, std::vector<std::string> more = {}) {
  more.insert(more.begin(), {binaries() + "/rejoin", "explain", recordings});
  const Ended ended = run(more);
  EXPECT_EQ(ended.status, 0) << ended.output;
  return ended.output;
}

// The line of --list with this text in it: its number's explanation is found by its time.
std::string explain_one(const std::string& recordings, const std::string& text) {
  std::istringstream lines(explain(recordings, {"--list"}));
  for (std::string line; std::getline(lines, line);) {
    std::string number, day, time;
    if (line.find(text) == std::string::npos || !(std::istringstream(line) >> number >> day >> time)) continue;
    return explain(recordings, {"--at", day + "T" + time});
  }
  return "no incident with '" + text + "' in\n" + explain(recordings, {"--list"});
}

TEST(Explain, EachOfFourLossesIsNamedAndAllProcessesAgreeOnWhenEpochsBegan) {
  const Scratch scratch;
  const std::string recordings = scratch.path + "/recordings";
  const auto report = demo({"--steps", "200", "--kill", "1.0@30", "--kill-coordinator", "70", "--kill-daemon", "0@100",
                            "--hang", "2.1@130", "--silence-ms", "1000"},
                           {"REJOIN_FLIGHT_DIR=" + recordings});
  expect_sound(report, 200, {"hang", "kill", "kill_coordinator", "kill_daemon"});

  const auto killed = explain_one(recordings, "without replica 1");
  EXPECT_THAT(killed,
              AllOf(HasSubstr("Trainer r1.0 (process"), HasSubstr("ended without a word"),
                    HasSubstr("aemon node1 said of rank 0: its process"), HasSubstr("The coordinator began epoch"),
                    HasSubstr("It contributed again from step"), HasSubstr("one machine's clock")));
  const auto stopped = explain_one(recordings, "without replica 2");
  EXPECT_THAT(stopped, AllOf(HasSubstr("Trainer r2.1 (process"), HasSubstr("gave its last sign of life at"),
                             HasSubstr("aemon node2 said of rank 1: its process gave no sign of life for 1000 ms"),
                             HasSubstr("It contributed again from step")));
  const auto coordinator = explain_one(recordings, "the end of coordinator");
  EXPECT_THAT(coordinator, AllOf(HasSubstr("Coordinator (process"), HasSubstr("ended without a word"),
                                 HasSubstr("lost the coordinator:"), HasSubstr("nobody was taken out"),
                                 HasSubstr("went on from the log")));
  const auto daemon = explain_one(recordings, "the end of node0");
  EXPECT_THAT(daemon, AllOf(HasSubstr("Daemon node0 (process"), HasSubstr("ended without a word"),
                            HasSubstr("lost its daemon:"), HasSubstr("nobody was taken out"),
                            HasSubstr("2 trainers connected with it again")));

  const std::string path = scratch.path + "/trace.json";
  const Ended traced = run({binaries() + "/rejoin", "trace", recordings, "-o", path});
  ASSERT_EQ(traced.status, 0) << traced.output;
  const auto trace = nlohmann::json::parse(read_file(path), nullptr, false);
  ASSERT_FALSE(trace.is_discarded());
  const double error = trace.at("otherData").at("clocks_differ_by_at_most_us");
  std::map<std::string, std::vector<double>> begun;  // of each epoch, on each process
  std::map<std::string, double> decided;
  std::map<std::string, int> spans;
  for (const auto& event : trace.at("traceEvents")) {
    const std::string name = event.at("name");
    if (event.at("ph") != "X") continue;
    ++spans[name.substr(0, name.find(' '))];
    if (name.starts_with("epoch ")) decided[name.substr(6)] = event.at("ts");
    if (name.starts_with("enter epoch ")) begun[name.substr(12)].push_back(event.at("ts"));
  }
  for (const char* kind : {"compute", "reduce", "commit", "update", "bucket", "catch-up", "appended"})
    EXPECT_GT(spans[kind], 0) << kind;
  for (const auto& [epoch, times] : begun) {
    ASSERT_TRUE(decided.contains(epoch)) << epoch;
    EXPECT_GE(times.size(), epoch == "1" ? 6u : 4u) << "ranks that entered epoch " << epoch;
    for (const double time : times) {
      EXPECT_GE(time, decided[epoch] - error) << "nobody enters epoch " << epoch << " before it is decided";
      EXPECT_LE(time, decided[epoch] + error + 5e6) << epoch;
    }
  }
}

// A daemon and a trainer whose monotonic clock is eleven days ahead, as that of another machine is.
TEST(Explain, ClocksThatDifferAreComparedByHeartbeats) {
  const std::vector<std::string> ahead{"/usr/bin/unshare", "--time",      "--fork",
                                       "--kill-child",     "--monotonic", "1000000"};
  const auto with = [](std::vector<std::string> command, const std::vector<std::string>& more) {
    command.insert(command.end(), more.begin(), more.end());
    return command;
  };
  if (run(with(ahead, {"/bin/true"})).status != 0) GTEST_SKIP() << "no process may have a clock of its own here";
  Daemons job;
  const std::string recordings = job.file("recordings"), path = job.file("trace.json");
  job.of_all = {"--flight-dir", recordings};
  const auto trainer = [&](int replica) {
    const std::string number = std::to_string(replica);
    return std::vector<std::string>{binaries() + "/rejoin-demo-trainer",
                                    "--replica",
                                    number,
                                    "--rank",
                                    "0",
                                    "--socket",
                                    job.file("node" + number + ".sock"),
                                    "--data",
                                    REJOIN_DATA,
                                    "--params",
                                    "50000",
                                    "--flight-dir",
                                    recordings};
  };
  const auto coordinator = job.start_coordinator({"--replicas", "2", "--ranks", "1", "--batch", "4"});
  const auto node = job.start_node(0, {"--connect", job.coordinator});
  Process first(trainer(0), job.file("trainer0.out"));
  // In one namespace: in the shell's, which is exchanged for the trainer. The daemon ends with it.
  std::string both = "setpriv --pdeathsig KILL ";
  for (const auto& word :
       {kDaemon, std::string("--name"), std::string("node1"), std::string("--socket"), job.file("node1.sock"),
        std::string("--connect"), job.coordinator, std::string("--silence-ms"), job.silence_ms,
        std::string("--job-key-file"), job.key, std::string("--flight-dir"), recordings, std::string("& exec")})
    both += word + " ";
  for (const auto& word : trainer(1)) both += word + " ";
  const Process second(with(ahead, {"/bin/sh", "-c", both}), job.file("trainer1.out"));
  const auto committed = [&] {
    const auto now = job.status();
    return now.is_null() ? std::uint64_t{0} : now.value("committed", std::uint64_t{0});
  };
  ASSERT_TRUE(eventually([&] { return committed() > 20; })) << first.output() << second.output();
  // Its daemon does not tell of its end before the other trainer has found that, and an epoch has begun for it.
  ::kill(node->pid(), SIGSTOP);
  ::kill(first.pid(), SIGKILL);
  EXPECT_TRUE(eventually([&] { return job.status().at("epoch") == 2; }));
  ::kill(node->pid(), SIGCONT);
  const std::uint64_t then = committed();
  ASSERT_TRUE(eventually([&] { return committed() > then + 20; })) << second.output();
  // Once heartbeats have gone both ways.
  std::string told;
  ASSERT_TRUE(eventually([&] {
    told = run({binaries() + "/rejoin", "explain", recordings}).output;
    return told.find("machines are compared by their heartbeats") != std::string::npos;
  })) << told;
  EXPECT_THAT(told, AllOf(HasSubstr("without replica 0"), HasSubstr("Trainer r0.0 (process"),
                          HasSubstr("rainer r1.0 lost its connection with replica 0")));
  ASSERT_EQ(run({binaries() + "/rejoin", "trace", recordings, "-o", path}).status, 0);
  const auto trace = nlohmann::json::parse(read_file(path), nullptr, false);
  ASSERT_FALSE(trace.is_discarded());
  EXPECT_EQ(trace.at("otherData").at("clocks"), 2);
  const double error = trace.at("otherData").at("clocks_differ_by_at_most_us");
  EXPECT_LT(error, 1e6);
  std::map<std::string, double> decided;
  for (const auto& event : trace.at("traceEvents")) {
    const std::string name = event.at("name");
    if (name.starts_with("epoch ") && event.at("ph") == "X") decided[name.substr(6)] = event.at("ts");
  }
  int entered = 0;
  for (const auto& event : trace.at("traceEvents")) {
    const std::string name = event.at("name");
    if (!name.starts_with("enter epoch ") || event.at("ph") != "X") continue;
    ++entered;
    EXPECT_GE(event.at("ts").get<double>(), decided.at(name.substr(12)) - error);
    EXPECT_LE(event.at("ts").get<double>(), decided.at(name.substr(12)) + error + 5e6);
  }
  EXPECT_GE(entered, 3) << "both the first epoch, and the one who is left the second";
}

TEST(Explain, WithoutRecordingsOrAnIncidentItSaysSo) {
  const Scratch scratch;
  std::filesystem::create_directory(scratch.path + "/empty");
  scratch.write("broken.flight", "RJFLIGHT, but no more");
  std::filesystem::create_symlink("loop", scratch.path + "/loop");
  const std::string rejoin = binaries() + "/rejoin";
  for (const auto& [arguments, text] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"explain", scratch.path + "/nowhere"}, "there is no such file or directory"},
           {{"explain", scratch.path + "/loop/x"}, "/loop/x: Too many levels of symbolic links"},
           {{"explain", scratch.path + "/empty"}, "no flight recordings in"},
           {{"explain", scratch.path}, "broken.flight is no flight recording: it is too short"},
           {{"trace", scratch.path + "/empty", "-o", scratch.path + "/t"}, "give the --flight-dir of daemons"}}) {
    std::vector<std::string> line{rejoin};
    line.insert(line.end(), arguments.begin(), arguments.end());
    const Ended ended = run(line);
    EXPECT_EQ(ended.status, 1) << ended.output;
    EXPECT_THAT(ended.output, HasSubstr(text));
  }
  const Ended wrong = run({rejoin, "explain", "--job", "nonsense"});
  EXPECT_EQ(wrong.status, 2);
  EXPECT_THAT(wrong.output, HasSubstr("16 hex digits"));
  const Ended both = run({rejoin, "explain", "--epoch", "2", "--at", "nonsense"});
  EXPECT_EQ(both.status, 2);
  EXPECT_THAT(both.output, HasSubstr("--at excludes --epoch"));
}

}  // namespace
}  // namespace rejoin::test
