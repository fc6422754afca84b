// Processes of another user on the same machine, at the names that anybody may take.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "base/tests/said_by_child.h"
#include "base/unix_socket.h"
#include "local.pb.h"
#include "rejoin/session.h"
#include "tests/daemon_support.h"

namespace rejoin::test {
namespace {

constexpr uid_t kNobody = 65534;

// A process of another user that does this, says so, and stays until the end of this object.
class AnotherUser {
 public:
  explicit AnotherUser(const std::function<bool()>& does) {
    int said[2];
    EXPECT_EQ(::pipe2(said, O_CLOEXEC), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      const char done = ::setgid(kNobody) == 0 && ::setuid(kNobody) == 0 && does() ? 'y' : 'n';
      (void)!::write(said[1], &done, 1);
      for (;;) ::pause();
    }
    ::close(said[1]);
    EXPECT_EQ(::read(said[0], &answer_, 1), 1);
    ::close(said[0]);
  }
  ~AnotherUser() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  AnotherUser(const AnotherUser&) = delete;
  AnotherUser& operator=(const AnotherUser&) = delete;
  bool done() const { return answer_ == 'y'; }

 private:
  pid_t pid_ = -1;
  char answer_ = 'n';
};

struct OtherUsers : testing::Test {
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  }
  const std::string name = "@rejoin-test-" + std::to_string(::getpid());
};

std::unique_ptr<Session> open_session(const std::string& socket) {
  SessionConfig config;
  config.flight = "off";
  config.socket = socket;
  auto session = *Session::open(config);
  const TensorId w = *session->add({.name = "w", .count = 1000});
  (void)*session->bucket({w});
  EXPECT_TRUE(session->allocate());
  return session;
}

// Whoever listens does so until its process ends.
bool listens_at(const std::string& name) {
  auto listening = listen_unix(name);
  return listening && listening->release() >= 0;
}

TEST_F(OtherUsers, WhoHasTakenTheDaemonsNameGetsNoTrainersState) {
  const AnotherUser stranger([&] { return listens_at(name); });
  ASSERT_TRUE(stranger.done());
  const auto joined = open_session(name)->join();
  ASSERT_FALSE(joined);
  EXPECT_EQ(joined.error().code, ErrorCode::refused);
  EXPECT_NE(joined.error().message.find("of user 65534, and this trainer is user 0's"), std::string::npos)
      << joined.error().message;
}

// As in a container without privileges that runs as nobody: root's number is 65534 there, and so is every other user's
// but root's. Of this process, which has to have one thread.
std::string enter_user_namespace() {
  if (::unshare(CLONE_NEWUSER) != 0) return "no user namespaces";
  std::ofstream map("/proc/self/uid_map");
  map << kNobody << " 0 1" << std::flush;
  if (!map || ::geteuid() != kNobody) return "no map of users";
  ::prctl(PR_SET_DUMPABLE, 1);
  return "";
}

TEST_F(OtherUsers, OfTheSameNumberAsOneWhomAUserNamespaceDoesNotKnowGetNoTrainersState) {
  const AnotherUser stranger([&] { return listens_at(name); });
  ASSERT_TRUE(stranger.done());
  const auto joins = test::said_by_child([&]() -> std::string {
    if (const auto why = enter_user_namespace(); !why.empty()) return why;
    const auto joined = open_session(name)->join();
    return joined ? "it joined" : joined.error().message;
  });
  if (joins == "no user namespaces") GTEST_SKIP() << joins;
  EXPECT_NE(joins.find("of user 65534 (so this user namespace calls all users that it does not know: "), joins.npos)
      << joins;
}

TEST_F(OtherUsers, OfTheSameNumberAreToldFromOnesOwnInAUserNamespace) {
  const auto listening = listen_unix(name);
  ASSERT_TRUE(listening);
  Fd theirs;
  const AnotherUser stranger([&] {
    if (auto connected = connect_unix(name)) theirs = std::move(*connected);
    return static_cast<bool>(theirs);
  });
  ASSERT_TRUE(stranger.done());
  const auto own = connect_unix(name);
  ASSERT_TRUE(own);
  const auto taken = test::said_by_child([&]() -> std::string {
    if (const auto why = enter_user_namespace(); !why.empty()) return why;
    std::string said;
    for (int caller = 0; caller < 2; ++caller) {
      const Fd socket(::accept4(listening->get(), nullptr, nullptr, SOCK_CLOEXEC));
      const auto who = peer_credentials(socket);
      if (!who) return who.error().message;
      said += fmt::format("{} {}; ", who->uid, of_this_user(*who, name));
    }
    return said;
  });
  if (taken == "no user namespaces") GTEST_SKIP() << taken;
  EXPECT_EQ(taken, "65534 false; 65534 true; ");
}

TEST_F(OtherUsers, HearWhoseTheDaemonsSocketIsThatTheyMayNotOpen) {
  const std::filesystem::path directory = "/tmp/rejoin-users-" + std::to_string(::getpid());
  std::filesystem::create_directory(directory);
  const std::string socket = directory / "rejoin.sock";
  const auto listening = listen_unix(socket);
  ASSERT_TRUE(listening);
  const auto joins_in = [&](std::filesystem::perms mode) {
    std::filesystem::permissions(directory, mode);
    return test::said_by_child([&]() -> std::string {
      if (::setgid(kNobody) != 0 || ::setuid(kNobody) != 0) return "it can't be another user";
      ::prctl(PR_SET_DUMPABLE, 1);
      const auto joined = open_session(socket)->join();
      return joined ? "it joined" : fmt::format("{} {}", static_cast<int>(joined.error().code), joined.error().message);
    });
  };
  const auto refused = std::to_string(static_cast<int>(ErrorCode::refused));
  const auto seen = joins_in(std::filesystem::perms{0755});
  EXPECT_EQ(seen.find(refused + " the socket " + socket + " is user 0's, and this trainer is user 65534's: run"), 0u)
      << seen;
  const auto unseen = joins_in(std::filesystem::perms{0700});
  EXPECT_EQ(unseen.find(refused + " this trainer, which is user 65534's, may not connect to the socket " + socket), 0u)
      << unseen;
  std::filesystem::remove_all(directory);
}

TEST_F(OtherUsers, AreRefusedByADaemonWhoseJobGoesOn) {
  Job job;
  job.processes.push_back(job.start_coordinator({"--replicas", "1", "--ranks", "1", "--batch", "8", "--steps", "0"}));
  job.processes.push_back(job.daemon("node0", {"--socket", name, "--connect", job.coordinator}));
  job.addresses("node0");
  const Process trainer({kMinimal}, job.file("trainer"),
                        {"REJOIN_REPLICA=0", "REJOIN_RANK=0", "REJOIN_SOCKET=" + name});
  const auto committed = [&] { return job.status().at("committed").get<std::uint64_t>(); };
  ASSERT_TRUE(eventually([&] { return committed() > 10; }));
  Fd socket;
  const AnotherUser stranger([&] {
    for (int i = 0; i < 50; ++i)
      if (auto connected = connect_unix(name)) socket = std::move(*connected);
    return static_cast<bool>(socket);
  });
  ASSERT_TRUE(stranger.done()) << "an abstract name keeps nobody from calling";
  EXPECT_TRUE(eventually([&] {
    return read_file(job.file("node0.out")).find("a local connection of user 65534 was refused") != std::string::npos;
  }));
  EXPECT_TRUE(eventually([&] { return refused_by(job.addresses("node0").at("status")).at("user") == 50; }));
  const auto joins = test::said_by_child([&]() -> std::string {
    if (::setgid(kNobody) != 0 || ::setuid(kNobody) != 0) return "it can't be another user";
    ::prctl(PR_SET_DUMPABLE, 1);
    const auto joined = open_session(name)->join();
    return joined ? "it joined" : joined.error().message;
  });
  EXPECT_NE(joins.find("of user 0, and this trainer is user 65534's"), std::string::npos) << joins;
  const auto then = committed();
  EXPECT_TRUE(eventually([&] { return committed() > then + 10; }));
}

// Without a LocalHello nobody has looked whether it is to have that place, and its state is nowhere.
TEST(BadInput, WhoRegistersInAReportIsRefusedAndTheDaemonGoesOn) {
  Job job;
  job.start(1, 400);
  Process trainer({kMinimal}, job.file("trainer.out"), job.environment(0));
  for (const std::uint32_t replica : {0u, 1u}) {
    proto::FromTrainer message;
    auto& up = *message.mutable_report()->mutable_rank_up();
    up.set_replica(replica);
    up.set_instance(5);
    const Fd socket = *connect_unix(job.socket(0));
    ASSERT_TRUE(send_with_fds(socket, as_bytes(message.SerializeAsString()), {}));
    proto::ToTrainer answer;
    ASSERT_TRUE(eventually([&] {
      const auto received = receive_with_fds(socket, 64 * KiB);
      return received && *received && answer.ParseFromString(std::string(as_text((*received)->bytes)));
    }));
    EXPECT_EQ(answer.refusal(), "it registered in a report, past what says where its state is");
  }
  EXPECT_EQ(trainer.wait(std::chrono::seconds(30)), 0) << trainer.output();
  EXPECT_EQ(run({kCli, "status", job.coordinator_status}).status, 0);
}

}  // namespace
}  // namespace rejoin::test
