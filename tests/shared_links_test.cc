// Links of a ring as they are shaped: one that is far slower than the others, and one that a catch-up shares.
#include <fstream>
#include <iostream>
#include <numeric>

#include "tests/hosts.h"

namespace rejoin::test {
namespace {

constexpr auto kPatience = std::chrono::seconds(60);

// Hosts at one switch: 10.77.0.1 and so on, with a replica on each.
struct Switched : Daemons {
  Host middle = Host(scratch);
  std::vector<std::unique_ptr<Host>> hosts;
  std::vector<std::unique_ptr<Process>> daemons;
  std::map<std::uint32_t, std::unique_ptr<Process>> trainers;
  std::string parameters = "300000", events = file("events");
  std::vector<std::string> of_nodes;

  // Empty, or why there is no such network here. `rate`: of what each host sends, as tc takes it.
  std::string connect(std::uint32_t count, const std::string& rate) {
    if (!middle.there()) return "network namespaces can't be had (they need root)";
    std::string why;
    const auto done = [&](const Ended& ended) {
      if (ended.status != 0 && why.empty()) why = ended.output;
    };
    done(middle.ip({"link", "add", "name", "switch", "type", "bridge"}));
    done(middle.ip({"link", "set", "switch", "up"}));
    for (std::uint32_t i = 0; i < count; ++i) {
      const Host& host = *hosts.emplace_back(std::make_unique<Host>(scratch));
      const std::string port = "port" + std::to_string(i);
      done(host.ip(
          {"link", "add", "dev", "eth0", "type", "veth", "peer", "name", port, "netns", std::to_string(middle.pid())}));
      done(middle.ip({"link", "set", port, "master", "switch", "up"}));
      done(host.ip({"link", "set", "lo", "up"}));
      done(host.ip({"addr", "add", "10.77.0." + std::to_string(i + 1) + "/24", "dev", "eth0"}));
      done(host.ip({"link", "set", "eth0", "up"}));
      done(shape(i, rate));
    }
    return why;
  }
  Ended shape(std::uint32_t host, const std::string& rate) const {
    return run(hosts[host]->inside({"/usr/sbin/tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate,
                                    "burst", "64k", "latency", "100ms"}));
  }
  void start_daemon(std::uint32_t host, const std::string& name, std::vector<std::string> more) {
    more.insert(more.begin(), {kDaemon, "--job-key-file", key, "--name", name, "--address-file", file(name + ".json"),
                               "--silence-ms", silence_ms, "--status", "0.0.0.0:0"});
    daemons.push_back(std::make_unique<Process>(hosts[host]->inside(more), file(name + ".out")));
  }
  void start_job(const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments{"--coordinator",
                                       "--listen",
                                       "0.0.0.0:0",
                                       "--log-directory",
                                       file("log"),
                                       "--replicas",
                                       std::to_string(hosts.size()),
                                       "--ranks",
                                       "1",
                                       "--batch",
                                       "1",
                                       "--events",
                                       events,
                                       "--audit",
                                       "off"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    start_daemon(0, "coordinator", arguments);
    const auto told = addresses("coordinator");
    coordinator = told.at("coordinator"), coordinator_status = told.at("status");
    for (std::uint32_t i = 0; i < hosts.size(); ++i) {
      std::vector<std::string> node{"--socket",    socket(i), "--connect",     coordinator,
                                    "--transport", "tcp",     "--data-listen", "0.0.0.0:0"};
      node.insert(node.end(), of_nodes.begin(), of_nodes.end());
      start_daemon(i, "node" + std::to_string(i), node);
      start_trainer(i);
    }
  }
  void start_trainer(std::uint32_t replica) {
    trainers[replica] = std::make_unique<Process>(
        hosts[replica]->inside({binaries() + "/rejoin-demo-trainer", "--data", REJOIN_DATA, "--socket", socket(replica),
                                "--replica", std::to_string(replica), "--transport", "tcp", "--data-listen",
                                "0.0.0.0:0", "--params", parameters}),
        file("trainer" + std::to_string(replica)));
  }
  std::string told(bool json) const {
    std::vector<std::string> command{kCli, "status", coordinator_status};
    if (json) command.emplace_back("--json");
    return run(hosts[0]->inside(command)).output;
  }
  nlohmann::json status() const {
    const auto json = nlohmann::json::parse(told(true), nullptr, false);
    return json.is_discarded() ? nlohmann::json::object() : json.at("coordinator_role");
  }
  bool all_contribute() const {
    const auto members = status().value("members", nlohmann::json::array());
    return members.size() == hosts.size() &&
           std::ranges::all_of(members, [](const auto& m) { return m.at("role") == "contributor"; });
  }
  std::string outputs() const {
    std::string all = read_file(file("coordinator.out"));
    for (const auto& [replica, trainer] : trainers) all += trainer->output();
    return all;
  }
};

// One host sends at a tenth of what the others do.
TEST(Hosts, ASlowLinkOfTheRingIsNamedFromWhomToWhom) {
  Switched four;
  four.silence_ms = "500";
  four.parameters = "1000000";  // chunks that are larger than the burst that a shaped link lets pass
  if (const auto why = four.connect(4, "200mbit"); !why.empty()) GTEST_SKIP() << why;
  ASSERT_EQ(four.shape(1, "20mbit").status, 0);
  four.start_job();
  nlohmann::json named;
  const auto link = [&] {
    named = nullptr;
    const auto job = four.status();
    for (const auto& one : job.value("stragglers", nlohmann::json::array()))
      if (one.at("what") == "link") named = one;
    return !named.is_null();
  };
  ASSERT_TRUE(eventually(link, kPatience)) << four.outputs();
  std::cout << named.dump() << "\n";
  // What is sent to it is slow as well, since acknowledgements stand behind what it sends.
  EXPECT_TRUE(named.at("from") == 1 || named.at("replica") == 1);
  EXPECT_GE(named.at("times"), 2.0);
  EXPECT_LE(named.at("below_mb_per_second"), 4) << "2.5 MB/s";
  EXPECT_LE(named.at("usual_below_mb_per_second"), 64) << "25 MB/s";
  const std::string line = four.told(false);
  EXPECT_NE(line.find("SLOW link from replica "), std::string::npos) << line;
}

// Seconds of a step, as the coordinator's events tell: while all of these contributed, and while the last one caught
// up; the median of each.
struct StepTimes {
  std::vector<double> alone, beside;

  explicit StepTimes(const std::string& events) {
    bool catches_up = false;
    std::optional<double> before;
    for (const auto& entry : std::filesystem::directory_iterator(events)) {
      std::ifstream file(entry.path());
      for (std::string line; std::getline(file, line);) {
        const auto event = nlohmann::json::parse(line);
        if (event.at("kind") == "epoch") {
          const std::string members = event.at("members");
          catches_up = members.find('c') != std::string::npos;
          before = event.at("t").get<double>() * 1e-9;
        } else if (event.at("kind") == "commit") {
          const double at = event.at("t").get<double>() * 1e-9;
          if (before) (catches_up ? beside : alone).push_back(at - *before);
          before = at;
        }
      }
    }
  }
  static double median(std::vector<double> times) {
    if (times.empty()) return 0;
    std::ranges::nth_element(times, times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2));
    return times[times.size() / 2];
  }
};

// A replica catches up over the links that the others' ring fills, a few times; or where it is not to get there, it
// tries to for so many steps.
std::optional<StepTimes> beside_catch_up(const std::vector<std::string>& of_nodes, int times, std::optional<int> steps,
                                         std::string& why) {
  Switched three;
  three.silence_ms = "5000";
  three.parameters = "2000000";
  three.of_nodes = of_nodes;
  why = three.connect(3, "200mbit");
  if (!why.empty()) return std::nullopt;
  three.start_job();
  const auto committed = [&] { return three.status().value("committed", 0); };
  EXPECT_TRUE(eventually([&] { return committed() >= 8; }, kPatience)) << three.outputs();
  for (int i = 0; i < times; ++i) {
    three.trainers.erase(2);
    EXPECT_TRUE(eventually([&] { return three.status().at("members").size() == 2; }, kPatience)) << three.outputs();
    const int began = committed();
    three.start_trainer(2);
    EXPECT_TRUE(eventually([&] { return steps ? committed() > began + *steps : three.all_contribute(); }, kPatience))
        << three.outputs();
  }
  return StepTimes(three.events);
}

TEST(Hosts, ACatchUpBesideARingOverTheSameLinks) {
  std::string why;
  // So little that it takes nothing of the links: a joiner that is in the ring, and no more.
  const auto held = beside_catch_up({"--stream-limit", "0.2"}, 1, 12, why);
  if (!why.empty()) GTEST_SKIP() << why;
  const auto free = beside_catch_up({}, 2, std::nullopt, why);
  ASSERT_FALSE(held->beside.empty() || free->beside.empty());
  std::cout << "a step beside a joiner whose stream is held back takes " << StepTimes::median(held->beside)
            << " s; beside catch-ups:";
  for (auto time : free->beside) std::cout << ' ' << time;
  std::cout << " s\n";
}

}  // namespace
}  // namespace rejoin::test
