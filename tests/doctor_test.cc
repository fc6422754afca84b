// `rejoin doctor` on this machine, with one thing broken after the other.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <regex>

#include "base/fd.h"
#include "base/unix_socket.h"
#include "daemon/tests/authority.h"
#include "tests/doctor_support.h"

namespace rejoin::test {
namespace {

using Doctor = DoctorTest;

// A port where nobody listens, for as long as this lives.
struct ClosedPort {
  Fd socket{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  std::string address;
  ClosedPort() {
    sockaddr_in own{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
    socklen_t size = sizeof own;
    EXPECT_EQ(::bind(socket.get(), reinterpret_cast<sockaddr*>(&own), size), 0);
    EXPECT_EQ(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &size), 0);
    address = "127.0.0.1:" + std::to_string(ntohs(own.sin_port));
  }
};

// A limit of this process, and so of those that it starts, until the end of this object.
struct Limit {
  int which;
  rlimit before{};
  Limit(int resource, rlim_t value) : which(resource) {
    EXPECT_EQ(::getrlimit(static_cast<__rlimit_resource>(which), &before), 0);
    const rlimit now{value, before.rlim_max};
    EXPECT_EQ(::setrlimit(static_cast<__rlimit_resource>(which), &now), 0);
  }
  ~Limit() { ::setrlimit(static_cast<__rlimit_resource>(which), &before); }
};

TEST_F(Doctor, FindsARunningJobSoundAndDisturbsNobody) {
  constexpr std::uint32_t replicas = 3;
  job.start(replicas, 0);
  std::vector<std::unique_ptr<Process>> trainers;
  for (std::uint32_t r = 0; r < replicas; ++r)
    trainers.push_back(
        std::make_unique<Process>(std::vector{kMinimal}, job.file("trainer" + std::to_string(r)), job.environment(r)));
  const auto committed = [&] { return job.status().at("committed").get<int>(); };
  const auto contribute = [&] {
    const auto now = job.status();
    return now.at("members").size() == replicas && now.at("committed") > 2;
  };
  ASSERT_TRUE(eventually(contribute)) << job.status().dump();
  const auto epoch = job.status().at("epoch");
  auto arguments = to_coordinator(job.coordinator);
  arguments.insert(arguments.end(), {"--other-job-key-file", job.scratch.write("other", "fedcba9876543210"), "--socket",
                                     job.socket(0), "--ranks-here", "1", "--replicas", "3", "--strict"});
  expect(0, arguments, {"ok", "key:", "kept from others"});
  expect(0, arguments, {"ok", "socket:", "answers"});
  expect(0, arguments, {"ok", "coordinator:", "the key is right"});
  expect(0, arguments, {"ok", "clock:", job.coordinator, "give or take"});
  arguments.emplace_back("--json");
  const auto ended = examine(arguments);
  const auto json = nlohmann::json::parse(ended.output, nullptr, false);
  ASSERT_FALSE(json.is_discarded()) << ended.output;
  for (const auto& one : json.at("findings"))
    EXPECT_TRUE(one.at("verdict") == "ok" || one.at("verdict") == "skipped") << one.dump();
  const int then = committed();
  EXPECT_TRUE(eventually([&] { return committed() > then + 2; }));
  EXPECT_EQ(job.status().at("epoch"), epoch) << "somebody was put out";
  EXPECT_EQ(job.status().at("nodes"), replicas);

  // Nobody has more descriptors open than it says that this job needs.
  std::smatch needed;
  ASSERT_TRUE(std::regex_search(ended.output, needed, std::regex("trainer needs ([0-9]+).*daemon needs ([0-9]+) and")))
      << ended.output;
  const auto open = [](const Process& process) {
    const std::filesystem::directory_iterator all("/proc/" + std::to_string(process.pid()) + "/fd");
    return std::distance(begin(all), end(all));
  };
  for (const auto& one : trainers) EXPECT_LE(open(*one), std::stol(needed[1]));
  for (const auto& one : job.processes) EXPECT_LE(open(*one), std::stol(needed[2]));
}

TEST_F(Doctor, FindsWhatIsWrongWithAKey) {
  const auto with = [](const std::string& key) { return std::vector<std::string>{"--job-key-file", key}; };
  expect(2, with(job.scratch.write("open", "0123456789abcdef", 0644)), {"FAIL", "has mode 0644", "-> chmod 600"});
  expect(2, with(job.scratch.write("empty", "")), {"FAIL", "has 0 bytes", "-> use at least 16"});
  expect(2, with(job.file("none")), {"FAIL", "No such file", "-> ", "openssl rand"});
  expect(2, {"--job-key-file", job.key, "--other-job-key-file", job.key}, {"FAIL", "has the same key"});
}

TEST_F(Doctor, FindsWhatIsWrongWithASocket) {
  const auto with = [](const std::string& socket) { return std::vector<std::string>{"--socket", socket}; };
  expect(2, with(job.file("none")), {"FAIL", "there is no", "-> start rejoind"});
  expect(2, with(job.key), {"FAIL", "socket:", "is no socket", "-> give rejoind's --socket"});
  {
    const auto left = listen_unix(job.file("left"));
    ASSERT_TRUE(left);
  }
  expect(2, with(job.file("left")), {"FAIL", "nobody listens", "-> start rejoind"});
  const auto silent = listen_unix(job.file("silent"));
  ASSERT_TRUE(silent);
  expect(2, {"--socket", job.file("silent"), "--patience-ms", "200"}, {"FAIL", "says nothing in 200 ms", "stopped"});
  for (int i = 0; i < 1000 && connect_unix(job.file("silent")); ++i) {
  }
  expect(2, with(job.file("silent")), {"FAIL", "too many wait at", "stopped"});
}

TEST_F(Doctor, FindsADaemonOfAnotherUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  const std::string name = "@rejoin-doctor-" + std::to_string(::getpid());
  int said[2];
  ASSERT_EQ(::pipe2(said, O_CLOEXEC), 0);
  const pid_t nobody = ::fork();
  if (nobody == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    constexpr uid_t user = 65534;
    const bool other = ::setgid(user) == 0 && ::setuid(user) == 0;
    const auto listening = listen_unix(name);
    const char done = other && listening ? 'y' : 'n';
    (void)!::write(said[1], &done, 1);
    for (;;) ::pause();
  }
  char done = 'n';
  EXPECT_EQ(::read(said[0], &done, 1), 1);
  EXPECT_EQ(done, 'y');
  expect(2, {"--socket", name}, {"FAIL", "of user 65534's daemon", "-> run rejoind and its trainers as one user"});
  ::kill(nobody, SIGKILL);
  ::waitpid(nobody, nullptr, 0);
  ::close(said[0]);
  ::close(said[1]);
}

TEST_F(Doctor, FindsWhatIsWrongWithACoordinator) {
  const auto runs = job.start_coordinator({"--replicas", "1", "--ranks", "1"});
  const std::string wrong = job.scratch.write("wrong", "fedcba9876543210fedcba9876543210");
  expect(2, {"--job-key-file", wrong, "--connect", job.coordinator},
         {"FAIL", job.coordinator, "its job key differs from ours", "-> give both the same --job-key-file"});
  expect(2, to_coordinator("no-such-host.invalid:7000"), {"FAIL", "its name is not resolved", "->"});
  const ClosedPort closed;
  expect(2, to_coordinator(closed.address), {"FAIL", closed.address, "refused", "-> start the coordinator"});
  auto status = to_coordinator(job.coordinator_status);
  status.insert(status.end(), {"--patience-ms", "300"});
  expect(2, status, {"FAIL", job.coordinator_status, "->"});
  ASSERT_EQ(::listen(closed.socket.get(), 1), 0);  // it accepts, and says nothing
  auto silent = to_coordinator(closed.address);
  silent.insert(silent.end(), {"--patience-ms", "200"});
  expect(2, silent, {"FAIL", closed.address, "->"});
}

TEST_F(Doctor, RefusesTheLoopbackForACoordinatorOnAnotherMachine) {
  auto arguments = to_coordinator("198.51.100.1:7000");  // an address for examples: of no machine
  arguments.insert(arguments.end(), {"--transport", "tcp", "--patience-ms", "200"});
  expect(2, arguments, {"FAIL", "advertised: 127.0.0.1", "can't reach it", "-> --data-listen 0.0.0.0:0"});
  arguments.insert(arguments.end(), {"--data-listen", "0.0.0.0:7100", "--advertise", "127.0.0.1"});
  expect(2, arguments, {"FAIL", "advertised: 127.0.0.1", "-> --advertise"});
  arguments.back() = "198.51.100.7";
  expect(2, arguments, {"WARN", "198.51.100.7 is no address of this machine"});
}

TEST_F(Doctor, ConnectsWithAPeerAndFindsAnotherKey) {
  const auto runs = job.start_coordinator({"--replicas", "1", "--ranks", "1"});
  const auto node = job.start_node(0, {"--connect", job.coordinator, "--transport", "tcp"});
  const auto log = node->output();
  const std::string before = "catch-up stream is at ";
  ASSERT_NE(log.find(before), std::string::npos) << log;
  const auto begin = log.find(before) + before.size();
  const std::string at = log.substr(begin, log.find('\n', begin) - begin);
  std::vector<std::string> arguments{"--job-key-file", job.key, "--transport", "tcp", "--peer", at};
  expect(0, arguments, {"ok", "peer:", at, "its key is right"});
  arguments[1] = job.scratch.write("wrong", "fedcba9876543210fedcba9876543210");
  expect(2, arguments, {"FAIL", "peer:", at, "->"});
  arguments[1] = job.key;
  const ClosedPort closed;
  arguments.back() = closed.address;
  expect(2, arguments, {"FAIL", "peer:", closed.address, "->"});
}

TEST_F(Doctor, FindsLimitsThatAreTooLow) {
  {
    const Limit low(RLIMIT_NOFILE, 48);
    expect(2, {}, {"FAIL", "descriptors:", "a trainer may open 48", "-> 'ulimit -n"});
  }
  expect(2, {"--transport", "ibverbs:no_such_device"}, {"FAIL", "rdma:", "->"});
}

TEST_F(Doctor, RefusesBadSettings) {
  const auto bad = examine({"--patience-ms", "1"});
  EXPECT_NE(bad.status, 0);
  EXPECT_NE(bad.output.find("--patience-ms"), std::string::npos) << bad.output;
}

// By their names, whatever addresses these have.
TEST_F(Doctor, AsksCoordinatorsForTheCertificatesOfTheirNames) {
  const Authority authority;
  const auto flags_of = [](const daemon::CertificateFiles& files) {
    return std::vector<std::string>{"--tls-ca", files.ca, "--tls-cert", files.cert, "--tls-key", files.key};
  };
  job.of_all = flags_of(authority.sign("c0", {.names = "DNS:localhost"}));
  const auto coordinator = job.start_coordinator({"--replicas", "1", "--ranks", "1", "--listen", "127.0.0.1:0"});
  const std::string port = job.coordinator.substr(job.coordinator.rfind(':'));
  const auto with = [&](const std::string& host, const std::vector<std::string>& certificates) {
    auto arguments = to_coordinator(host + port);
    arguments.insert(arguments.end(), certificates.begin(), certificates.end());
    return arguments;
  };
  const auto own = flags_of(authority.sign("node", {.names = ""}));
  expect(0, with("localhost", own), {"ok", "coordinator:", "the key is right"});
  expect(2, with("127.0.0.1", own), {"FAIL", "coordinator:", "it was asked for as 127.0.0.1"});
  expect(2, with("localhost", {}), {"FAIL", "coordinator:", "certificate"});
}

}  // namespace
}  // namespace rejoin::test
