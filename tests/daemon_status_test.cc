// What status, top, audit and the metrics say of a job.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <future>
#include <regex>

#include "base/fd.h"
#include "membership/log.h"
#include "rejoin/session.h"
#include "tests/daemon_support.h"
#include "tests/session_config.h"

namespace rejoin::test {
namespace {

TEST(Status, TellsForWhomTheJobWaits) {
  Job job;
  job.silence_ms = "6000";  // long enough to be asked
  job.start(2, 0);
  Process first({kMinimal}, job.scratch.path + "/a", job.environment(0));
  ASSERT_TRUE(eventually([&] {
    return run({kCli, "status", job.coordinator_status}).output.find("replica 1: 0 of 1 ranks have registered") !=
           std::string::npos;
  }));
  Process second({kMinimal}, job.scratch.path + "/b", job.environment(1));
  ASSERT_TRUE(eventually([&] {
    const auto status = job.status();
    return !status.is_null() && status.at("committed").get<int>() > 10;
  }));
  // A stopped trainer is named while the others wait for it, and they are not: in mid-step, or for the commit, where it
  // was stopped after it had given them all of its step.
  ::kill(second.pid(), SIGSTOP);
  std::string told, while_it_was_a_member;
  EXPECT_TRUE(eventually([&] {
    told = run({kCli, "status", job.coordinator_status}).output;
    if (told.find("\n  1  ") != std::string::npos) while_it_was_a_member = told;
    return told.find("waits for replica 1 rank 0: its reduction of step") != std::string::npos &&
           (told.find("; replica 0 waits for it: ") != std::string::npos ||
            std::regex_search(told, std::regex("\n  0 +[0-9]+ +contributor +[0-9]+ +1\n")));
  })) << while_it_was_a_member;
  EXPECT_EQ(told.find("waits for replica 0"), std::string::npos) << told;
}

bool eventually_says(const std::string& address, const std::string& what, std::string& told) {
  return eventually([&] {
    told = run({kCli, "status", address}).output;
    return told.find(what) != std::string::npos;
  });
}

TEST(Status, NamesWhoIsOutAndSaysOfSmallBucketsThatTheyGoInNoChunks) {
  Job job;
  job.start(2, 0);
  Process first({kMinimal}, job.file("a"), job.environment(0)), second({kMinimal}, job.file("b"), job.environment(1));
  std::string told;
  EXPECT_TRUE(eventually_says(job.addresses("node0").at("status"), "from replica 1: nothing in chunks", told)) << told;
  EXPECT_EQ(told.find("in 0 chunks"), std::string::npos) << told;
  ::kill(second.pid(), SIGKILL);
  EXPECT_TRUE(eventually_says(job.coordinator_status, "OUT replica 1 for ", told)) << told;
  EXPECT_NE(told.find("rank 0: its process "), std::string::npos) << told;
  EXPECT_NE(told.find("its trainers have to be started again"), std::string::npos) << told;
}

TEST(Status, OfAFinishedJobSaysWhoHasLeft) {
  Job job;
  job.start(1, 20);
  Process trainer({kMinimal}, job.file("a"), job.environment(0));
  EXPECT_EQ(trainer.wait(std::chrono::seconds(30)), 0) << trainer.output();
  std::string told;
  EXPECT_TRUE(eventually_says(job.coordinator_status, "has left", told)) << told;
  EXPECT_EQ(told.find("contributor"), std::string::npos) << told;
}

TEST(Log, NamesANodeThatIsGoneAndWhereItWas) {
  Job job;
  job.start(1, 0);
  ASSERT_TRUE(eventually([&] { return job.status().value("nodes", 0) == 1; }));
  ::kill(job.processes.back()->pid(), SIGKILL);
  std::string log;
  EXPECT_TRUE(eventually([&] {
    log = read_file(job.file("coordinator.out"));
    return std::regex_search(log, std::regex("node node0 at 127\\.0\\.0\\.1:[0-9]+ is gone"));
  })) << log;
}

// A caller of a status port, with what it has said so far.
Fd caller_of(const std::string& status, const std::string& said) {
  Fd caller(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(std::stoi(status.substr(status.rfind(':') + 1))));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::connect(caller.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(::send(caller.get(), said.data(), said.size(), 0), static_cast<ssize_t>(said.size()));
  return caller;
}

std::string get(const std::string& status, const std::string& path) {
  const Fd caller = caller_of(status, "GET " + path + " HTTP/1.1\r\nHost: a\r\n\r\n");
  std::string answer;
  char buffer[4096];
  for (ssize_t n; (n = ::recv(caller.get(), buffer, sizeof buffer, 0)) > 0;)
    answer.append(buffer, static_cast<std::size_t>(n));
  return answer;
}

std::unique_ptr<Session> session_that_codes(const Job& job, std::uint32_t replica, const std::string& coding) {
  auto config = config_of(job, replica);
  config.coding = coding;
  auto session = *Session::open(config);
  (void)*session->bucket({*session->add({.name = "w", .count = 100'000})});
  return session->allocate() && session->join() ? std::move(session) : nullptr;
}

// Steps until it is interrupted.
void train(Session& session) {
  std::ranges::fill(Session::as<float>(*session.gradient({0})), 1.0f / 3);
  for (auto step = session.begin_step(); step && *step; step = session.begin_step())
    if (!session.all_reduce(0) || !session.commit([](const Update&) {})) return;
}

TEST(Status, TellsWhatCodingSavesAndWhatItLoses) {
  Job job;
  job.start(2, 0);
  auto other = std::async(std::launch::async, [&] { return session_that_codes(job, 1, "4"); });
  const auto first = session_that_codes(job, 0, "8"), second = other.get();
  ASSERT_TRUE(first && second);
  auto trains = std::async(std::launch::async, [&] { train(*first); }),
       too = std::async(std::launch::async, [&] { train(*second); });
  const std::string of_first = job.addresses("node0").at("status"), of_second = job.addresses("node1").at("status");
  std::string told;
  EXPECT_TRUE(eventually_says(of_second, "; to it in 4 bits", told)) << told;
  EXPECT_TRUE(eventually_says(of_first, "; to it in 8 bits", told)) << told;
  EXPECT_TRUE(std::regex_search(told, std::regex("coding: sent [^,]+ as [^,]+, [0-9.e-]+ % is lost in a step")))
      << told;
  const auto coding = nlohmann::json::parse(run({kCli, "status", "--json", of_first}).output)
                          .at("node_role")
                          .at("ranks")
                          .at(0)
                          .at("coding");
  EXPECT_LT(coding.at("sent_bytes").get<double>(), coding.at("plain_bytes").get<double>() * 0.3) << coding;
  EXPECT_GT(coding.at("error").get<double>(), 0) << coding;
  EXPECT_LT(coding.at("error").get<double>(), 0.01) << coding;
  EXPECT_EQ(coding.at("feedback_bytes"), 800'000) << coding;
  const std::string metrics = get(of_first, "/metrics");
  for (const char* name :
       {"rejoin_hop_coded_bits{", "rejoin_chunk_plain_bytes_total{", "rejoin_chunk_sent_bytes_total{",
        "rejoin_coding_error_ratio{", "rejoin_coding_feedback_bytes{"})
    EXPECT_NE(metrics.find(name), std::string::npos) << name << " is missing in\n" << metrics;
  for (auto* session : {first.get(), second.get()}) session->interrupt();
  trains.wait();
  too.wait();
}

TEST(Metrics, AreServedInPrometheusFormat) {
  Job job;
  job.start(1, 0);
  const std::string answer = get(job.coordinator_status, "/metrics");
  EXPECT_NE(answer.find("# TYPE rejoin_committed_step gauge"), std::string::npos) << answer;
}

// Each would have five seconds, and 64 have theirs at a time: whoever comes after them would wait for more than a
// minute.
TEST(Metrics, AThousandCallersWhoHungUpInTheMiddleOfARequestKeepNobodyWaiting) {
  Job job;
  job.start(1, 0);
  for (int i = 0; i < 1000; ++i) caller_of(job.coordinator_status, "GET /heal");
  const auto began = std::chrono::steady_clock::now();
  EXPECT_NE(get(job.coordinator_status, "/healthz").find(" 200 OK"), std::string::npos);
  EXPECT_NE(get(job.coordinator_status, "/metrics").find(" 200 OK"), std::string::npos);
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(5)) << "one caller's time";
}

TEST(Metrics, AreAtAnotherPortWhereTheUsualOneIsTaken) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  // Connections that another test has closed may still wait at this port.
  const int reuse = 1;
  ASSERT_EQ(::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse), 0);
  sockaddr_in usual{};
  usual.sin_family = AF_INET;
  usual.sin_port = htons(7001);
  usual.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  // A job of another test may have the port, and keeps it until that test ends; one that is no test's keeps it longer.
  if (eventually([&] { return ::bind(fd, reinterpret_cast<sockaddr*>(&usual), sizeof usual) == 0; }))
    ASSERT_EQ(::listen(fd, 1), 0);
  else ASSERT_EQ(errno, EADDRINUSE);
  Job job;
  job.usual_status = true;
  job.start(1, 0);
  EXPECT_NE(job.coordinator_status, "127.0.0.1:7001");
  EXPECT_EQ(job.status().at("committed"), 0);
  EXPECT_NE(read_file(job.file("coordinator.out")).find("It is at " + job.coordinator_status + " instead"),
            std::string::npos);
  ::close(fd);
}

TEST(Top, ShowsDaemonsAgainAndAgain) {
  Job job;
  job.start(1, 0);
  Process trainer({kMinimal}, job.scratch.path + "/a", job.environment(0));
  ASSERT_TRUE(eventually([&] {
    return run({kCli, "status", job.coordinator_status}).output.find("step 0 committed") == std::string::npos;
  }));
  const std::string node = job.addresses("node0").at("status");
  const Ended top =
      run({kCli, "top", job.coordinator_status, node, "127.0.0.1:1", "--count", "3", "--interval-ms", "50"});
  EXPECT_EQ(top.status, 0) << top.output;
  EXPECT_NE(top.output.find("steps a second"), std::string::npos) << top.output;
  EXPECT_NE(top.output.find("replica 0 rank 0 pid"), std::string::npos) << top.output;
  EXPECT_NE(top.output.find("no daemon answers at 127.0.0.1:1"), std::string::npos) << top.output;
}

// What calls it is connected, and gets no answer.
struct SilentListener {
  Fd socket{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  std::string address;
  SilentListener() {
    sockaddr_in at{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
    socklen_t size = sizeof at;
    EXPECT_EQ(::bind(socket.get(), reinterpret_cast<sockaddr*>(&at), size), 0);
    EXPECT_EQ(::listen(socket.get(), 8), 0);
    EXPECT_EQ(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&at), &size), 0);
    address = fmt::format("127.0.0.1:{}", ntohs(at.sin_port));
  }
};

TEST(Top, SaysHowFastTheJobIsThoughAnotherDaemonDoesNotAnswer) {
  Job job;
  job.start(1, 0);
  Process trainer({kMinimal}, job.scratch.path + "/a", job.environment(0));
  const auto committed = [&] { return job.status().at("committed").get<double>(); };
  ASSERT_TRUE(eventually([&] { return committed() > 0; }));
  const SilentListener silent;
  const double before = committed();
  const Ended top = run({kCli, "top", job.coordinator_status, silent.address, "--count", "2", "--interval-ms", "50"});
  const double after = committed();
  std::smatch rate;
  ASSERT_TRUE(std::regex_search(top.output, rate, std::regex("([0-9.]+) steps a second"))) << top.output;
  EXPECT_GT(std::stod(rate[1]), 0) << top.output;
  EXPECT_LE(std::stod(rate[1]) * 5, after - before + 1) << "it has waited five seconds for the other one";
}

TEST(Top, AsksAllAtTheSameTime) {
  Scratch scratch;
  const SilentListener one, other;
  Process top({kCli, "top", one.address, "http://" + other.address + "/", "--count", "1"}, scratch.path + "/top.out");
  {
    const Fd first(::accept(one.socket.get(), nullptr, nullptr)),
        second(::accept(other.socket.get(), nullptr, nullptr));
    char request[256];
    EXPECT_GT(::recv(first.get(), request, sizeof request, 0), 0);
    EXPECT_EQ(::recv(first.get(), request, sizeof request, MSG_DONTWAIT), -1) << "it is asked no longer";
    EXPECT_GT(::recv(second.get(), request, sizeof request, 0), 0);
  }
  EXPECT_EQ(top.wait(std::chrono::seconds(30)), 0);
}

// Neither is wrong: the daemon that answers late, or the address.
TEST(Status, ADaemonThatIsStoppedIsSaidToBeSilent) {
  Job job;
  job.start(1, 0);
  const Ended wrong = run({kCli, "status", job.coordinator});  // where daemons connect
  EXPECT_NE(wrong.output.find("is not a Rejoin daemon; give a daemon's --status address, not its --listen"),
            std::string::npos)
      << wrong.output;
  ASSERT_EQ(::kill(job.processes.front()->pid(), SIGSTOP), 0);
  Process top({kCli, "top", job.coordinator_status, "--count", "1"}, job.file("top.out"));
  const Ended status = run({kCli, "status", job.coordinator_status});
  EXPECT_EQ(status.status, 1);
  EXPECT_EQ(top.wait(std::chrono::seconds(30)), 0);
  const std::string silent = job.coordinator_status + " accepted the connection and did not answer in 5 s";
  for (const auto& output : {status.output, top.output()}) EXPECT_NE(output.find(silent), std::string::npos) << output;
}

// The log of a job that was killed: it has no word of who held the first samples.
TEST(Audit, WhatWaitsToBeTrainedAgainIsNotLostUntilTheJobIsFinished) {
  Scratch scratch;
  std::vector<proto::LogRecord> records(3);
  records[0].mutable_job()->set_batch(10);
  records[1].mutable_epoch()->set_epoch(1);
  records[1].mutable_epoch()->set_step(1);
  records[1].mutable_epoch()->add_members()->set_replica(1);
  records[2].mutable_committed()->set_step(1);
  auto& member = *records[2].mutable_committed()->add_members();
  member.set_replica(1);
  auto& batch = *member.add_batch();
  batch.set_begin(10);
  batch.set_end(20);
  ASSERT_TRUE(membership::Log::open(scratch.path)->append(records));
  const std::string log = scratch.path + "/decisions.log";
  const Ended open = run({kCli, "audit", log});
  EXPECT_EQ(open.status, 0) << open.output;
  EXPECT_NE(open.output.find("20 samples: 10 trained once, 0 lost, 0 repeated, 10 to be trained again"),
            std::string::npos)
      << open.output;
  EXPECT_NE(open.output.find("The log does not tell whether the job is finished."), std::string::npos) << open.output;
  const Ended finished = run({kCli, "audit", log, "--steps", "1"});
  EXPECT_EQ(finished.status, 1) << finished.output;
  EXPECT_NE(finished.output.find("10 trained once, 10 lost, 0 repeated, 0 to be"), std::string::npos)
      << finished.output;
}

// As systemd does with Type=notify.
struct Manager {
  Scratch scratch;
  const std::string path = scratch.path + "/notify";
  const int socket = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  Manager() {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof address.sun_path - 1);
    EXPECT_EQ(::bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  }
  ~Manager() { ::close(socket); }
  // The next message, or nothing.
  std::string next() const {
    std::string text(4096, '\0');
    const auto got = ::recv(socket, text.data(), text.size(), 0);
    text.resize(got < 0 ? 0 : static_cast<std::size_t>(got));
    return text;
  }
  bool hears(const std::string& begin, std::string& heard) const {
    return eventually([&] { return !(heard = next()).empty() && heard.starts_with(begin); });
  }
};

TEST(ServiceManager, HearsThatADaemonListensWhatItDoesAndThatItEnds) {
  const Manager manager;
  Scratch scratch;
  Process daemon(
      {kDaemon, "--coordinator", "--socket", scratch.path + "/socket", "--log-directory", scratch.path + "/log",
       "--job-key-file", scratch.key(), "--silence-ms", "100", "--replicas", "1", "--ranks", "1"},
      scratch.path + "/out", {"NOTIFY_SOCKET=" + manager.path});
  std::string heard;
  ASSERT_TRUE(manager.hears(
      "READY=1\nSTATUS=coordinator: step 0 committed in epoch 0 by 0 replicas; node of 0 trainers, ", heard))
      << heard << daemon.output();
  EXPECT_TRUE(std::filesystem::exists(scratch.path + "/socket"));
  EXPECT_NE(daemon.output().find("ready: "), std::string::npos) << daemon.output();
  EXPECT_TRUE(manager.hears("STATUS=", heard)) << heard;  // READY comes once, changes of the status after it
  EXPECT_NE(heard.find("connected with 127.0.0.1:"), std::string::npos) << heard;
  Process trainer({kMinimal}, scratch.path + "/trainer",
                  {"REJOIN_REPLICA=0", "REJOIN_RANK=0", "REJOIN_SOCKET=" + scratch.path + "/socket"});
  EXPECT_TRUE(eventually([&] {
    const std::string next = manager.next();
    if (!next.empty()) heard = next;
    return heard.find(" in epoch 1 by 1 replicas") != std::string::npos &&
           heard.find("node of 1 trainers, connected with ") != std::string::npos;
  })) << heard;
  ::kill(daemon.pid(), SIGTERM);
  EXPECT_TRUE(manager.hears("STOPPING=1\n", heard)) << heard;
  EXPECT_EQ(daemon.wait(std::chrono::seconds(10)), 0);
}

TEST(ServiceManager, WhoReloadsEndsNobody) {
  const Daemons job;
  Process coordinator({"/usr/bin/setsid", kDaemon, "--coordinator", "--listen", "127.0.0.1:0", "--status",
                       "127.0.0.1:0", "--log-directory", job.file("log"), "--job-key-file", job.key},
                      job.file("out"));
  const auto says = [&](const char* what) { return coordinator.output().find(what) != std::string::npos; };
  ASSERT_TRUE(eventually([&] { return says("ready:"); })) << coordinator.output();
  ::kill(coordinator.pid(), SIGHUP);
  EXPECT_TRUE(eventually([&] { return says("SIGHUP is ignored"); })) << coordinator.output();
  ::kill(coordinator.pid(), SIGTERM);
  EXPECT_EQ(coordinator.wait(std::chrono::seconds(20)), 0) << coordinator.output();
}

TEST(ServiceManager, ThatCannotBeReachedIsNamedAndStopsNobody) {
  Scratch scratch;
  const std::string nobody = scratch.path + "/nobody";
  Process daemon({kDaemon, "--coordinator", "--log-directory", scratch.path + "/log", "--job-key-file", scratch.key()},
                 scratch.path + "/out", {"NOTIFY_SOCKET=" + nobody});
  EXPECT_TRUE(eventually([&] {
    return daemon.output().find("the service manager at NOTIFY_SOCKET hears nothing any more") != std::string::npos;
  })) << daemon.output();
  ::kill(daemon.pid(), SIGTERM);
  EXPECT_EQ(daemon.wait(std::chrono::seconds(10)), 0);
  const auto wrong =
      run({kDaemon, "--coordinator", "--log-directory", scratch.path + "/other", "--job-key-file", scratch.key()},
          {"NOTIFY_SOCKET=vsock:2:1"});
  EXPECT_EQ(wrong.status, 1);
  EXPECT_NE(wrong.output.find("NOTIFY_SOCKET 'vsock:2:1' is neither a path nor an @name"), std::string::npos)
      << wrong.output;
}

}  // namespace
}  // namespace rejoin::test
