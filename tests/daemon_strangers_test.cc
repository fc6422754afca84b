// Who comes to a coordinator's control port without the job key, in numbers, or without a certificate where one is
// needed: refused, counted, and harmless to the job.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <cstring>
#include <filesystem>
#include <random>
#include <set>
#include <sstream>
#include <vector>

#include "base/fd.h"
#include "base/proof.h"
#include "base/unix_socket.h"
#include "daemon/tests/authority.h"
#include "tests/daemon_support.h"

namespace rejoin::test {
namespace {

constexpr std::size_t kMostStrangers = 256;  // that are waited for at once

Fd connect_to(const std::string& where) {
  Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(std::stoi(where.substr(where.rfind(':') + 1))));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0) << std::strerror(errno);
  return socket;
}

void send_to(const Fd& socket, const std::string& bytes) {
  (void)::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

std::size_t count(const std::string& text, const std::string& what) {
  std::size_t found = 0;
  for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

// What a daemon with this key says first to whoever it takes for its coordinator: somebody has listened.
std::string overheard(Job& job, std::string key) {
  const Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  EXPECT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(::listen(listener.get(), 1), 0);
  EXPECT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
  const std::string own = std::exchange(job.key, std::move(key));
  const auto daemon = job.start_node(99, {"--connect", "127.0.0.1:" + std::to_string(ntohs(address.sin_port))});
  job.key = own;
  const Fd connection(::accept(listener.get(), nullptr, nullptr));
  char bytes[4096];
  const auto got = ::recv(connection.get(), bytes, sizeof bytes, 0);  // which is one segment
  EXPECT_GT(got, 100);
  return {bytes, static_cast<std::size_t>(std::max<ssize_t>(got, 0))};
}

struct Training : Job {
  std::vector<std::unique_ptr<Process>> trainers;

  void begin(std::uint32_t replicas) {
    start(replicas, 0);
    for (std::uint32_t r = 0; r < replicas; ++r) train(r);
  }
  void train(std::uint32_t replica) {
    trainers.push_back(std::make_unique<Process>(std::vector{kMinimal}, file("trainer" + std::to_string(replica)),
                                                 environment(replica)));
  }
  std::uint64_t committed() const {
    const auto now = status();
    return now.is_null() ? 0 : now.at("committed").get<std::uint64_t>();
  }
  double milliseconds_a_step() const {
    const auto then = committed();
    const auto began = std::chrono::steady_clock::now();
    EXPECT_TRUE(eventually([&] { return committed() > then + 200; }, std::chrono::seconds(60)));
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - began;
    return took.count() / static_cast<double>(committed() - then);
  }
  [[nodiscard]] bool goes_on() const {
    const auto then = committed();
    return eventually([&] { return committed() > then + 20; });
  }
};

// Where this process listens on the loopback interface.
std::vector<std::string> listens_at(pid_t process) {
  const std::string of_process = "/proc/" + std::to_string(process);
  std::set<std::string> sockets;
  for (const auto& entry : std::filesystem::directory_iterator(of_process + "/fd")) {
    std::error_code gone;
    sockets.insert(std::filesystem::read_symlink(entry.path(), gone).string());
  }
  std::vector<std::string> found;
  std::istringstream all(read_file(of_process + "/net/tcp"));
  for (std::string line; std::getline(all, line);) {
    unsigned port = 0, state = 0;
    unsigned long inode = 0;
    if (std::sscanf(line.c_str(), " %*d: %*8x:%4x %*8x:%*4x %2x %*s %*s %*s %*u %*u %lu", &port, &state, &inode) != 3)
      continue;
    constexpr unsigned kListens = 0x0a;
    if (state == kListens && sockets.contains("socket:[" + std::to_string(inode) + "]"))
      found.push_back("127.0.0.1:" + std::to_string(port));
  }
  return found;
}

TEST(Strangers, OfATrainersItsDaemonTells) {
  Job job;
  job.start(1, 0);
  auto environment = job.environment(0);
  environment.emplace_back("REJOIN_TRANSPORT=tcp");
  Process trainer({kMinimal}, job.file("a"), environment);
  const std::string status = job.addresses("node0").at("status");
  const auto refused = [&] {
    const auto ranks =
        nlohmann::json::parse(run({kCli, "status", "--json", status}).output).at("node_role").at("ranks");
    return ranks.empty() ? 0 : ranks.at(0).at("refused").value("protocol", 0);
  };
  std::vector<std::string> at;
  ASSERT_TRUE(eventually([&] { return !(at = listens_at(trainer.pid())).empty(); }));
  ASSERT_EQ(at.size(), 1u);
  const Fd stranger = connect_to(at.front());
  send_to(stranger, std::string(56, 'x'));  // as much as a greeting begins with
  EXPECT_TRUE(eventually([&] { return refused() == 1; }));
}

TEST(Strangers, AThousandOfEachKindCostTheJobNothing) {
  rlimit descriptors{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &descriptors), 0);
  descriptors.rlim_cur = descriptors.rlim_max;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &descriptors), 0);
  std::mt19937 random(17);
  Training job;
  job.begin(2);
  ASSERT_TRUE(job.goes_on());
  const auto epoch = job.status().at("epoch");
  const double alone = job.milliseconds_a_step();

  const std::string greeting = overheard(job, job.key);
  const std::string wrong = overheard(job, job.scratch.write("other", "another key, long enough"));
  std::vector<Fd> idle, others;
  for (int i = 0; i < 1000; ++i) {
    idle.push_back(connect_to(job.coordinator));
    others.push_back(connect_to(job.coordinator));
    std::string garbage(random() % 300, '\0');
    for (auto& c : garbage) c = static_cast<char>(random());
    switch (i % 5) {
      case 0: send_to(others.back(), garbage); break;
      case 1: send_to(others.back(), greeting.substr(0, random() % greeting.size())); break;  // and no more
      case 2: {  // once more, by who can't go on from it, and so alerts by a number that nobody has given out
        send_to(others.back(), greeting);
        char answer[4096];
        if (i < 100) EXPECT_GT(::recv(others.back().get(), answer, sizeof answer, 0), 0);
        if (i < 100) send_to(others.back(), std::string("\x15\x03\x03\x00\x02\x02\xc8", 7));
        break;
      }
      case 3: send_to(others.back(), wrong); break;
      default: send_to(others.back(), greeting + garbage);
    }
  }
  EXPECT_LE(job.status().at("strangers"), kMostStrangers);
  const double beside = job.milliseconds_a_step();
  std::printf("a step took %.2f ms alone, %.2f ms beside the strangers\n", alone, beside);
  EXPECT_LT(beside, 3 * alone + 20);
  // Who has the key comes in beside them, and so does who comes back.
  job.trainers[1].reset();
  job.train(1);
  ASSERT_TRUE(eventually([&] { return job.status().at("epoch") > epoch; }));
  EXPECT_TRUE(job.goes_on());
  const std::string log = read_file(job.file("coordinator.out"));
  EXPECT_GE(count(log, "was refused"), 1u);
  EXPECT_LE(count(log, "was refused"), 5u) << "once a minute and host";
  EXPECT_TRUE(eventually([&] { return job.status().at("strangers") == 0; })) << "each has its time and no more";
  EXPECT_EQ(job.status().at("rejected"), 2000);
  auto refused = refused_by(job.coordinator_status);
  EXPECT_EQ(std::exchange(refused["no_proof"], 0) + std::exchange(refused["too_many"], 0) +
                std::exchange(refused["key"], 0) + std::exchange(refused["protocol"], 0),
            2000);
  for (const auto& [why, times] : refused) EXPECT_EQ(times, 0) << why;
}

double processor_seconds(pid_t of) {
  const std::string text = read_file("/proc/" + std::to_string(of) + "/stat");
  std::istringstream fields(text.substr(text.rfind(')') + 2));
  std::string skipped;
  for (int i = 0; i < 11; ++i) fields >> skipped;
  double user = 0, system = 0;
  fields >> user >> system;
  return (user + system) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

// Leaves a process so many descriptors more than it has. Returns its limit before.
rlimit leave_descriptors(pid_t process, rlim_t more) {
  std::set<rlim_t> in_use;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/" + std::to_string(process) + "/fd"))
    in_use.insert(std::stoul(entry.path().filename()));
  rlim_t end = 0;  // as many as `more` below it are free
  for (rlim_t free = 0; free < more || in_use.contains(end); ++end) free += in_use.contains(end) ? 0 : 1;
  rlimit before{};
  EXPECT_EQ(::prlimit(process, RLIMIT_NOFILE, nullptr, &before), 0);
  const rlimit now{end, before.rlim_max};
  EXPECT_EQ(::prlimit(process, RLIMIT_NOFILE, &now, nullptr), 0);
  return before;
}

// Local connections and requests for the status wait until there are descriptors.
TEST(Strangers, WithoutDescriptorsANodeWaitsAndDoesNotSpin) {
  Training job;
  job.start(1, 0);  // nobody trains, so that it has nothing to do
  const pid_t node = job.processes.back()->pid();
  const std::string status = job.addresses("node0").at("status");
  const rlimit before = leave_descriptors(node, 0);
  std::vector<Fd> local, requests;
  for (int i = 0; i < 20; ++i) {
    local.push_back(connect_unix(job.socket(0)).value());
    requests.push_back(connect_to(status));
  }
  ASSERT_TRUE(eventually([&] {
    return count(read_file(job.file("node0.out")), "no local connection can be accepted") == 1;
  })) << read_file(job.file("node0.out"));
  const double cpu = processor_seconds(node);
  const auto began = std::chrono::steady_clock::now();
  const auto enough = began + std::chrono::milliseconds(700);
  ASSERT_TRUE(eventually([&] { return std::chrono::steady_clock::now() > enough; }));
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  EXPECT_LT(processor_seconds(node) - cpu, 0.2 + took.count() / 2);
  ASSERT_EQ(::prlimit(node, RLIMIT_NOFILE, &before, nullptr), 0);
  EXPECT_EQ(run({kCli, "status", status}).status, 0);
  local.clear();
  job.train(0);
  EXPECT_TRUE(job.goes_on());
}

// One that was accepted with fewer than it takes would be lost, and its join() fail.
TEST(Strangers, ATrainerThatComesWhileTooFewDescriptorsAreLeftWaitsAndIsTaken) {
  for (const rlim_t left : {1, 4}) {
    Training job;
    job.start(1, 0);
    const pid_t node = job.processes.back()->pid();
    const rlimit before = leave_descriptors(node, left);
    job.train(0);
    EXPECT_TRUE(eventually([&] {
      return count(read_file(job.file("node0.out")), "no local connection can be accepted") == 1;
    })) << read_file(job.file("node0.out"));
    ASSERT_EQ(::prlimit(node, RLIMIT_NOFILE, &before, nullptr), 0);
    EXPECT_TRUE(job.goes_on()) << left;
  }
}

TEST(Strangers, WithoutDescriptorsTheCoordinatorWaitsAndDoesNotSpin) {
  Training job;
  job.begin(1);
  ASSERT_TRUE(job.goes_on());
  const pid_t coordinator = job.processes.front()->pid();
  const rlimit before = leave_descriptors(coordinator, 20);
  std::vector<Fd> idle;
  for (int i = 0; i < 60; ++i) idle.push_back(connect_to(job.coordinator));
  ASSERT_TRUE(eventually([&] {
    return count(read_file(job.file("coordinator.out")), "no control connection can be accepted") == 1;
  })) << read_file(job.file("coordinator.out"));
  // Until their time is over, which is four silences.
  const double cpu = processor_seconds(coordinator);
  const auto began = std::chrono::steady_clock::now();
  ASSERT_TRUE(eventually(
      [&] { return count(read_file(job.file("coordinator.out")), "did not prove the job key in time") > 0; }));
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  EXPECT_LT(processor_seconds(coordinator) - cpu, 0.5 + took.count() / 2);
  ASSERT_EQ(::prlimit(coordinator, RLIMIT_NOFILE, &before, nullptr), 0);
  idle.clear();
  const auto late = job.start_node(7, {"--connect", job.coordinator});
  EXPECT_TRUE(eventually([&] { return job.status().at("nodes") == 2; }));
  EXPECT_TRUE(job.goes_on());
}

std::vector<std::string> flags_of(const daemon::CertificateFiles& files) {
  return {"--tls-ca", files.ca, "--tls-cert", files.cert, "--tls-key", files.key};
}

// A node behind a relay, and one that is not; the coordinator's certificate is renewed while they train.
TEST(StrangersWithCertificates, StayOutOfAJobThatGoesOn) {
  const Authority ours, others("others");
  const auto coordinators = ours.sign("c0");
  Training job;
  job.of_all = flags_of(coordinators);
  job.processes.push_back(job.start_coordinator(
      {"--replicas", "2", "--ranks", "1", "--batch", "8", "--steps", "0", "--listen", "0.0.0.0:0"}));
  job.coordinator = "localhost" + job.coordinator.substr(job.coordinator.rfind(':'));
  job.of_all = flags_of(ours.sign("relay"));
  job.processes.push_back(job.daemon("relay", {"--relay", "127.0.0.1:0", "--connect", job.coordinator}));
  const std::string relay = job.addresses("relay").at("relay");
  job.of_all = flags_of(ours.sign("node", {.names = ""}));
  job.processes.push_back(job.start_node(0, {"--connect", relay}));
  job.processes.push_back(job.start_node(1, {"--connect", job.coordinator}));
  for (std::uint32_t r = 0; r < 2; ++r) job.train(r);
  ASSERT_TRUE(job.goes_on()) << read_file(job.file("node0.out")) << read_file(job.file("coordinator.out"));
  const auto epoch = job.status().at("epoch");

  struct Stranger {
    std::vector<std::string> flags;
    std::string key, says;
  };
  const std::string other_key = job.scratch.write("other", "another key, long enough");
  auto trusting = others.sign("trusting");
  trusting.ca = others.ca_and(ours);
  const Stranger strangers[] = {
      {{}, job.key, "it asks for a certificate, and this process has none"},
      {flags_of(others.sign("foreign")), job.key, "its certificate (CN=c0) is not signed by a CA in our --tls-ca"},
      {flags_of(trusting), job.key, "does not take our --tls-cert " + trusting.cert},
      {flags_of(ours.sign("keyless")), other_key, "its job key differs from ours"},
  };
  std::uint32_t number = 10;
  for (const auto& one : strangers) {
    job.of_all = one.flags;
    const std::string own = std::exchange(job.key, one.key);
    const auto stranger = job.start_node(number++, {"--connect", job.coordinator});
    EXPECT_TRUE(eventually([&] { return stranger->output().find(one.says) != std::string::npos; }))
        << one.says << ":\n"
        << stranger->output();
    job.key = own;
  }
  EXPECT_TRUE(eventually([&] { return job.status().at("rejected") >= std::size(strangers); }));
  EXPECT_EQ(job.status().at("nodes"), 2);
  EXPECT_EQ(job.status().at("epoch"), epoch);
  EXPECT_TRUE(job.goes_on());

  // The next that comes meets the new certificate, which is not for this name any more.
  const auto renewed = ours.sign("renewed", {.names = "DNS:elsewhere"});
  std::filesystem::rename(renewed.key, coordinators.key);
  std::filesystem::rename(renewed.cert, coordinators.cert);
  job.of_all = flags_of(ours.sign("late"));
  const auto late = job.start_node(20, {"--connect", job.coordinator});
  EXPECT_TRUE(eventually([&] {
    return late->output().find(
               "its certificate (CN=renewed) is for DNS:elsewhere, and it was asked for as localhost") !=
           std::string::npos;
  })) << late->output();
  EXPECT_TRUE(job.goes_on());
}

// Whatever file it is.
TEST(StrangersWithCertificates, AFileOfKeysOrCertificatesThatCannotBeUsedIsAWrongSetting) {
  const Authority ours, stranger("stranger");
  const auto files = ours.sign("node"), other = ours.sign("other");
  Job job;
  const auto open = job.scratch.write("open", "0123456789abcdef", 0644),
             short_key = job.scratch.write("short", "short"), whole = read_file(files.ca),
             cut = job.scratch.write("cut.pem", whole + whole.substr(0, whole.size() / 2), 0644);
  struct Wrong {
    std::string key;
    std::vector<std::string> flags;
    std::string says;
  };
  const std::vector<Wrong> all{
      {"/nowhere", {}, "job key file /nowhere: No such file"},
      {open, {}, open + " has mode 0644: others may use it; chmod 600 it"},
      {short_key, {}, "has 5 bytes; use at least 16"},
      {"", {}, "--job-key-file: no file is named"},
      {job.key,
       {"--other-job-key-file", ""},
       "--other-job-key-file: no file is named: give its name, or leave the flag out"},
      {job.key, {"--other-job-key-file="}, "--other-job-key-file"},
      {job.key, {"--other-job-key-file", short_key}, "--other-job-key-file: job key in " + short_key + " has 5 bytes"},
      {job.key, {"--other-job-key-file", job.key}, "has the same key as --job-key-file"},
      {job.key, {"--tls-ca", files.ca}, "--tls-ca without --tls-cert and --tls-key"},
      {job.key, {"--tls-ca", ""}, "--tls-ca: no file is named"},
      {job.key, flags_of({files.ca, files.cert, other.key}), "does not belong to --tls-cert " + files.cert},
      {job.key, flags_of({stranger.ca(), files.cert, files.key}), "is not worth anything to who has --tls-ca"},
      {job.key, flags_of({files.ca, other.key, files.key}), "has no certificate in PEM form"},
      {job.key, flags_of({cut, files.cert, files.key}), "--tls-ca " + cut + " is damaged: it ends in the midst of"},
      {job.key, {"--store", "etcd:a:1", "--job", "j", "--etcd-ca", "/none"}, "--etcd-ca /none: No such file"},
      {job.key, {"--store", "etcd:a:1", "--job", "j", "--etcd-ca", short_key}, "has no certificate in PEM"},
      {job.key, {"--store", "etcd:a:1", "--job", "j", "--etcd-ca", cut}, "--etcd-ca " + cut + " is damaged"},
      {job.key,
       {"--store", "etcd:a:1", "--job", "j", "--etcd-user", "u", "--etcd-password-file", open},
       "--etcd-password-file " + open + " has mode 0644"},
  };
  for (const auto& [key, flags, says] : all) {
    std::vector<std::string> arguments{kDaemon,         "--coordinator",  "--log-directory",
                                       job.file("log"), "--job-key-file", key};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    const Ended ended = run(arguments);
    EXPECT_EQ(ended.status, 2) << says;
    EXPECT_NE(ended.output.find(says), std::string::npos) << says << ":\n" << ended.output;
  }
  EXPECT_FALSE(std::filesystem::exists(job.file("log")));
}

}  // namespace
}  // namespace rejoin::test
