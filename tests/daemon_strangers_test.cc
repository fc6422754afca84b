// Who comes to a coordinator's control port without the job key, in numbers: refused, counted, and harmless to the job.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <cstring>
#include <random>
#include <vector>

#include "base/fd.h"
#include "base/proof.h"
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

TEST(Strangers, WithoutDescriptorsTheCoordinatorWaitsAndDoesNotSpin) {
  Training job;
  job.begin(1);
  ASSERT_TRUE(job.goes_on());
  const pid_t coordinator = job.processes.front()->pid();
  const auto in_use = std::distance(std::filesystem::directory_iterator("/proc/" + std::to_string(coordinator) + "/fd"),
                                    std::filesystem::directory_iterator());
  rlimit before{};
  const rlimit few{static_cast<rlim_t>(in_use + 20), static_cast<rlim_t>(1 << 16)};
  ASSERT_EQ(::prlimit(coordinator, RLIMIT_NOFILE, nullptr, &before), 0);
  const rlimit now{few.rlim_cur, before.rlim_max};
  ASSERT_EQ(::prlimit(coordinator, RLIMIT_NOFILE, &now, nullptr), 0);
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

}  // namespace
}  // namespace rejoin::test
