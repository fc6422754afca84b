// Bad settings, garbage on every port, and trainers that do not fit: each refused, with the reason.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <random>
#include <thread>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/fd.h"
#include "base/unix_socket.h"
#include "local.pb.h"
#include "local/page.h"
#include "membership/node.h"
#include "tests/daemon_support.h"

namespace rejoin::test {
namespace {

// Answers one request over HTTP with this.
struct Answer {
  explicit Answer(std::string body) {
    sockaddr_in address{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
    socklen_t size = sizeof address;
    EXPECT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(::listen(listener.get(), 1), 0);
    EXPECT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
    at = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
    thread = std::thread([this, text = "HTTP/1.1 200 OK\r\n\r\n" + std::move(body)] {
      const Fd caller(::accept(listener.get(), nullptr, nullptr));
      char request[1024];
      EXPECT_GT(::recv(caller.get(), request, sizeof request, 0), 0);
      EXPECT_EQ(::send(caller.get(), text.data(), text.size(), MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
    });
  }
  ~Answer() { thread.join(); }
  Fd listener{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  std::string at;
  std::thread thread;
};

TEST(Status, OfWhatIsNoDaemonOfThisVersionIsAnError) {
  for (const char* body : {"{}", "[]", "7", R"({"coordinator_role":{"epoch":"x","members":5,"out":{}}})",
                           R"({"node_role":{}})", R"({"relay_role":[]})"}) {
    const Answer other(body);
    const Ended ended = run({kCli, "status", other.at});
    EXPECT_EQ(ended.status, 1) << body;
    EXPECT_NE(ended.output.find("what answers at " + other.at + " is no Rejoin daemon of this version"),
              std::string::npos)
        << body << ": " << ended.output;
  }
}

TEST(Garbage, OnEveryPortIsRefusedAndChangesNothing) {
  Job job;
  job.start(1, 400);
  std::mt19937 random(7);
  const auto feed_tcp = [&](const std::string& where) {
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(std::stoi(where.substr(where.rfind(':') + 1))));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    std::string bytes(random() % 5000 + 1, '\0');
    for (auto& c : bytes) c = static_cast<char>(random());
    (void)::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    ::close(fd);
  };
  const auto feed_unix = [&](const std::string& bytes) {
    const int fd = ::socket(AF_UNIX, SOCK_SEQPACKET, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::snprintf(address.sun_path, sizeof address.sun_path, "%s", job.socket(0).c_str());
    ASSERT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    (void)::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    ::close(fd);
  };
  Process trainer({kMinimal}, job.scratch.path + "/a", job.environment(0));
  for (int i = 0; i < 50; ++i) {
    feed_tcp(job.coordinator);
    feed_tcp(job.coordinator_status);
    std::string bytes(random() % 3000 + 1, '\0');
    for (auto& c : bytes) c = static_cast<char>(random());
    feed_unix(bytes);
    // Well-formed but meaningless: a hello of another version; one whose descriptors are none, or not what they should
    // be, or no state; more of them than were announced, or without a hello.
    proto::FromTrainer hello, more;
    hello.mutable_hello()->set_protocol(random() % 3);
    feed_unix(hello.SerializeAsString());
    hello.mutable_hello()->set_protocol(membership::kProtocolVersion);
    hello.mutable_hello()->set_layout(local::kLayoutVersion);
    hello.mutable_hello()->set_device("host");
    hello.mutable_hello()->set_descriptors(static_cast<std::uint32_t>(random() % 5));
    more.mutable_more();
    const Fd description = *make_sealed_memfd("description", bytes.size()), eventfd = *make_eventfd();
    (void)Mapping::of(description, bytes.size()).map([&](const Mapping& mapped) {
      std::memcpy(mapped.data(), bytes.data(), bytes.size());
    });
    std::vector<int> fds(random() % 5, eventfd.get());
    if (!fds.empty()) fds[0] = description.get();
    Fd socket = *connect_unix(job.socket(0));
    if (random() % 4 > 0) (void)send_with_fds(socket, as_bytes(hello.SerializeAsString()), fds);
    (void)send_with_fds(socket, as_bytes(more.SerializeAsString()), fds);
    proto::FromTrainer report;
    report.mutable_report()->mutable_reduced()->set_epoch(random());
    feed_unix(report.SerializeAsString());
    proto::FromTrainer leave;  // of somebody who never came
    leave.mutable_leave()->set_why(bytes);
    feed_unix(leave.SerializeAsString());
  }
  EXPECT_EQ(trainer.wait(std::chrono::seconds(30)), 0) << trainer.output();
  EXPECT_EQ(run({kCli, "status", job.coordinator_status}).status, 0);
}

TEST(BadInput, EachGetsOneLineThatSaysWhatAndHowToMendIt) {
  Scratch scratch;
  const std::string key = scratch.key(), nobody = "REJOIN_SOCKET=" + scratch.path + "/nobody.sock";
  const auto expect = [&](std::vector<std::string> arguments, const std::string& what,
                          std::vector<std::string> environment = {}) {
    const Ended ended = run(std::move(arguments), std::move(environment), std::chrono::seconds(20));
    EXPECT_NE(ended.status, 0) << what;
    EXPECT_LT(ended.status, 128) << ended.output;
    EXPECT_NE(ended.output.find(what), std::string::npos) << ended.output;
  };
  const auto expect_of_node = [&](std::vector<std::string> arguments, const std::string& what) {
    arguments.insert(arguments.begin(), {kDaemon, "--job-key-file", key, "--socket", scratch.path + "/s", "--connect",
                                         "127.0.0.1:1", "--transport"});
    expect(std::move(arguments), what);
  };
  expect({kDaemon, "--no-such-flag"}, "not expected: --no-such-flag");
  expect({kDaemon}, "--job-key-file is required");
  expect({kDaemon, "--job-key-file", key, "--config", scratch.write("unknown", "replicas = 3\nreplica = 4\n")},
         "no setting is called 'replica'; the nearest is 'replicas'");
  expect({kDaemon, "--job-key-file", key, "--config", scratch.write("section", "[node]\nsilence-ms = 4000\n")},
         "line 1: '[node]' begins a section, and settings stand in none: take it out");
  expect({kDaemon, "--job-key-file", key}, "nothing to do: give --coordinator, or --socket");
  expect({kDaemon, "--job-key-file", scratch.path + "/none", "--coordinator"}, "No such file");
  expect({kDaemon, "--job-key-file", scratch.write("open", "0123456789abcdef0123", 0644), "--coordinator"},
         "chmod 600");
  expect({kDaemon, "--job-key-file", scratch.write("short", "abc"), "--coordinator"}, "use at least 16");
  expect({kDaemon, "--job-key-file", key, "--socket", "@x" + scratch.path},
         "needs the coordinator's address: --connect");
  expect(
      {kDaemon, "--job-key-file", key, "--coordinator", "--listen", "nowhere", "--log-directory", scratch.path + "/l1"},
      "not of the form host:port");
  expect_of_node({"pigeon"}, "no transport 'pigeon': use shm, tcp, tcp:ADDRESS,ADDRESS…, tcp+aes");
  expect_of_node({"tcp;ktls=1"}, "'ktls=1' is no setting of tcp; there are threads=N, and of tcp+aes ktls=1 or ktls=0");
  expect({kDaemon, "--job-key-file", key, "--coordinator", "--flight-dir", "OFF"},
         "--flight-dir: 'OFF': for no recording it is 'off'; for a directory of this name './OFF'");
  expect({kMinimal}, "--flight-dir (REJOIN_FLIGHT_DIR) 'Off': for no recording it is 'off'",
         {nobody, "REJOIN_FLIGHT_DIR=Off"});
  expect({kMinimal}, "no daemon socket: set SessionConfig::socket, --socket or REJOIN_SOCKET");
  expect({kMinimal}, "start rejoind on this node with --socket", {nobody, "REJOIN_PATIENCE_MS=100"});
  expect({kMinimal}, "REJOIN_* settings: REJOIN_REPLICA: 'first' is not a whole number in decimal digits",
         {"REJOIN_REPLICA=first"});
  expect({kMinimal}, "--data-listen (REJOIN_DATA_LISTEN): address 'zzz' is not of the form host:port",
         {nobody, "REJOIN_DATA_LISTEN=zzz"});
  expect({kMinimal}, "--data-listen (REJOIN_DATA_LISTEN): this machine can't listen on 203.0.113.7: ",
         {nobody, "REJOIN_TRANSPORT=tcp", "REJOIN_DATA_LISTEN=203.0.113.7:0"});
  expect_of_node({"tcp", "--data-listen", "203.0.113.7:0"},
                 "--data-listen: can't listen for data connections on 203.0.113.7:0: ");
  expect_of_node({"tcp:203.0.113.7"},
                 "--data-listen: can't listen for data connections on 203.0.113.7:0, the rail's own address: ");
  expect({kMinimal}, "this program computes on the CPU: REJOIN_DEVICE=host", {nobody, "REJOIN_DEVICE=gpu"});
  expect({kCli, "status", "127.0.0.1:1"}, "no daemon answers at 127.0.0.1:1");
  expect({kDaemon, "--job-key-file", key, "--coordinator", "--listen", "127.0.0.1:99999"},
         "--listen: address '127.0.0.1:99999': its port '99999' is not a number from 0 to 65535");
  expect({kDaemon, "--job-key-file", key, "--coordinator"}, "REJOIN_STEPS: '-1'", {"REJOIN_STEPS=-1"});
  expect({kCli, "status", "127.0.0.1:99999"}, "its port '99999' is not a number from 0 to 65535");
  expect({kCli, "top", "127.0.0.1:1", "--count", "-1"}, "--count: '-1' is not a whole number");
  expect({kCli, "audit", scratch.path + "/none"}, "No such file");
  expect({kCli, "trace", scratch.path}, "no events in");
  expect({kCli, "log", "export", scratch.path + "/none", scratch.path + "/out"}, "No such file");
  expect({kCli, "log", "import", scratch.path + "/none"}, "nothing says into which store: --store etcd:HOST:PORT");
  expect({kDaemon, "--job-key-file", key, "--coordinator", "--store", "etcd:127.0.0.1:1"}, "add --job NAME");
  std::filesystem::create_directory(scratch.path + "/full");
  std::filesystem::create_symlink("/dev/full", scratch.path + "/full/decisions.log");
  expect({kDaemon, "--job-key-file", key, "--coordinator", "--log-directory", scratch.path + "/full"}, "decisions.log");
}

TEST(BadInput, APortOrSocketInUseIsNamed) {
  Job job;
  job.start(1, 0);
  const Ended port = run({kDaemon, "--job-key-file", job.key, "--coordinator", "--listen", job.coordinator,
                          "--log-directory", job.scratch.path + "/other", "--roll-back-to", "3@5"});
  EXPECT_NE(port.output.find("can't listen on " + job.coordinator), std::string::npos) << port.output;
  EXPECT_NE(port.output.find("--roll-back-to 3@5: the log in " + job.scratch.path + "/other has no decision"),
            std::string::npos);
  const Ended log =
      run({kDaemon, "--job-key-file", job.key, "--coordinator", "--log-directory", job.scratch.path + "/log"});
  EXPECT_NE(log.output.find("in use by another coordinator"), std::string::npos) << log.output;
  const Ended socket =
      run({kDaemon, "--job-key-file", job.key, "--socket", job.socket(0), "--connect", job.coordinator});
  EXPECT_NE(socket.output.find("in use by a running process"), std::string::npos) << socket.output;
}

// A flag that was mistaken for another: what is at the path is somebody's.
TEST(BadInput, WhatIsNoSocketOfOursIsLeftAsItIs) {
  const Scratch scratch;
  const std::string key = scratch.key(), precious = scratch.write("precious", "mine"), link = scratch.path + "/link",
                    folder = scratch.path + "/folder";
  std::filesystem::create_symlink(precious, link);
  std::filesystem::create_directory(folder);
  for (const auto& path : {key, precious, link, folder}) {
    const Ended ended = run({kDaemon, "--job-key-file", key, "--connect", "127.0.0.1:1", "--socket", path}, {},
                            std::chrono::seconds(20));
    EXPECT_EQ(ended.status, 1) << ended.output;
    EXPECT_NE(ended.output.find(path + " exists and is no socket: it is left as it is"), std::string::npos)
        << ended.output;
  }
  EXPECT_EQ(read_file(precious), "mine");
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_EQ(read_file(key).size(), 32u);
}

TEST(BadInput, WhatIsNoAddressFileIsLeftAsItIs) {
  const Scratch scratch;
  const std::string key = scratch.key(), precious = scratch.write("precious", "{\"mine\": 1}"),
                    link = scratch.path + "/link";
  std::filesystem::create_symlink(precious, link);
  for (const auto& path : {key, precious, link}) {
    const Ended ended = run({kDaemon, "--job-key-file", key, "--coordinator", "--log-directory", scratch.path + "/log",
                             "--address-file", path},
                            {}, std::chrono::seconds(20));
    EXPECT_EQ(ended.status, 1) << ended.output;
    EXPECT_NE(ended.output.find("--address-file " + path + " exists and is no address file"), std::string::npos)
        << ended.output;
  }
  EXPECT_EQ(read_file(precious), "{\"mine\": 1}");
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_FALSE(std::filesystem::exists(scratch.path + "/log")) << "it has begun";
}

TEST(Audit, OfALogThatHoldsTooLittleFails) {
  Job job;
  job.start(1, 5);
  Process trainer({kMinimal}, job.file("a"), job.environment(0));
  ASSERT_TRUE(eventually([&] { return job.status().value("committed", 0) == 5; }));
  const std::string log = job.file("log/decisions.log"), empty = job.scratch.write("empty", "");
  const auto audited = [](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {kCli, "audit"});
    return run(arguments);
  };
  for (const auto& arguments : std::vector<std::vector<std::string>>{{empty}, {"--steps", "5", empty}}) {
    const Ended ended = audited(arguments);
    EXPECT_EQ(ended.status, 1);
    EXPECT_NE(ended.output.find(empty + " holds no decision"), std::string::npos) << ended.output;
  }
  EXPECT_EQ(audited({"--steps", "5", log}).status, 0);
  EXPECT_EQ(audited({"--steps", "5", job.file("log")}).status, 0) << "what --log-directory names";
  const Ended shorter = audited({"--steps", "8", log});
  EXPECT_EQ(shorter.status, 1);
  EXPECT_NE(shorter.output.find("3 of the job's 8 steps are MISSING: the log ends with step 5"), std::string::npos)
      << shorter.output;
  std::filesystem::copy(log, job.file("torn"));
  std::ofstream(job.file("torn"), std::ios::app) << "twenty bytes of dust";
  const Ended torn = audited({"--steps", "5", job.file("torn")});
  EXPECT_EQ(torn.status, 0);
  EXPECT_NE(torn.output.find(" bytes behind the last record are torn"), std::string::npos) << torn.output;
}

TEST(Coordinator, WhoseLogIsRemovedOrCutDecidesNothingMoreAndIsNotToBeStartedAgain) {
  for (const bool removed : {true, false}) {
    Job job;
    job.start(1, 0);
    Process trainer({kMinimal}, job.file("a"), job.environment(0));
    ASSERT_TRUE(eventually([&] { return job.status().value("committed", 0) > 5; }));
    removed ? (void)std::filesystem::remove_all(job.file("log"))
            : std::filesystem::resize_file(job.file("log/decisions.log"), 300);
    EXPECT_EQ(job.processes[0]->wait(std::chrono::seconds(15)), 2) << "no supervisor starts it again after that";
    const std::string said = job.processes[0]->output();
    EXPECT_NE(said.find(removed ? "log was removed or moved away while the" : "log was cut from "), std::string::npos);
    EXPECT_EQ(said.find("start the coordinator again"), std::string::npos) << said;
  }
}

TEST(BadInput, AnotherJobKeyIsRefusedOnBothSides) {
  Job job;
  job.start(1, 0);
  const std::string other = job.scratch.write("other", "another key, long enough");
  const TimePoint begun = SteadyClock().now();
  Process stranger({kDaemon, "--job-key-file", other, "--socket", job.file("x.sock"), "--connect", job.coordinator,
                    "--address-file", job.file("stranger.json")},
                   job.file("x.out"));
  {  // Refused nothing: it went by itself.
    const Fd scanner(::socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port =
        htons(static_cast<std::uint16_t>(std::stoi(job.coordinator.substr(job.coordinator.find(':') + 1))));
    ASSERT_EQ(::connect(scanner.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  }
  EXPECT_TRUE(eventually([&] {
    return stranger.output().find("its job key differs from ours; give both the same --job-key-file") !=
           std::string::npos;
  })) << stranger.output();
  const std::string status = run({kCli, "status", job.addresses("stranger").at("status")}).output;
  EXPECT_NE(status.find(" NOT CONNECTED: its job key differs from ours"), std::string::npos) << status;
  EXPECT_NE(stranger.output().find("trying again ever less often, in the end every 5000 ms"), std::string::npos)
      << stranger.output();
  ASSERT_TRUE(eventually([&] { return job.status().at("rejected") > 5; })) << "it comes again";
  EXPECT_GE(SteadyClock().now() - begun, std::chrono::milliseconds(50 + 100 + 200 + 400 + 800)) << "ever less often";
  const std::string said = read_file(job.file("coordinator.out")), line = "a connection from 127.0.0.1:";
  const auto once = said.find(line);
  ASSERT_NE(once, std::string::npos) << said;
  EXPECT_EQ(said.find(line, once + 1), std::string::npos) << "one line does for all of them:\n" << said;
  EXPECT_NE(said.find(" was refused: its job key differs from ours", once), std::string::npos) << said;
  EXPECT_EQ(said.find("a connection was refused"), std::string::npos) << said;
}

// The demo's trainer declares other tensors than the minimal one.
std::vector<std::string> demo_trainer(const Job& job, std::uint32_t replica) {
  return {binaries() + "/rejoin-demo-trainer",
          "--replica",
          std::to_string(replica),
          "--socket",
          job.socket(replica),
          "--data",
          REJOIN_DATA};
}

TEST(BadInput, ATrainerWithAnotherStateOrPlaceIsRefusedWithTheReason) {
  Job job;
  job.start(3, 0);
  Process other(demo_trainer(job, 1), job.file("other"));  // the first to come is not right for that
  ASSERT_TRUE(eventually([&] {
    return run({kCli, "status", job.coordinator_status}).output.find("replica 1: 0 of 1") == std::string::npos;
  }));
  const Ended outside = run({kMinimal}, {"REJOIN_REPLICA=9", "REJOIN_RANK=0", "REJOIN_SOCKET=" + job.socket(1)});
  EXPECT_NE(outside.output.find("outside this job of 3 replicas"), std::string::npos) << outside.output;
  Process first({kMinimal}, job.file("a"), job.environment(0)), third({kMinimal}, job.file("c"), job.environment(2));
  EXPECT_GT(other.wait(std::chrono::seconds(15)), 0) << other.output();
  const std::string why = "tensors or buckets differ from those of replicas 0, 2: tensor '";
  EXPECT_NE(other.output().find(why), std::string::npos) << other.output();
  EXPECT_TRUE(eventually([&] { return job.status().at("committed") > 5; })) << job.status().dump();
  const std::string status = run({kCli, "status", job.coordinator_status}).output;
  EXPECT_NE(status.find("REFUSED replica 1 rank 0: its " + why), std::string::npos) << status;
  EXPECT_NE(read_file(job.file("coordinator.out")).find(why), std::string::npos);
  const auto refused = refused_by(job.coordinator_status);
  EXPECT_EQ(refused.at("job"), 1) << "the one outside";
  EXPECT_EQ(refused.at("declaration"), 1);
}

TEST(BadInput, WithoutAMajorityOfEqualStatesTheStatusSaysWhoDiffersInWhat) {
  Job job;
  job.start(2, 0);
  Process other(demo_trainer(job, 1), job.file("other")), first({kMinimal}, job.file("a"), job.environment(0));
  std::string status;
  EXPECT_TRUE(eventually([&] {
    status = run({kCli, "status", job.coordinator_status}).output;
    return status.find("replica 0 and replica 1: they declare different things") != std::string::npos &&
           status.find("differ from those of replica 0: tensor '") != std::string::npos;
  })) << status;
  for (auto* trainer : {&first, &other})  // and so do they, who wait
    EXPECT_TRUE(eventually([&] {
      return trainer->output().find("the job waits for replica 0 and replica 1: they declare") != std::string::npos;
    })) << trainer->output();
}

// Over shared memory and over TCP no ring can be made of them.
TEST(BadInput, ATrainerWithAnotherTransportIsRefusedWithBoth) {
  Job job;
  job.start(3, 0);
  auto environment = job.environment(1);
  environment.push_back("REJOIN_TRANSPORT=tcp");
  Process first({kMinimal}, job.file("a"), job.environment(0)), other({kMinimal}, job.file("b"), environment),
      third({kMinimal}, job.file("c"), job.environment(2));
  EXPECT_GT(other.wait(std::chrono::seconds(15)), 0) << other.output();
  EXPECT_NE(other.output().find("it all-reduces over tcp in chunks of 1048576 bytes, 4 in flight, up to 32768 bytes "
                                "direct, and replicas 0, 2 over shm in"),
            std::string::npos)
      << other.output();
}

// Both are TCP, and what goes over several rails is no plain connection.
TEST(BadInput, TrainersWithOtherRailsAreNamedWithBoth) {
  Job job;
  job.start(2, 0);
  auto plain = job.environment(0), rails = job.environment(1);
  plain.push_back("REJOIN_TRANSPORT=tcp");
  rails.push_back("REJOIN_TRANSPORT=tcp:127.0.0.1,127.0.0.2");
  Process first({kMinimal}, job.file("a"), plain), second({kMinimal}, job.file("b"), rails);
  EXPECT_TRUE(eventually([&] {
    return run({kCli, "status", job.coordinator_status})
               .output.find("of replica 1, it all-reduces over tcp over 2 rails in") != std::string::npos;
  }));
  EXPECT_EQ((first.output() + second.output()).find("is not reached"), std::string::npos) << "nobody tries to connect";
}

}  // namespace
}  // namespace rejoin::test
