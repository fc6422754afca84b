// The demo with several coordinators that share an etcd: the one that leads, and etcd's own leader, killed and stopped.
#include "daemon/tests/etcd_process.h"
#include "tests/daemons.h"
#include "tests/demo_support.h"

namespace rejoin::test {
namespace {

// A step, generously, since others may use this machine; where etcd elects another leader.
constexpr double kLongestMs = 1000, kLongestOfEtcdMs = 5000;

bool has_etcd() { return ::access("/usr/bin/etcd", X_OK) == 0 || ::access("/usr/local/bin/etcd", X_OK) == 0; }
constexpr const char* kNoEtcd = "it needs the package etcd-server";

nlohmann::json demo_over_etcd(std::vector<std::string> more) {
  more.insert(more.end(), {"--store", "etcd"});
  return demo(std::move(more));
}

void expect_the_lead_goes_on(const nlohmann::json& report, std::uint64_t steps, const std::string& deed,
                             double longest_ms) {
  expect_sound(report, steps, {deed});
  expect_nobody_out(report);
  ASSERT_EQ(report.at("copies").size(), 3u);
  for (const auto& [name, copy] : report.at("copies").items()) {
    EXPECT_EQ(copy.at("last_step"), steps) << name;
    EXPECT_EQ(copy.at("lost"), 0) << name;
    EXPECT_EQ(copy.at("repeated"), 0) << name;
  }
  const auto& failure = report.at("failures").front();
  EXPECT_TRUE(failure.at("put_out").empty()) << failure.dump();
  EXPECT_GT(failure.at("met_step_ms").get<double>(), 0) << failure.dump();
  EXPECT_LT(failure.at("met_step_ms").get<double>(), longest_ms) << failure.dump();
}

TEST(Demo, ALeaderThatIsKilledCostsNobodyAPlace) {
  if (!has_etcd()) GTEST_SKIP() << kNoEtcd;
  const auto report = demo_over_etcd({"--steps", "50", "--kill-leader", "20"});
  expect_the_lead_goes_on(report, 50, "kill_leader", kLongestMs);
  // On a machine that others use the lead may have changed before.
  const auto& next = report.at("failures").front().at("next_leader");
  bool led = false;
  for (const auto& lead : report.at("leads"))
    led |= lead.at("term") == next.at("term") && lead.at("who") == next.at("who");
  EXPECT_TRUE(led) << next.dump() << " is not in the log: " << report.at("leads").dump();
}

TEST(Demo, ALeaderThatIsStoppedDecidesNothingWhenItGoesOn) {
  if (!has_etcd()) GTEST_SKIP() << kNoEtcd;
  const auto report =
      demo_over_etcd({"--steps", "90", "--pause-leader", "20", "--pause-ms", "3000", "--silence-ms", "1000"});
  expect_the_lead_goes_on(report, 90, "pause_leader", kLongestMs);
  const auto& failure = report.at("failures").front();
  EXPECT_EQ(failure.at("decided_late"), 0) << failure.dump();
  EXPECT_TRUE(failure.at("follows").get<bool>()) << failure.dump();
}

TEST(Demo, EtcdsLeaderIsKilledAndNobodyIsPutOut) {
  if (!has_etcd()) GTEST_SKIP() << kNoEtcd;
  expect_the_lead_goes_on(demo_over_etcd({"--steps", "50", "--kill-etcd", "20", "--pause-ms", "1500"}), 50, "kill_etcd",
                          kLongestOfEtcdMs);
}

TEST(Demo, WithoutAnEtcdItNamesThePackageThatHasIt) {
  const Ended ended =
      run({binaries() + "/rejoin-demo", "--data", REJOIN_DATA, "--store", "etcd"}, {"PATH=/nonexistent"});
  EXPECT_EQ(ended.status, 2) << ended.output;
  EXPECT_NE(ended.output.find("etcd-server"), std::string::npos) << ended.output;
}

// A supervisor need not start it again and again: see RestartPreventExitStatus in deploy/systemd.
TEST(Coordinator, ACoordinatorWhoseSettingsDoNotFitTheStoresLogEndsAsForAWrongFlag) {
  if (!has_etcd()) GTEST_SKIP() << kNoEtcd;
  EtcdCluster etcd({.members = 1, .flags = {}});
  Daemons job;
  job.of_all = {"--flight-dir", "off"};
  const std::vector<std::string> store{
      "--store", "etcd:" + etcd.endpoint(0), "--job", "train", "--replicas", "1", "--ranks", "1"};
  const auto with_batch = [&](const std::string& batch) {
    auto all = store;
    all.insert(all.end(), {"--batch", batch});
    return all;
  };
  const auto coordinator = job.start_coordinator(with_batch("4"));
  const auto node = job.start_node(0, {"--connect", job.coordinator});
  const Process trainer({binaries() + "/rejoin-demo-trainer", "--replica", "0", "--rank", "0", "--socket",
                         job.socket(0), "--data", REJOIN_DATA, "--params", "50000", "--flight-dir", "off"},
                        job.file("trainer.out"));
  ASSERT_TRUE(eventually([&] { return job.status().value("committed", 0) > 0; })) << trainer.output();
  auto other = with_batch("16");
  other.insert(other.end(), {"--coordinator", "--log-directory", job.file("other"), "--listen", "127.0.0.1:0"});
  const auto second = job.daemon("c1", other);
  EXPECT_EQ(second->wait(std::chrono::seconds(20)), 2) << second->output();
  EXPECT_NE(second->output().find("Start with those settings"), std::string::npos) << second->output();
}

}  // namespace
}  // namespace rejoin::test
