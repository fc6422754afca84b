// `rejoin doctor` with others of its kind.
#include "daemon/doctor_pairs.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <set>
#include <thread>

#include "base/fail.h"
#include "base/fd.h"
#include "daemon/clock_stamp.h"
#include "transport/socket_address.h"

namespace rejoin::daemon {
namespace {

using Reached = PathFacts::Reached;
using Verdict = Finding::Verdict;

// A port that nobody else is given, and that one who listens may share.
struct Reserved {
  Fd socket{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  std::uint16_t port = 0;
  Reserved() {
    const int yes = 1;
    EXPECT_EQ(::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes), 0);
    sockaddr_in own{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_ANY)}, .sin_zero = {}};
    socklen_t size = sizeof own;
    EXPECT_EQ(::bind(socket.get(), reinterpret_cast<sockaddr*>(&own), size), 0);
    EXPECT_EQ(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &size), 0);
    port = ntohs(own.sin_port);
  }
  std::string node() const { return fmt::format("127.0.0.1:{}", port); }
};

struct DoctorPairs : testing::Test {
  const JobKeys keys{JobKey("0123456789abcdef")};
  std::vector<Reserved> ports = std::vector<Reserved>(3);

  PairsOptions of(std::size_t node, std::size_t nodes) const {
    PairsOptions options{.listen = fmt::format("0.0.0.0:{}", ports[node].port),
                         .secrets = keys.data_secrets(),
                         .patience = std::chrono::seconds(5),
                         .wait = std::chrono::seconds(20)};
    for (std::size_t i = 0; i < nodes; ++i) options.nodes.push_back(ports[i].node());
    return options;
  }
  // Each on a thread of its own.
  static std::vector<Result<PairsFacts>> run(const std::vector<PairsOptions>& all) {
    std::vector<Result<PairsFacts>> facts(all.size());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < all.size(); ++i) threads.emplace_back([&, i] { facts[i] = try_pairs(all[i]); });
    for (auto& one : threads) one.join();
    return facts;
  }
  static std::string lines(const Result<PairsFacts>& facts) {
    DoctorSettings settings;
    settings.pairs = {"all"};
    Probes probes;
    probes.pairs = [&](const JobKeys&) { return facts; };
    Findings findings;
    examine_pairs(settings, probes, JobKeys(JobKey("0123456789abcdef")), findings);
    std::string all;
    for (const auto& one : findings) all += line_of(one) + "\n";
    return all;
  }
};

TEST_F(DoctorPairs, EachOfThreeNodesReachesBothOthersAndTellsThemSo) {
  std::vector<PairsOptions> all{of(0, 3), of(1, 3), of(2, 3)};
  all[2].clock_us = [] { return system_time() + 7'300'000; };
  const auto facts = run(all);
  for (std::size_t i = 0; i < facts.size(); ++i) {
    ASSERT_TRUE(facts[i]) << facts[i].error().message;
    EXPECT_EQ(facts[i]->own, ports[i].node());
    ASSERT_EQ(facts[i]->others.size(), 2u);
    for (const auto& other : facts[i]->others) {
      ASSERT_EQ(other.paths.size(), 1u);
      EXPECT_EQ(other.paths.front().reached, Reached::all) << other.paths.front().why;
      EXPECT_GE(other.paths.front().mtu, 1280u);
      EXPECT_EQ(other.paths.front().mtu, other.paths.front().mtu_there);
      EXPECT_TRUE(other.came);
      ASSERT_TRUE(other.verdict);
      EXPECT_EQ(other.verdict->reached, Reached::all);
    }
  }
  const std::string first = lines(facts[0]), third = lines(facts[2]);
  EXPECT_EQ(first.find("FAIL"), std::string::npos) << first;
  EXPECT_NE(first.find(fmt::format("WARN  clock: {}: its clock is 7.3 s ahead", ports[2].node())), std::string::npos)
      << first;
  EXPECT_NE(first.find(fmt::format("ok    clock: {}", ports[1].node())), std::string::npos) << first;
  EXPECT_NE(third.find("its clock is 7.3 s behind"), std::string::npos) << third;
}

TEST_F(DoctorPairs, TriesEachRailWithEachRail) {
  std::vector<PairsOptions> both{of(0, 2), of(1, 2)};
  for (auto& one : both) one.transport = "tcp:127.0.0.1,127.0.0.2";
  for (const auto& facts : run(both)) {
    ASSERT_TRUE(facts) << facts.error().message;
    std::set<std::pair<std::string, std::string>> ways;
    for (const auto& path : facts->others.front().paths) {
      EXPECT_EQ(path.reached, Reached::all) << path.why;
      ways.emplace(path.here, path.there);
    }
    EXPECT_EQ(ways.size(), 4u);
    EXPECT_NE(lines(facts).find("on each of 4 ways"), std::string::npos) << lines(facts);
  }
}

TEST_F(DoctorPairs, TriesNodesThatHaveIpv6Alone) {
  if (!transport::SocketAddress::check_own({"::1", 0})) GTEST_SKIP() << "no IPv6 on this machine";
  std::vector<PairsOptions> both{of(0, 0), of(1, 0)};
  for (auto& one : both)
    for (int i = 0; i < 2; ++i) one.nodes.push_back(fmt::format("[::1]:{}", ports[i].port));
  for (const auto& facts : run(both)) {
    ASSERT_TRUE(facts) << facts.error().message;
    EXPECT_NE(lines(facts).find("ok    pair: [::1]:"), std::string::npos) << lines(facts);
  }
}

TEST_F(DoctorPairs, SaysWhyNobodyIsReached) {
  auto alone = of(0, 2);
  alone.wait = std::chrono::seconds(0);
  const auto facts = try_pairs(alone);
  ASSERT_TRUE(facts) << facts.error().message;
  EXPECT_NE(lines(facts).find("has not come: "), std::string::npos) << lines(facts);
  EXPECT_NE(lines(facts).find("refused"), std::string::npos) << lines(facts);
}

TEST_F(DoctorPairs, RefusesWhoeverIsInNoListOrHasAnotherKey) {
  auto first = of(0, 2), other = of(1, 2);
  const Reserved unknown;
  first.nodes[1] = unknown.node();
  first.wait = other.wait = std::chrono::milliseconds(300);
  auto facts = run({first, other});
  ASSERT_TRUE(facts[1]) << facts[1].error().message;
  EXPECT_NE(lines(facts[1]).find("among its --pairs"), std::string::npos) << lines(facts[1]);
  const JobKeys wrong{JobKey("fedcba9876543210")};
  first = of(0, 2);
  other.secrets = wrong.data_secrets();
  first.wait = other.wait;
  facts = run({first, other});
  ASSERT_TRUE(facts[0]) << facts[0].error().message;
  EXPECT_EQ(facts[0]->others.front().paths.front().reached, Reached::nothing);
  EXPECT_FALSE(facts[0]->others.front().came);
}

TEST_F(DoctorPairs, RefusesAListThatItIsNotIn) {
  auto options = of(0, 2);
  options.nodes = {"198.51.100.1:7100", "198.51.100.2:7100"};  // addresses for examples: of no machine
  EXPECT_NE(lines(try_pairs(options)).find("is this machine"), std::string::npos) << lines(try_pairs(options));
  options = of(0, 2);
  options.listen = "0.0.0.0:0";
  EXPECT_NE(lines(try_pairs(options)).find("both of this machine -> tell by the port"), std::string::npos)
      << lines(try_pairs(options));
  options = of(0, 2);
  options.transport = "shm";
  EXPECT_NE(lines(try_pairs(options)).find("no addresses"), std::string::npos) << lines(try_pairs(options));
  options.transport = "tcp";
  ASSERT_EQ(::listen(ports[0].socket.get(), 1), 0);
  EXPECT_NE(lines(try_pairs(options)).find("already in use -> if it is this node's rejoind"), std::string::npos)
      << lines(try_pairs(options));
}

}  // namespace
}  // namespace rejoin::daemon
