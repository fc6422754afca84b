// Nodes that share nothing but a network: each a network namespace, with a cable between the two.
#include "tests/hosts.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <iostream>
#include <sstream>

namespace rejoin::test {
namespace {

const std::string kTrainer = binaries() + "/rejoin-minimal";

// Two hosts, 10.77.0.1 and 10.77.0.2, a node and a replica on each; the coordinator is on the first one.
struct TwoHosts : Daemons {
  Host hosts[2] = {Host(scratch), Host(scratch)};
  std::vector<std::unique_ptr<Process>> processes;
  std::string silence = "5000", listen = "0.0.0.0:0";

  // Empty, or why there is no cable between the two here.
  std::string connect() const {
    for (const auto& host : hosts)
      if (!host.there()) return "network namespaces can't be had (they need root)";
    const Ended cable = hosts[0].ip({"link", "add", "dev", "eth0", "type", "veth", "peer", "name", "eth0", "netns",
                                     std::to_string(hosts[1].pid())});
    if (cable.status != 0) return "no cable between network namespaces: " + cable.output;
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(hosts[i].ip({"link", "set", "lo", "up"}).status, 0);
      EXPECT_EQ(hosts[i].ip({"addr", "add", address(i) + "/24", "dev", "eth0"}).status, 0);
      EXPECT_EQ(hosts[i].ip({"link", "set", "eth0", "up"}).status, 0);
    }
    return "";
  }
  static std::string address(int host) { return "10.77.0." + std::to_string(host + 1); }

  void start_daemon(int host, const std::string& name, std::vector<std::string> more) {
    more.insert(more.begin(), {kDaemon, "--job-key-file", key, "--name", name, "--address-file", file(name + ".json"),
                               "--silence-ms", silence, "--status", "0.0.0.0:0"});
    processes.push_back(std::make_unique<Process>(hosts[host].inside(more), file(name + ".out")));
  }
  std::unique_ptr<Process> start_trainer(int replica, const std::string& output) const {
    return std::make_unique<Process>(
        hosts[replica].inside({kTrainer}), file(output),
        std::vector<std::string>{"REJOIN_REPLICA=" + std::to_string(replica), "REJOIN_RANK=0",
                                 "REJOIN_SOCKET=" + socket(static_cast<std::uint32_t>(replica)), "REJOIN_TRANSPORT=tcp",
                                 "REJOIN_DATA_LISTEN=" + listen});
  }
  // `rejoin doctor` on the second host, whose coordinator and peer are on the first.
  void examine(const std::string& known, const std::string& peer) const {
    const auto expect = [&](int status, std::vector<std::string> more, const std::vector<std::string>& lines) {
      more.insert(more.begin(), {kCli, "doctor", "--job-key-file", key, "--transport", "tcp", "--patience-ms", "1000"});
      const Ended ended = run(hosts[1].inside(more));
      EXPECT_EQ(ended.status, status) << ended.output;
      for (const auto& line : lines)
        EXPECT_NE(ended.output.find(line), std::string::npos) << line << "\n" << ended.output;
    };
    const std::string here = address(1);
    expect(0, {"--strict", "--connect", known, "--data-listen", "0.0.0.0:7100", "--peer", peer},
           {"ok    coordinator: " + known, "told " + here + ", port 7100", "ok    peer: " + peer});
    expect(2, {"--connect", known},
           {"FAIL  advertised: 127.0.0.1: other nodes can't reach it", "-> --data-listen 0.0.0.0:0"});
    expect(2, {"--connect", known, "--data-listen", "0.0.0.0:7100", "--advertise", "127.0.0.1"},
           {"FAIL  advertised: 127.0.0.1: other nodes can't reach it", "-> --advertise " + here});
    expect(2, {"--connect", known, "--advertise", here},
           {"others are told " + here + ", and the daemon listens on 127.0.0.1 alone -> --data-listen 0.0.0.0:0"});
    expect(0, {"--connect", known, "--data-listen", "0.0.0.0:7100", "--advertise", address(0)},
           {"WARN  advertised: " + address(0) + " is no address of this machine"});
    expect(2, {"--connect", "10.77.0.9:7000", "--data-listen", "0.0.0.0:7100"},  // nobody answers, not even to refuse
           {"FAIL  coordinator: 10.77.0.9:7000: "});
  }
  nlohmann::json status_from(int host) const {
    const Ended told = run(hosts[host].inside({kCli, "status", "--json", coordinator_status}));
    const auto json = nlohmann::json::parse(told.output, nullptr, false);
    return json.is_discarded() ? nlohmann::json::object() : json.at("coordinator_role");
  }
};

// Nobody is told where he is: everybody listens everywhere, and finds out. The first node knows its coordinator as
// 127.0.0.1, where no other node would find it.
TEST(Hosts, WhoeverListensEverywhereIsFoundByTheOtherHost) {
  TwoHosts two;
  if (const auto why = two.connect(); !why.empty()) GTEST_SKIP() << why;
  two.start_daemon(0, "coordinator",
                   {"--coordinator", "--listen", "0.0.0.0:0", "--log-directory", two.file("log"), "--replicas", "2",
                    "--ranks", "1", "--batch", "8"});
  const auto told = two.addresses("coordinator");
  const std::string coordinator = told.at("coordinator");
  ASSERT_TRUE(coordinator.starts_with("10.77.0.1:")) << coordinator;
  two.coordinator_status = told.at("status");
  const std::string nearby = "127.0.0.1" + coordinator.substr(coordinator.rfind(':'));
  for (int i = 0; i < 2; ++i)
    two.start_daemon(i, "node" + std::to_string(i),
                     {"--socket", two.socket(static_cast<std::uint32_t>(i)), "--connect", i == 0 ? nearby : coordinator,
                      "--transport", "tcp", "--data-listen", "0.0.0.0:0"});
  two.addresses("node0"), two.addresses("node1");
  const auto first = two.start_trainer(0, "trainer0");
  auto second = two.start_trainer(1, "trainer1");
  const auto committed = [&] { return two.status_from(1).value("committed", 0); };
  ASSERT_TRUE(eventually([&] { return committed() > 2; }, std::chrono::seconds(30)))
      << "gradients cross the cable\n"
      << first->output() << second->output() << read_file(two.file("coordinator.out"));
  second.reset();  // killed
  ASSERT_TRUE(eventually([&] { return two.status_from(1).at("members").size() == 1; }, std::chrono::seconds(30)));
  second = two.start_trainer(1, "trainer1again");
  const auto contributes = [&] {
    const auto members = two.status_from(1).at("members");
    return members.size() == 2 && members.at(1).at("role") == "contributor";
  };
  EXPECT_TRUE(eventually(contributes, std::chrono::seconds(30)))
      << "the state crosses the cable\n"
      << second->output() << read_file(two.file("node1.out"));
  for (const char* log : {"node0.out", "node1.out"}) {
    const std::string output = read_file(two.file(log));
    const auto at = output.find("catch-up stream is at ");
    ASSERT_NE(at, std::string::npos) << output;
    EXPECT_EQ(output.substr(at + 22, 8), "10.77.0.") << output;
  }
  const auto log = read_file(two.file("node0.out"));
  const auto at = log.find("catch-up stream is at ") + 22;
  two.examine(coordinator, log.substr(at, log.find('\n', at) - at));
}

// A job over the cable, of which the second node's addresses are to change.
struct MovingHost : TwoHosts {
  std::unique_ptr<Process> trainers[2];
  std::string port;

  MovingHost() { silence = "2000"; }
  // Gives each an address that begins so.
  bool has_ipv6(const std::string& network) {
    for (int i = 0; i < 2; ++i)
      if (hosts[i].ip({"addr", "add", fmt::format("{}{}/64", network, i + 1), "dev", "eth0", "nodad"}).status != 0)
        return false;
    return true;
  }
  void start_coordinator() {
    start_daemon(0, "coordinator",
                 {"--coordinator", "--listen", "[::]:0", "--log-directory", file("log"), "--replicas", "2", "--ranks",
                  "1", "--batch", "8"});
    const auto told = addresses("coordinator");
    coordinator_status = told.at("status");
    coordinator = told.at("coordinator");
    port = coordinator.substr(coordinator.rfind(':'));
  }
  void start_node(int i, const std::string& connect) {
    start_daemon(i, "node" + std::to_string(i),
                 {"--socket", socket(static_cast<std::uint32_t>(i)), "--connect", connect, "--transport", "tcp",
                  "--data-listen", listen});
    addresses("node" + std::to_string(i));
  }
  void restart(int i) {
    trainers[i].reset();  // killed
    trainers[i] = start_trainer(i, "trainer" + std::to_string(i));
  }
  bool both_contribute() const {
    const auto status = status_from(0);
    const auto members = status.value("members", nlohmann::json::array());
    return members.size() == 2 && members.at(0).at("role") == "contributor" &&
           members.at(1).at("role") == "contributor";
  }
  bool is_alone(int i) const {
    const auto members = status_from(0).value("members", nlohmann::json::array());
    return members.size() == 1 && members.at(0).at("replica") == i;
  }
  std::string told() const { return read_file(file("node1.out")) + read_file(file("coordinator.out")); }
  // Of the two the one that comes later calls.
  void expect_that_the_first_replica_comes_back() {
    trainers[0].reset();
    ASSERT_TRUE(eventually([&] { return is_alone(1); }, std::chrono::seconds(30))) << told();
    restart(0);
    EXPECT_TRUE(eventually([&] { return both_contribute(); }, std::chrono::seconds(30)))
        << told() << read_file(file("trainer0"));
  }
};

TEST(Hosts, ADaemonThatStartsBeforeItsNetworkIsThereTellsTheAddressThatItGets) {
  MovingHost two;
  if (const auto why = two.connect(); !why.empty()) GTEST_SKIP() << why;
  two.start_coordinator();
  two.hosts[1].ip({"addr", "flush", "dev", "eth0"});
  two.hosts[1].ip({"link", "set", "eth0", "down"});
  const std::string coordinator = two.address(0) + two.port;
  two.start_node(1, coordinator);
  two.hosts[1].ip({"link", "set", "eth0", "up"});
  two.hosts[1].ip({"addr", "add", two.address(1) + "/24", "dev", "eth0"});
  two.start_node(0, coordinator);
  for (int i = 0; i < 2; ++i) two.restart(i);
  ASSERT_TRUE(eventually([&] { return two.both_contribute(); }, std::chrono::seconds(30))) << two.told();
  EXPECT_NE(two.told().find("catch-up stream is at 10.77.0.2:"), std::string::npos) << two.told();
  two.expect_that_the_first_replica_comes_back();
}

TEST(Hosts, AnAddressThatChangesIsToldToWhoComesLater) {
  MovingHost two;
  if (const auto why = two.connect(); !why.empty()) GTEST_SKIP() << why;
  two.start_coordinator();
  for (int i = 0; i < 2; ++i) two.start_node(i, two.address(0) + two.port);
  for (int i = 0; i < 2; ++i) two.restart(i);
  ASSERT_TRUE(eventually([&] { return two.both_contribute(); }, std::chrono::seconds(30))) << two.told();
  two.hosts[1].ip({"addr", "del", two.address(1) + "/24", "dev", "eth0"});
  two.hosts[1].ip({"addr", "add", "10.77.0.22/24", "dev", "eth0"});
  ASSERT_TRUE(eventually(
      [&] {
        return two.told().find(
                   "address has changed: other nodes are told that this one's catch-up stream is at "
                   "10.77.0.22:") != std::string::npos;
      },
      std::chrono::seconds(30)))
      << two.told();
  two.restart(1);
  ASSERT_TRUE(eventually([&] { return two.both_contribute(); }, std::chrono::seconds(30))) << two.told();
  two.expect_that_the_first_replica_comes_back();
}

// The coordinator is known by an IPv6 address, and data goes over IPv4.
TEST(Hosts, WhoListensOverIpv4AloneIsToldByAnIpv4Address) {
  MovingHost two;
  if (const auto why = two.connect(); !why.empty()) GTEST_SKIP() << why;
  if (!two.has_ipv6("fd00:77::")) GTEST_SKIP() << "no IPv6 here";
  two.start_coordinator();
  for (int i = 0; i < 2; ++i) two.start_node(i, "[fd00:77::1]" + two.port);
  for (int i = 0; i < 2; ++i) two.restart(i);
  ASSERT_TRUE(eventually([&] { return two.both_contribute(); }, std::chrono::seconds(30))) << two.told();
  EXPECT_NE(two.told().find("catch-up stream is at 10.77.0.2:"), std::string::npos) << two.told();
}

TEST(Hosts, WhoListensOverIpv4AloneAndHasNoSuchAddressIsRefused) {
  MovingHost two;
  if (const auto why = two.connect(); !why.empty()) GTEST_SKIP() << why;
  two.hosts[1].ip({"addr", "flush", "dev", "eth0"});
  if (!two.has_ipv6("fd00:77::")) GTEST_SKIP() << "no IPv6 here";
  two.start_coordinator();
  two.start_node(1, "[fd00:77::1]" + two.port);
  two.restart(1);
  EXPECT_TRUE(eventually(
      [&] {
        return read_file(two.file("trainer1")).find("over IPv4 alone, and node node1 has no IPv4 address") !=
               std::string::npos;
      },
      std::chrono::seconds(30)))
      << two.told() << read_file(two.file("trainer1"));
  const Ended doctor = run(two.hosts[1].inside({kCli, "doctor", "--job-key-file", two.key, "--transport", "tcp",
                                                "--connect", "[fd00:77::1]" + two.port, "--data-listen", "0.0.0.0:0"}));
  EXPECT_EQ(doctor.status, 2);
  EXPECT_NE(doctor.output.find("FAIL  advertised: the daemon listens on 0.0.0.0, over IPv4 alone"), std::string::npos)
      << doctor.output;
}

// The first node's connection with its coordinator does not leave the host.
TEST(Hosts, OnHostsWithIpv6AloneWhoListensOverBothIsToldByThat) {
  MovingHost two;
  if (const auto why = two.connect(); !why.empty()) GTEST_SKIP() << why;
  for (const auto& host : two.hosts) host.ip({"addr", "flush", "dev", "eth0"});
  if (!two.has_ipv6("fd00:77::")) GTEST_SKIP() << "no IPv6 here";
  two.listen = "[::]:0";
  two.start_coordinator();
  for (int i = 0; i < 2; ++i) two.start_node(i, (i == 0 ? "[::1]" : "[fd00:77::1]") + two.port);
  for (int i = 0; i < 2; ++i) two.restart(i);
  EXPECT_TRUE(eventually([&] { return two.both_contribute(); }, std::chrono::seconds(30)))
      << two.told() << read_file(two.file("node0.out"));
}

// Its interface is a part of such an address, and no other node is told one.
TEST(Hosts, ACoordinatorAtALinkLocalAddressIsNoReasonToTellOne) {
  MovingHost two;
  if (const auto why = two.connect(); !why.empty()) GTEST_SKIP() << why;
  if (!two.has_ipv6("fe80::77:")) GTEST_SKIP() << "no IPv6 here";
  two.start_coordinator();
  const std::string coordinator = "[fe80::77:1%eth0]" + two.port;
  two.start_node(1, coordinator);
  EXPECT_TRUE(eventually([&] { return two.told().find("catch-up stream is at 10.77.0.2:") != std::string::npos; },
                         std::chrono::seconds(30)))
      << two.told();
  const Ended doctor = run(two.hosts[1].inside({kCli, "doctor", "--job-key-file", two.key, "--transport", "tcp",
                                                "--connect", coordinator, "--data-listen", "0.0.0.0:7100"}));
  EXPECT_NE(doctor.output.find("ok    coordinator: " + coordinator), std::string::npos) << doctor.output;
  EXPECT_NE(doctor.output.find("told 10.77.0.2, port 7100"), std::string::npos) << doctor.output;
}

// `rejoin doctor --pairs` on both of two hosts.
struct PairOfDoctors : testing::Test {
  TwoHosts two;

  void SetUp() override {
    if (const auto why = two.connect(); !why.empty()) GTEST_SKIP() << why;
  }
  std::array<Ended, 2> run_both() const {
    const Scratch scratch;
    std::array<std::unique_ptr<Process>, 2> doctors;
    std::array<Ended, 2> ended;
    for (int i = 0; i < 2; ++i)
      doctors[i] = std::make_unique<Process>(
          two.hosts[i].inside({kCli, "doctor", "--job-key-file", two.key, "--transport", "tcp", "--patience-ms", "1000",
                               "--pairs", two.address(0) + ":7100," + two.address(1) + ":7100"}),
          scratch.path + "/doctor" + std::to_string(i));
    for (int i = 0; i < 2; ++i) {
      ended[i].status = doctors[i]->wait(std::chrono::seconds(60));
      ended[i].output = doctors[i]->output();
    }
    return ended;
  }
  static void expect(const Ended& ended, int status, const std::string& line) {
    EXPECT_EQ(ended.status, status) << ended.output;
    EXPECT_NE(ended.output.find(line), std::string::npos) << line << "\n" << ended.output;
  }
};

// Calls to the first host's port are dropped on their way in; what comes back on its own calls passes.
TEST_F(PairOfDoctors, TellWhichWayAFirewallLetsPass) {
  auto both = run_both();
  expect(both[0], 0, "ok    pair: 10.77.0.2:7100: 64 B there and back in ");
  expect(both[1], 0, "ok    pair: 10.77.0.1:7100: 64 B there and back in ");
  const auto rule = [&](std::vector<std::string> words) {
    words.insert(words.begin(), "rule");
    const auto done = two.hosts[0].ip(std::move(words));
    ASSERT_EQ(done.status, 0) << done.output;
  };
  rule({"add", "pref", "10", "iif", "eth0", "ipproto", "tcp", "dport", "7100", "blackhole"});
  rule({"add", "pref", "100", "lookup", "local"});  // behind that one
  rule({"del", "pref", "0"});
  both = run_both();
  expect(both[0], 2,
         "FAIL  pair: 10.77.0.2:7100: it is reached from here, and does not reach this node at 10.77.0.1:7100: no "
         "answer in 1000 ms -> let this node's firewall pass port 7100");
  expect(both[1], 2,
         "FAIL  pair: 10.77.0.1:7100: it reaches this node, and is not reached from here: no answer in 1000 ms -> let "
         "its firewall pass port 7100");
}

// The second host's interface drops what is longer than its MTU, and it has told the first to send longer ones.
TEST_F(PairOfDoctors, FindAPathThatDropsLongPackets) {
  const auto ip = [&](int host, std::vector<std::string> words) {
    const auto done = two.hosts[host].ip(std::move(words));
    ASSERT_EQ(done.status, 0) << done.output;
  };
  ip(0, {"link", "set", "eth0", "gso_max_segs", "1"});
  ip(1, {"link", "set", "eth0", "mtu", "1000"});
  ip(1, {"route", "replace", "10.77.0.0/24", "dev", "eth0", "src", "10.77.0.2", "advmss", "1460"});
  const auto both = run_both();
  expect(both[0], 2, "FAIL  pair: 10.77.0.2:7100: 64 B ok, 1 MiB: no answer in 1000 ms -> MTU or PFC on the path");
  expect(both[0], 2, "WARN  pair: 10.77.0.2:7100: packets of 1500 bytes here (tcp), and of 1000 there (tcp)");
  expect(both[1], 2, "FAIL  pair: 10.77.0.1:7100: 64 B ok, 1 MiB arrives, and does not come back: no answer");
}

// Addresses that this machine's processes have connected to with TCP, as the kernel writes them.
bool connected_to(const std::string& reversed_hex) {
  std::ifstream table("/proc/net/tcp");
  for (std::string line, place, local, remote, state; std::getline(table, line);) {
    std::istringstream(line) >> place >> local >> remote >> state;
    if (remote.starts_with(reversed_hex + ":") && state == "01") return true;
  }
  return false;
}

// Of each pair of ranks one connects, so of three two are connected to at least, the one in the middle in any case.
TEST(Hosts, WhatIsAdvertisedIsWhereOthersConnectTo) {
  Daemons job;
  const auto coordinator =
      job.start_coordinator({"--replicas", "3", "--ranks", "1", "--listen", "0.0.0.0:0", "--advertise", "127.77.0.9"});
  EXPECT_TRUE(job.coordinator.starts_with("127.77.0.9:")) << job.coordinator;
  std::vector<std::unique_ptr<Process>> processes;
  for (std::uint32_t replica = 0; replica < 3; ++replica) {
    std::vector<std::string> node{"--connect", job.coordinator, "--transport", "tcp"};
    std::vector<std::string> trainer{"REJOIN_REPLICA=" + std::to_string(replica), "REJOIN_RANK=0",
                                     "REJOIN_SOCKET=" + job.socket(replica), "REJOIN_TRANSPORT=tcp",
                                     "REJOIN_DATA_LISTEN=0.0.0.0:0"};
    if (replica == 1) node.insert(node.end(), {"--data-listen", "0.0.0.0:0", "--advertise", "127.77.0.1"});
    else trainer.push_back("REJOIN_ADVERTISE=127.77.0." + std::to_string(replica == 0 ? 10 : 12));
    processes.push_back(job.start_node(replica, node));
    processes.push_back(
        std::make_unique<Process>(std::vector{kTrainer}, job.file("trainer" + std::to_string(replica)), trainer));
  }
  EXPECT_TRUE(eventually([&] { return job.status().value("committed", 0) > 2; })) << job.status().dump();
  EXPECT_TRUE(connected_to("01004D7F")) << "the trainer that its daemon's --advertise is for";
  EXPECT_TRUE(connected_to("0A004D7F") || connected_to("0C004D7F")) << "one that has its own";
}

TEST(Hosts, AsManyHostsAsRailsCanBeAdvertised) {
  Daemons job;
  const Ended daemon = run({kDaemon, "--job-key-file", job.key, "--socket", job.socket(0), "--connect", "127.0.0.1:1",
                            "--transport", "tcp:127.0.0.1,127.0.0.2", "--advertise", "a,b,c"});
  EXPECT_EQ(daemon.status, 1);
  EXPECT_NE(daemon.output.find("--advertise 'a,b,c' names 3 hosts, and there are 2 rails"), std::string::npos)
      << daemon.output;
}

}  // namespace
}  // namespace rejoin::test
