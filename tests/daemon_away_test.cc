// Trainers whose daemon is away for a while, or is one that does what the test says.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>

#include "base/bytes.h"
#include "base/fd.h"
#include "base/unix_socket.h"
#include "local.pb.h"
#include "membership/node.h"
#include "tests/daemon_support.h"

namespace rejoin::test {
namespace {

// The machine was frozen while the daemon was exchanged, say. It is there when the trainer goes on, and that looks.
TEST(Session, ATrainerThatWasStoppedWhileItsDaemonWasAwayRegistersWithTheNextOne) {
  Job job;
  job.start(1, 0);
  auto environment = job.environment(0);
  environment.emplace_back("REJOIN_PATIENCE_MS=1500");
  Process trainer({kMinimal}, job.file("a"), environment);
  const auto committed = [&] { return job.status().value("committed", 0); };
  ASSERT_TRUE(eventually([&] { return committed() > 5; }));
  const auto heard = [&](const char* what) { return trainer.output().find(what) != std::string::npos; };
  ::kill(job.processes[1]->pid(), SIGKILL);
  ASSERT_TRUE(eventually([&] { return heard("the daemon is gone"); }));
  ::kill(trainer.pid(), SIGSTOP);
  const auto stopped_at = std::chrono::steady_clock::now();
  job.processes[1] = nullptr;
  job.processes[1] = job.start_node(0, {"--connect", job.coordinator});
  EXPECT_TRUE(eventually([&] { return std::chrono::steady_clock::now() - stopped_at > std::chrono::seconds(4); }));
  const int then = committed();
  ::kill(trainer.pid(), SIGCONT);
  EXPECT_TRUE(eventually([&] { return heard("registered again with the daemon"); })) << trainer.output();
  EXPECT_TRUE(eventually([&] { return committed() > then + 5; })) << trainer.output();
}

// It hung, as the last one that has the state, and an operator has ended it: nobody waits for it any more.
TEST(Session, ThatATrainerIsKilledThatWasSilentIsSeen) {
  Job job;
  job.silence_ms = "500";
  job.start(1, 0);
  Process trainer({kMinimal}, job.file("a"), job.environment(0));
  ASSERT_TRUE(eventually([&] { return job.status().value("committed", 0) > 5; }));
  const auto said = [&](std::size_t process, const std::string& what) {
    return eventually([&] { return job.processes[process]->output().find(what) != std::string::npos; });
  };
  ::kill(trainer.pid(), SIGSTOP);
  ASSERT_TRUE(said(0, "the job waits for replica 0: it is silent"));
  ::kill(trainer.pid(), SIGKILL);
  EXPECT_TRUE(said(1, fmt::format("replica 0 rank 0: its process {} ended", trainer.pid())));
  EXPECT_TRUE(said(0, "no process is left that has the state")) << job.processes[0]->output();
}

// It finds the next daemon before the one that has the place does.
TEST(Session, ASecondProcessThatComesWhileTheDaemonIsAwayDoesNotGetThePlace) {
  Job job;
  job.silence_ms = "10000";
  job.start(1, 0);
  Process first({kMinimal}, job.file("first"), job.environment(0));
  const auto committed = [&] { return job.status().value("committed", 0); };
  ASSERT_TRUE(eventually([&] { return committed() > 5; }));
  ::kill(job.processes[1]->pid(), SIGKILL);
  ASSERT_TRUE(eventually([&] { return first.output().find("the daemon is gone") != std::string::npos; }));
  ::kill(first.pid(), SIGSTOP);
  job.processes[1] = nullptr;
  job.processes[1] = job.start_node(0, {"--connect", job.coordinator});
  Process second({kMinimal}, job.file("second"), job.environment(0));
  ASSERT_TRUE(eventually([&] {
    return job.processes[0]->output().find(" asks for the place of ") != std::string::npos;
  })) << job.processes[0]->output();
  ::kill(first.pid(), SIGCONT);
  EXPECT_NE(second.wait(std::chrono::seconds(20)), 0);
  EXPECT_NE(second.output().find("end that process, or give this one another replica or rank"), std::string::npos)
      << second.output();
  const int then = committed();
  EXPECT_TRUE(eventually([&] { return committed() > then + 5; })) << first.output();
}

// A trainer, and a daemon at its socket that does what the test says.
struct Greeted {
  Scratch scratch;
  const std::string path = scratch.path + "/daemon.sock";
  const Fd listener = *listen_unix(path);
  Process trainer{{kMinimal}, scratch.path + "/out", {"REJOIN_SOCKET=" + path}};
  Fd connection;

  bool accepted() {
    return eventually([&] {
      connection = Fd(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      return static_cast<bool>(connection);
    });
  }
  bool heard(proto::FromTrainer& message) {
    return eventually([&] {
      const auto received = receive_with_fds(connection, 512 * KiB);
      return received && received->has_value() &&
             message.ParseFromArray((*received)->bytes.data(), static_cast<int>((*received)->bytes.size()));
    });
  }
  bool welcomes(std::uint32_t protocol, std::uint64_t silence_ms) {
    proto::ToTrainer message;
    message.mutable_welcome()->set_protocol(protocol);
    message.mutable_welcome()->set_silence_ms(silence_ms);
    message.mutable_welcome()->set_data_secret(std::string(32, 's'));
    return send_with_fds(connection, as_bytes(message.SerializeAsString()), {}).has_value();
  }
};

// A daemon of another version at the trainer's socket: answers each hello with its own welcome.
TEST(BadInput, ATrainerUnderADaemonOfAnotherVersionEndsAndSaysSo) {
  Greeted daemon;
  ASSERT_TRUE(daemon.accepted()) << daemon.trainer.output();
  proto::FromTrainer hello;
  ASSERT_TRUE(daemon.heard(hello));
  ASSERT_TRUE(daemon.welcomes(membership::kProtocolVersion + 1, 0));
  EXPECT_EQ(daemon.trainer.wait(std::chrono::seconds(10)), 1) << daemon.trainer.output();
  EXPECT_NE(daemon.trainer.output().find("speaks protocol 17, and this library 15 to 16: upgrade this library first"),
            std::string::npos)
      << daemon.trainer.output();
}

// A daemon may take its time to get at a trainer's memory, and ignores what is said meanwhile.
TEST(Session, ATrainerSaysNothingToADaemonThatHasNotWelcomedIt) {
  Greeted daemon;
  for (int time = 0; time < 2; ++time) {
    ASSERT_TRUE(daemon.accepted()) << daemon.trainer.output();
    proto::FromTrainer message;
    ASSERT_TRUE(daemon.heard(message));
    ASSERT_TRUE(message.has_hello());
    pollfd readable{daemon.connection.get(), POLLIN, 0};
    EXPECT_EQ(::poll(&readable, 1, 300), 0);  // many heartbeats
    ASSERT_TRUE(daemon.welcomes(membership::kProtocolVersion, 200));
    ASSERT_TRUE(daemon.heard(message));
    EXPECT_TRUE(message.report().has_heartbeat());
  }
}

// The daemon reads no further, and where it has answered and closed the connection nobody is to be warned.
TEST(Session, ATrainerThatLeavesSaysNothingAfterItsFarewell) {
  Greeted daemon;
  ASSERT_TRUE(daemon.accepted()) << daemon.trainer.output();
  proto::FromTrainer message;
  ASSERT_TRUE(daemon.heard(message));
  ASSERT_TRUE(daemon.welcomes(membership::kProtocolVersion, 800));
  proto::ToTrainer answer;
  auto& registered = *answer.mutable_control()->mutable_registered();
  registered.set_instance(message.hello().up().instance());
  registered.set_incarnation(1);
  ASSERT_TRUE(send_with_fds(daemon.connection, as_bytes(answer.SerializeAsString()), {}));
  for (int beats = 0; beats < 3; ++beats) ASSERT_TRUE(daemon.heard(message));
  ::kill(daemon.trainer.pid(), SIGTERM);
  while (!HasFailure() && !message.has_leave()) ASSERT_TRUE(daemon.heard(message));
  pollfd readable{daemon.connection.get(), POLLIN, 0};
  EXPECT_EQ(::poll(&readable, 1, 300), 0) << "three heartbeats";
  answer.mutable_left();
  ASSERT_TRUE(send_with_fds(daemon.connection, as_bytes(answer.SerializeAsString()), {}));
  daemon.connection.reset();
  EXPECT_EQ(daemon.trainer.wait(std::chrono::seconds(10)), 128 + SIGTERM);
  EXPECT_EQ(daemon.trainer.output().find("the daemon is gone"), std::string::npos) << daemon.trainer.output();
}

// Its source's daemon says another address than it has: nobody is at that one.
TEST(Daemon, WhoseJoinerReachesNoSourceSaysSoAndSoDoesTheCoordinator) {
  Job job;
  job.silence_ms = "300";
  const auto coordinator = job.start_coordinator({"--replicas", "2", "--ranks", "1", "--batch", "8"});
  const auto first =
      job.start_node(0, {"--connect", job.coordinator, "--transport", "tcp", "--advertise", "127.255.255.254"});
  const auto second = job.start_node(1, {"--connect", job.coordinator, "--transport", "tcp"});
  const auto over_tcp = [&](std::uint32_t replica) {
    auto environment = job.environment(replica);
    environment.emplace_back("REJOIN_TRANSPORT=tcp");
    return environment;
  };
  Process a({kMinimal}, job.file("a"), over_tcp(0));
  auto b = std::make_unique<Process>(std::vector<std::string>{kMinimal}, job.file("b"), over_tcp(1));
  ASSERT_TRUE(eventually([&] { return job.status().value("committed", 0) > 2; }));
  EXPECT_TRUE(job.status().at("alarms").empty()) << job.status().at("alarms");
  ::kill(b->pid(), SIGKILL);
  b->wait(std::chrono::seconds(10));
  b = std::make_unique<Process>(std::vector<std::string>{kMinimal}, job.file("b again"), over_tcp(1));
  const std::string alarm = "replica 1 can't catch up: its daemon node1 says of rank 0: it has reached none of its ";
  std::string told;
  EXPECT_TRUE(eventually([&] {
    told = run({kCli, "status", job.coordinator_status}).output;
    return told.find("WARNING " + alarm) != std::string::npos;
  })) << told;
  EXPECT_NE(told.find(": replica 0 at 127.255.255.254:"), std::string::npos) << told;
  const std::string log = read_file(job.file("node1.out"));
  EXPECT_NE(log.find("replica 1 rank 0 can't catch up: it has reached none of its sources "), std::string::npos) << log;
  const std::string node = run({kCli, "status", job.addresses("node1").at("status").get<std::string>()}).output;
  EXPECT_NE(node.find("WARNING it has reached none of its sources for "), std::string::npos) << node;
}

}  // namespace
}  // namespace rejoin::test
