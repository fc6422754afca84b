// Rings of nodes in two rooms, where these say so, and where nobody does.
#include <iostream>

#include "tests/cable.h"
#include "tests/hosts.h"

namespace rejoin::test {
namespace {

// Four hosts in two rooms, numbered alternately: 10.77.0.1 to .4. A room is a bridge, and what lies between them is
// slow; and where there is a delay, far.
struct TwoRooms : Daemons {
  static constexpr std::uint32_t kHosts = 4;
  Host rooms = Host(scratch);
  Host hosts[kHosts] = {Host(scratch), Host(scratch), Host(scratch), Host(scratch)};

  std::optional<Cable> far;

  // Empty, or why there is no such network here.
  std::string connect(std::chrono::microseconds delay = {}) {
    std::string why;
    const auto done = [&](const Ended& ended) {
      if (ended.status != 0 && why.empty()) why = ended.output;
    };
    if (!rooms.there()) return "network namespaces can't be had (they need root)";
    if (delay.count() == 0) {
      done(rooms.ip({"link", "add", "name", "cable0", "type", "veth", "peer", "name", "cable1"}));
    } else {
      far.emplace(rooms.network(), delay);
      if (auto none = far->why(); !none.empty()) return "no cable with a delay: " + none;
    }
    for (const std::string room : {"0", "1"}) {
      done(rooms.ip({"link", "add", "name", "room" + room, "type", "bridge"}));
      done(rooms.ip({"link", "set", "room" + room, "up"}));
      done(rooms.ip({"link", "set", "cable" + room, "master", "room" + room, "up"}));
      done(run(rooms.inside({"/usr/sbin/tc", "qdisc", "add", "dev", "cable" + room, "root", "tbf", "rate", "200mbit",
                             "burst", "64k", "latency", "100ms"})));
    }
    for (std::uint32_t host = 0; host < kHosts; ++host) {
      const std::string port = "port" + std::to_string(host);
      done(hosts[host].ip(
          {"link", "add", "dev", "eth0", "type", "veth", "peer", "name", port, "netns", std::to_string(rooms.pid())}));
      done(rooms.ip({"link", "set", port, "master", "room" + std::to_string(host % 2), "up"}));
      done(hosts[host].ip({"link", "set", "lo", "up"}));
      done(hosts[host].ip({"addr", "add", "10.77.0." + std::to_string(host + 1) + "/24", "dev", "eth0"}));
      done(hosts[host].ip({"link", "set", "eth0", "up"}));
    }
    return why;
  }
  // Between the rooms, both ways.
  double bytes() const {
    double all = 0;
    for (const char* cable : {"cable0", "cable1"}) {
      const Ended told = rooms.ip({"-s", "-j", "link", "show", "dev", cable});
      all += nlohmann::json::parse(told.output).at(0).at("stats64").at("tx").at("bytes").get<double>();
    }
    return all;
  }
  nlohmann::json status() const {
    const Ended told = run(hosts[0].inside({kCli, "status", "--json", coordinator_status}));
    const auto json = nlohmann::json::parse(told.output, nullptr, false);
    return json.is_discarded() ? nlohmann::json::object() : json.at("coordinator_role");
  }
  struct Measured {
    double bytes = 0, seconds = 0;  // of a step
    std::string order;              // of the members
    std::string status;             // for people
  };
  Measured run_job(const std::string& name, bool located, const std::string& round_trips = "auto") {
    std::vector<std::unique_ptr<Process>> processes;
    const auto start = [&](std::uint32_t host, const std::string& who, std::vector<std::string> more) {
      more.insert(more.begin(), {kDaemon, "--job-key-file", key, "--name", who, "--address-file", file(who + ".json"),
                                 "--silence-ms", "5000", "--status", "0.0.0.0:0"});
      processes.push_back(std::make_unique<Process>(hosts[host].inside(more), file(who + ".out")));
    };
    constexpr auto patience = std::chrono::seconds(60);
    start(0, name,
          {"--coordinator", "--listen", "0.0.0.0:0", "--log-directory", file(name + ".log"), "--replicas", "4",
           "--ranks", "1", "--batch", "4", "--round-trips", round_trips});
    EXPECT_TRUE(eventually([&] { return std::filesystem::exists(file(name + ".json")); }, patience));
    const auto told = addresses(name);
    coordinator_status = told.at("status");
    for (std::uint32_t host = 0; host < kHosts; ++host) {
      const std::string node = name + std::to_string(host);
      std::vector<std::string> more{"--socket",    file(node), "--connect",     told.at("coordinator"),
                                    "--transport", "tcp",      "--data-listen", "0.0.0.0:0"};
      if (located) more.insert(more.end(), {"--location", "dc/room" + std::to_string(host % 2) + "/" + node});
      start(host, node, more);
      processes.push_back(std::make_unique<Process>(
          hosts[host].inside({binaries() + "/rejoin-demo-trainer", "--data", REJOIN_DATA, "--socket", file(node),
                              "--replica", std::to_string(host), "--transport", "tcp", "--data-listen", "0.0.0.0:0"}),
          file(node + ".trainer")));
    }
    const auto wait_for = [&](int step) {
      nlohmann::json last;
      const auto committed = [&] { return (last = status()).value("committed", 0); };
      EXPECT_TRUE(eventually([&] { return committed() >= step; }, patience))
          << read_file(file(name + ".out")) << processes.back()->output();
      return last;
    };
    const auto before = wait_for(3);
    const double bytes_before = bytes();
    const auto begun = std::chrono::steady_clock::now();
    const auto after = wait_for(before.value("committed", 0) + 12);
    const double steps = after.value("committed", 0) - before.value("committed", 0);
    Measured measured{.bytes = (bytes() - bytes_before) / steps};
    measured.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count() / steps;
    for (const auto& member : after.at("members")) measured.order += std::to_string(member.at("replica").get<int>());
    measured.status = run(hosts[0].inside({kCli, "status", coordinator_status})).output;
    return measured;
  }
};

// A ring of two rooms enters each once, wherever its members' numbers are; by their numbers each hop leads to the
// other.
TEST(Hosts, RingsCrossWhatLiesBetweenRoomsAsRarelyAsTheyCanWhereNodesSayWhereTheyAre) {
  TwoRooms two;
  if (const auto why = two.connect(); !why.empty()) GTEST_SKIP() << why;
  const auto by_number = two.run_job("by-number", false), by_room = two.run_job("by-room", true);
  EXPECT_EQ(by_number.order, "0123");
  EXPECT_EQ(by_room.order, "0213");
  EXPECT_EQ(by_number.status.find("location"), std::string::npos) << by_number.status;
  EXPECT_NE(by_room.status.find(" dc/room1/by-room3\n"), std::string::npos) << by_room.status;
  std::cout << by_number.bytes * 1e-6 << " MB between the rooms and " << by_number.seconds << " s a step; "
            << by_room.bytes * 1e-6 << " MB and " << by_room.seconds << " s where nodes have --location\n";
  EXPECT_LT(by_room.bytes, 0.7 * by_number.bytes);
  EXPECT_GT(by_room.bytes, 0.35 * by_number.bytes);
}

// Nobody says where anybody is, but what comes from the other room takes 2 ms there and back.
TEST(Hosts, RingsCrossWhatLiesBetweenRoomsAsRarelyAsTheyCanWhereRoundTripsTellThatTheyAreFar) {
  TwoRooms two;
  if (const auto why = two.connect(std::chrono::milliseconds(1)); !why.empty()) GTEST_SKIP() << why;
  const auto measured = two.run_job("measured", false);
  EXPECT_EQ(measured.order, "0213") << measured.status;
  EXPECT_NE(measured.status.find("near each other, by round trips: 0 2 | 1 3"), std::string::npos) << measured.status;
  std::cout << measured.bytes * 1e-6 << " MB between the rooms and " << measured.seconds << " s a step\n";
  EXPECT_LT(measured.bytes, 5e6) << "each of the four hops between rooms that there are by number has 1.8 MB";
  EXPECT_GT(measured.bytes, 2.5e6);
  const auto off = two.run_job("off", false, "off");
  EXPECT_EQ(off.order, "0123") << off.status;
  EXPECT_NE(off.status.find("near each other, by round trips, which no order follows: 0 2 | 1 3"), std::string::npos)
      << off.status;
}

}  // namespace
}  // namespace rejoin::test
