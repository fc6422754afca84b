// Jobs of rejoind and the minimal trainer as a user runs them: relays, logs, sockets, transports, a GPU.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <set>

#include "base/fd.h"
#include "base/unix_socket.h"
#include "membership/log.h"
#include "tests/daemon_support.h"

namespace rejoin::test {
namespace {

TEST(Minimal, TwoReplicasLearnAndEndWithTheSameBits) {
  Job job;
  job.start(2, 300);
  Process first({kMinimal}, job.scratch.path + "/a", job.environment(0)),
      second({kMinimal}, job.scratch.path + "/b", job.environment(1));
  EXPECT_EQ(first.wait(std::chrono::seconds(30)), 0) << first.output();
  EXPECT_EQ(second.wait(std::chrono::seconds(30)), 0) << second.output();
  EXPECT_EQ(first.output(), second.output());
  EXPECT_NE(first.output().find("w = 3.0000 after step 300"), std::string::npos) << first.output();
  const Ended audit = run({kCli, "audit", job.scratch.path + "/log/decisions.log"});
  EXPECT_EQ(audit.status, 0) << audit.output;
  EXPECT_NE(audit.output.find("300 steps committed"), std::string::npos) << audit.output;
  EXPECT_NE(audit.output.find("4800 trained once, 0 lost, 0 repeated"), std::string::npos) << audit.output;
}

// What it opens next would be taken for them: its log's lines would go into its recording.
TEST(Daemon, WithoutStandardDescriptorsItWritesIntoNothingElse) {
  Scratch scratch;
  const std::string addresses = scratch.path + "/addresses", recordings = scratch.path + "/recordings";
  Process daemon({"/bin/sh", "-c", R"(exec "$@" <&- >&- 2>&-)", "sh", kDaemon, "--job-key-file", scratch.key(),
                  "--coordinator", "--log-directory", scratch.path + "/log", "--status", "127.0.0.1:0",
                  "--address-file", addresses, "--flight-dir", recordings},
                 scratch.path + "/out");
  ASSERT_TRUE(eventually([&] { return std::filesystem::exists(addresses); }));
  for (const int fd : {1, 2})  // 0 is taken by gRPC before main()
    EXPECT_EQ(std::filesystem::read_symlink(fmt::format("/proc/{}/fd/{}", daemon.pid(), fd)), "/dev/null");
  for (const auto& recording : std::filesystem::directory_iterator(recordings))
    EXPECT_EQ(read_file(recording.path()).substr(0, 8), "RJFLIGHT");
}

// Of a trainer that knows nothing of events, by a variable alone.
TEST(Minimal, ItsStepsAreInTheTraceBesideTheDaemons) {
  Job job;
  const std::string events = job.file("events");
  job.processes.push_back(
      job.start_coordinator({"--replicas", "1", "--ranks", "1", "--steps", "20", "--events", events}));
  job.processes.push_back(job.start_node(0, {"--connect", job.coordinator, "--events", events}));
  auto environment = job.environment(0);
  environment.push_back("REJOIN_EVENTS=" + events);
  Process trainer({kMinimal}, job.file("trainer"), environment);
  ASSERT_EQ(trainer.wait(std::chrono::seconds(30)), 0) << trainer.output();
  const std::string trace = job.file("trace.json");
  const Ended merged = run({kCli, "trace", events, "-o", trace});
  ASSERT_EQ(merged.status, 0) << merged.output;
  std::map<int, std::string> rows;
  std::set<std::string> spans;
  const auto json = nlohmann::json::parse(read_file(trace));
  for (const auto& event : json.at("traceEvents")) {
    const int pid = event.at("pid");
    if (event.at("ph") == "M") rows[pid] = event.at("args").at("name");
    if (event.at("ph") == "X" && rows.at(pid).starts_with("r0.0.")) spans.insert(event.at("name"));
  }
  ASSERT_EQ(rows.size(), 3u) << merged.output;
  for (const char* phase : {"compute", "reduce", "commit", "update"})
    for (const char* step : {" 1", " 20"}) EXPECT_TRUE(spans.contains(phase + std::string(step))) << phase << step;
  const Ended refused = run({kMinimal}, {job.environment(0)[0], job.environment(0)[2], "REJOIN_EVENTS=/dev/null/no"});
  EXPECT_NE(refused.output.find("event directory /dev/null/no: Not a directory"), std::string::npos) << refused.output;
}

// Every rank on a node of its own, a relay for each replica: one alone in its process, one beside a node. A relay that
// is killed and started again costs nobody his place.
TEST(Relay, ReplicasOfManyNodesGoThroughItAndOutliveIt) {
  Job job;
  job.silence_ms = "10000";  // however long a crowded machine takes to start a process
  job.processes.push_back(job.start_coordinator({"--replicas", "2", "--ranks", "2", "--batch", "8"}));
  const auto relay = [&](const std::string& at) {
    return job.daemon("relay", {"--relay", at, "--connect", job.coordinator});
  };
  auto first_relay = relay("127.0.0.1:0");
  const std::string first = job.addresses("relay").at("relay");
  const auto node = [&](std::uint32_t n, std::vector<std::string> more) {
    job.processes.push_back(job.start_node(n, std::move(more)));
  };
  node(0, {"--connect", first});
  node(1, {"--connect", first});
  node(2, {"--relay", "127.0.0.1:0", "--connect", job.coordinator});
  node(3, {"--connect", job.addresses("node2").at("relay")});
  for (std::uint32_t n = 0; n < 4; ++n)
    job.processes.push_back(std::make_unique<Process>(
        std::vector{kMinimal}, job.scratch.path + "/trainer" + std::to_string(n),
        std::vector{"REJOIN_REPLICA=" + std::to_string(n / 2), "REJOIN_RANK=" + std::to_string(n % 2),
                    "REJOIN_SOCKET=" + job.socket(n)}));
  const auto committed = [&] { return job.status().at("committed").get<std::uint64_t>(); };
  ASSERT_TRUE(eventually([&] { return committed() > 20; })) << job.status().dump();
  EXPECT_EQ(job.status().at("nodes"), 2) << "the relays";
  const auto epoch = job.status().at("epoch");
  first_relay.reset();
  first_relay = relay(first);
  const auto then = committed();
  EXPECT_TRUE(eventually([&] { return committed() > then + 20; })) << job.status().dump();
  EXPECT_EQ(job.status().at("epoch"), epoch) << "nobody was lost";
}

// A terminal that was stopped, a pipe whose reader hangs or has gone.
TEST(Coordinator, WhoseLogNobodyReadsGoesOn) {
  Job job;
  const std::string log = job.file("coordinator.out");
  ASSERT_EQ(::mkfifo(log.c_str(), 0600), 0);
  Fd reader(::open(log.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  const Fd writer(::open(log.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC));
  while (::write(writer.get(), "full", 4) > 0) {
  }
  ASSERT_EQ(errno, EAGAIN);
  job.start(1, 0);
  const Process trainer({kMinimal}, job.file("trainer"), job.environment(0));
  const auto a_stranger_calls = [&] {
    const auto at = job.coordinator.rfind(':');
    run({"/bin/bash", "-c",
         "exec 3<>/dev/tcp/" + job.coordinator.substr(0, at) + "/" + job.coordinator.substr(at + 1) + "; echo x >&3"});
  };
  const auto goes_on = [&] {
    const auto committed = [&] { return job.status().at("committed").get<std::uint64_t>(); };
    const auto then = committed();
    return eventually([&] { return committed() > then + 20; });
  };
  a_stranger_calls();
  EXPECT_TRUE(goes_on()) << job.status().dump();
  reader.reset();
  a_stranger_calls();
  EXPECT_TRUE(goes_on()) << job.status().dump();
}

// Somebody has removed the first one's file, and a second daemon has bound the path.
TEST(Node, ThatEndsLeavesTheSocketOfTheNextOneAlone) {
  Job job;
  job.start(1, 0);
  Process& first = *job.processes.back();
  ASSERT_EQ(::kill(first.pid(), SIGSTOP), 0);  // it would make its socket anew
  std::filesystem::remove(job.socket(0));
  std::filesystem::remove(job.file("node0.json"));
  const auto second = job.start_node(0, {"--connect", job.coordinator});
  ASSERT_EQ(::kill(first.pid(), SIGCONT), 0);
  ASSERT_EQ(::kill(first.pid(), SIGTERM), 0);
  EXPECT_EQ(first.wait(std::chrono::seconds(15)), 0) << first.output();
  EXPECT_TRUE(connect_unix(job.socket(0))) << "the second one's trainers can't reach it";
  ASSERT_EQ(::kill(second->pid(), SIGTERM), 0);
  EXPECT_EQ(second->wait(std::chrono::seconds(15)), 0) << second->output();
  EXPECT_FALSE(std::filesystem::exists(job.socket(0))) << "and its own it removes";
}

// A daemon that it sent away would come again only after ever longer pauses, as it does where it is refused.
TEST(Relay, WithoutACoordinatorItKeepsItsDaemonsAndTheirTrainersHearWhy) {
  Job job;
  const auto relay = job.daemon("relay", {"--relay", "127.0.0.1:0", "--connect", "127.0.0.1:1"});
  const auto node = job.start_node(1, {"--connect", job.addresses("relay").at("relay")});
  Process trainer({kMinimal}, job.file("trainer"), job.environment(1));
  EXPECT_TRUE(eventually([&] {
    return read_file(job.file("trainer")).find("the job waits for a coordinator: relay relay is connected with none") !=
           std::string::npos;
  })) << read_file(job.file("trainer"));
  EXPECT_EQ(read_file(job.file("node1.out")).find("trying again"), std::string::npos)
      << read_file(job.file("node1.out"));
}

TEST(Coordinator, WhoseSettingsDoNotFitItsLogEndsAsForAWrongFlag) {
  Job job;
  job.start(1, 0);
  Process trainer({kMinimal}, job.file("a"), job.environment(0));
  ASSERT_TRUE(eventually([&] { return job.status().value("committed", 0) > 0; }));
  job.processes[0].reset();
  const Ended other = run({kDaemon, "--job-key-file", job.key, "--coordinator", "--log-directory", job.file("log"),
                           "--listen", "127.0.0.1:0", "--replicas", "2"},
                          {}, std::chrono::seconds(20));
  EXPECT_EQ(other.status, 2) << other.output;
  EXPECT_NE(other.output.find("Start with those settings or another log directory"), std::string::npos) << other.output;
}

TEST(Relay, WhoseCoordinatorIsItselfIsRefused) {
  Job job;
  const auto port_of_a_relay_that_was_here_before = [&] {
    const auto before = job.daemon("relay", {"--relay", "127.0.0.1:0", "--connect", "127.0.0.1:1"});
    const std::string address = job.addresses("relay").at("relay");
    std::filesystem::remove(job.file("relay.json"));
    return address.substr(address.rfind(':'));
  };
  for (const char* host : {"127.0.0.1", "0.0.0.0"}) {
    std::string port;
    Ended relay;
    for (int tries = 0; tries < 5; ++tries) {  // another process's connection may have been given that port meanwhile
      port = port_of_a_relay_that_was_here_before();
      relay = run({kDaemon, "--job-key-file", job.key, "--relay", host + port, "--connect", "127.0.0.1" + port}, {},
                  std::chrono::seconds(20));
      if (relay.output.find("Address already in use") == std::string::npos) break;
    }
    EXPECT_EQ(relay.status, 1) << relay.output;
    EXPECT_NE(relay.output.find("--connect 127.0.0.1" + port + " leads to this relay itself"), std::string::npos)
        << relay.output;
  }
}

TEST(Daemon, OneWhoseStreamGoesOverAnotherTransportIsNamedBeforeItIsNeeded) {
  Job job;
  const auto coordinator = job.start_coordinator({"--replicas", "2", "--ranks", "1", "--batch", "8"});
  const auto first = job.start_node(0, {"--connect", job.coordinator}),
             second = job.start_node(1, {"--connect", job.coordinator, "--transport", "tcp:127.0.0.1,127.0.0.2"});
  Process a({kMinimal}, job.file("a"), job.environment(0)), b({kMinimal}, job.file("b"), job.environment(1));
  EXPECT_TRUE(eventually([&] { return job.status().value("committed", 0) > 2; })) << "what works goes on";
  const auto says = [&](const char* log, const std::string& line) {
    EXPECT_TRUE(eventually([&] { return read_file(job.file(log)).find(line) != std::string::npos; }))
        << read_file(job.file(log));
  };
  says("node0.out", "the catch-up stream of replica 1's daemon goes over tcp over 2 rails, and this node's over shm");
  says("node1.out", "the catch-up stream of replica 0's daemon goes over shm, and this node's over tcp over 2 rails");
  says("node1.out", "Start all daemons of a job with the same --transport");
  const std::string told = run({kCli, "status", job.coordinator_status}).output;
  EXPECT_NE(told.find("WARNING replica 1 rank 0: its daemon's catch-up stream goes over tcp over 2 rails, and that of "
                      "replica 0 over shm"),
            std::string::npos)
      << told;
  says("coordinator.out", "neither can catch up from the other");  // whoever came first
  const std::string log = read_file(job.file("node0.out"));
  const auto once = log.find("neither replica can catch up");
  EXPECT_EQ(log.find("neither replica can catch up", once + 1), std::string::npos) << log;
}

TEST(Settings, ArePrintedInFullAtStart) {
  Job job;
  job.start(1, 0);
  const std::string output = read_file(job.scratch.path + "/node0.out");
  for (const char* setting : {"silence-ms=1000", "compression=\"auto\"", "stream-limit=0", "socket=", "listen="})
    EXPECT_NE(output.find(setting), std::string::npos) << setting << " is not in:\n" << output;
}

// Started in another working directory, say: the default --log-directory is a relative one.
TEST(Log, OfAnotherJobCostsNobodyItsState) {
  Job job;
  job.start(2, 0);
  Process first({kMinimal}, job.scratch.path + "/a", job.environment(0)),
      second({kMinimal}, job.scratch.path + "/b", job.environment(1));
  const auto committed = [&] { return job.status().value("committed", std::uint64_t{0}); };
  ASSERT_TRUE(eventually([&] { return committed() > 20; }));
  const auto again_with = [&](const std::string& directory) {
    job.log_directory = directory;
    ::kill(job.processes[0]->pid(), SIGKILL);
    job.processes[0]->wait(std::chrono::seconds(10));
    job.processes[0] = job.start_coordinator({"--replicas", "2", "--ranks", "1", "--batch", "8", "--listen",
                                              job.coordinator, "--status", job.coordinator_status});
  };
  again_with("elsewhere");
  EXPECT_TRUE(eventually([&] {
    return run({kCli, "status", job.coordinator_status}).output.find("start the coordinator with that job's") !=
           std::string::npos;
  })) << run({kCli, "status", job.coordinator_status}).output;
  again_with("log");
  const auto before = committed();
  EXPECT_GT(before, 20u);
  EXPECT_TRUE(eventually([&] { return committed() > before + 20; }));
  EXPECT_EQ(first.output() + second.output(), "");
}

TEST(Log, KeepsAsManyArchivesAsItIsTold) {
  Job job;
  auto coordinator = job.start_coordinator(
      {"--replicas", "1", "--ranks", "1", "--steps", "200", "--log-compact-kib", "1", "--log-archives", "2"});
  job.processes.push_back(job.start_node(0, {"--connect", job.coordinator}));
  Process trainer({kMinimal}, job.file("trainer"), job.environment(0));
  EXPECT_EQ(trainer.wait(std::chrono::seconds(60)), 0) << trainer.output();
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(job.file("log")), {}), 3) << coordinator->output();
  const Ended audit = run({kCli, "audit", job.file("log/decisions.log"), "--steps", "200"});
  EXPECT_EQ(audit.status, 0) << audit.output;
  EXPECT_NE(audit.output.find(" 0 lost, 0 repeated"), std::string::npos) << audit.output;
}

// Compacted every few hundred steps, while its coordinator is killed again and again, also in the middle of that.
TEST(Log, ThatIsCompactedWhileInUseHasEverySampleOnce) {
  constexpr std::uint64_t kSteps = 3000;
  Job job;
  const auto coordinate = [&](const std::string& listen) {
    return job.start_coordinator({"--listen", listen, "--replicas", "2", "--ranks", "1", "--batch", "8", "--steps",
                                  std::to_string(kSteps), "--log-compact-kib", "4"});
  };
  auto coordinator = coordinate("127.0.0.1:0");
  std::vector<std::unique_ptr<Process>> trainers;
  for (std::uint32_t r = 0; r < 2; ++r) job.processes.push_back(job.start_node(r, {"--connect", job.coordinator}));
  for (std::uint32_t r = 0; r < 2; ++r)
    trainers.push_back(
        std::make_unique<Process>(std::vector{kMinimal}, job.file("trainer" + std::to_string(r)), job.environment(r)));
  const std::string log = job.file("log/decisions.log");
  const auto archives = [&] { return std::distance(std::filesystem::directory_iterator(job.file("log")), {}) - 1; };
  for (int kills = 0; kills < 5; ++kills) {
    const auto before = archives();
    ASSERT_TRUE(eventually([&] { return archives() > before + 1; })) << coordinator->output();
    coordinator.reset();
    coordinator = coordinate(job.coordinator);
  }
  for (const auto& trainer : trainers) EXPECT_EQ(trainer->wait(std::chrono::seconds(60)), 0) << trainer->output();
  const auto written = [](const std::string& path) { return read_file(path).find_last_not_of('\0') + 1; };
  std::size_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(job.file("log"))) bytes += written(entry.path());
  EXPECT_LT(written(log), bytes / 4) << "what a recovery reads";
  const Ended audit = run({kCli, "audit", log, "--steps", std::to_string(kSteps)});
  EXPECT_EQ(audit.status, 0) << audit.output;
  EXPECT_NE(audit.output.find(" 0 lost, 0 repeated"), std::string::npos) << audit.output;
  EXPECT_NE(audit.output.find(fmt::format("{} steps committed", kSteps)), std::string::npos) << audit.output;
  EXPECT_EQ(audit.output.find("compacted"), std::string::npos) << "all of it is there";
}

// Its operator has given it another end.
TEST(Coordinator, WhoseStepsAreFewerThanWereCommittedIsRefusedAndWhoseAreAsManyEndsTheTrainers) {
  Job job;
  job.silence_ms = "30000";  // of one that is stopped for a while
  job.start(2, 0);
  Process first({kMinimal}, job.file("a"), job.environment(0)), second({kMinimal}, job.file("b"), job.environment(1));
  ASSERT_TRUE(eventually([&] { return job.status().value("committed", std::uint64_t{0}) > 20; }));
  ::kill(first.pid(), SIGSTOP);  // so that all have heard of the last step that is committed
  ASSERT_TRUE(eventually([&] {
    const auto waits = job.status().at("waiting_for");
    return waits.size() == 1 && waits[0].get<std::string>().starts_with("replica 0 rank 0: its reduction of step");
  })) << job.status().dump();
  ::kill(job.processes[0]->pid(), SIGKILL);
  job.processes[0]->wait(std::chrono::seconds(10));
  const auto records = membership::read_log(job.file("log/decisions.log"));
  ASSERT_TRUE(records) << records.error().message;
  std::uint64_t committed = 0;
  for (const auto& record : *records)
    if (record.has_committed()) committed = record.committed().step();
  ASSERT_GT(committed, 20u);
  const auto with_steps = [&](std::uint64_t steps) {
    std::vector<std::string> all{"--replicas", "2", "--ranks", "1", "--batch", "8", "--steps", std::to_string(steps)};
    all.insert(all.end(), {"--coordinator", "--log-directory", job.file("log"), "--listen", job.coordinator});
    return all;
  };
  const auto refused = job.daemon("coordinator", with_steps(committed - 1));
  EXPECT_EQ(refused->wait(std::chrono::seconds(30)), 2);
  EXPECT_NE(refused->output().find(fmt::format("the job ends before step {}, which is committed", committed)),
            std::string::npos)
      << refused->output();
  const auto last = job.daemon("coordinator", with_steps(committed));
  ::kill(first.pid(), SIGCONT);
  for (Process* trainer : {&first, &second}) {
    const int status = trainer->wait(std::chrono::seconds(30));
    EXPECT_TRUE(status == 0 || status == 3) << status << ": " << trainer->output();
    EXPECT_NE(trainer->output().find(fmt::format("the job is finished with step {}", committed)), std::string::npos)
        << trainer->output();
  }
}

// The trainers have a GPU, of software; the daemons were started without its driver, and need none.
TEST(Gpu, ADaemonHasNoContextOnItsTrainersGpu) {
  Job job;
  job.start(2, 0);
  const auto trainer = [&](std::uint32_t replica, const char* output) {
    return std::make_unique<Process>(
        std::vector<std::string>{binaries() + "/rejoin-demo-trainer", "--replica", std::to_string(replica), "--socket",
                                 job.socket(replica), "--data", REJOIN_DATA, "--device", "cuda:0", "--params", "20000"},
        job.scratch.path + output, std::vector<std::string>{"LD_LIBRARY_PATH=" REJOIN_FAKE_CUDA});
  };
  const auto both_contribute = [&] {
    const auto members = job.status().at("members");
    return members.size() == 2 && members[0].at("role") == "contributor" && members[1].at("role") == "contributor";
  };
  const auto first = trainer(0, "/a");
  auto second = trainer(1, "/b");
  ASSERT_TRUE(eventually(both_contribute)) << first->output() << second->output();
  second.reset();
  ASSERT_TRUE(eventually([&] { return job.status().at("members").size() == 1; }));
  second = trainer(1, "/c");
  EXPECT_TRUE(eventually(both_contribute, std::chrono::seconds(60))) << job.status().dump() << second->output();
  // A daemon that is killed and comes back serves the state again.
  job.processes[1] = nullptr;
  job.processes[1] = job.start_node(0, {"--connect", job.coordinator});
  second.reset();
  ASSERT_TRUE(eventually([&] { return job.status().at("members").size() == 1; }));
  second = trainer(1, "/d");
  EXPECT_TRUE(eventually(both_contribute, std::chrono::seconds(10))) << job.status().dump() << "\nfirst:\n"
                                                                     << first->output() << "\nsecond:\n"
                                                                     << second->output() << "\ndaemon:\n"
                                                                     << job.processes[1]->output() << "\ncoordinator:\n"
                                                                     << job.processes[0]->output();
  for (const auto& process : job.processes)
    EXPECT_EQ(read_file(fmt::format("/proc/{}/maps", process->pid())).find("libcuda"), std::string::npos);
}

}  // namespace
}  // namespace rejoin::test
