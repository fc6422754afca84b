// Replicas that differ, with the real programs: whoever computes something else is found and put out, bits that flip on
// their way cost a repeated step, and where nobody can tell who is right the job stops until an operator has said so.
#include <gtest/gtest.h>

#include <set>
#include <sstream>

#include "tests/daemons.h"

namespace rejoin::test {
namespace {

const std::string kTrainer = binaries() + "/rejoin-demo-trainer";

struct Job : Daemons {
  const std::uint32_t replicas;
  const std::string steps;
  std::unique_ptr<Process> coordinator_process;
  std::vector<std::unique_ptr<Process>> nodes, trainers;
  int started = 0;

  Job(std::uint32_t of, std::string until) : replicas(of), steps(std::move(until)), trainers(of) {
    silence_ms = "2000";
    restart_coordinator("127.0.0.1:0", {});
    for (std::uint32_t r = 0; r < replicas; ++r) nodes.push_back(start_node(r, {"--connect", coordinator}));
  }
  void restart_coordinator(const std::string& listen, std::vector<std::string> more) {
    more.insert(more.begin(), {"--listen", listen, "--replicas", std::to_string(replicas), "--ranks", "1", "--batch",
                               "4", "--steps", steps, "--audit", "8"});
    coordinator_process.reset();
    coordinator_process = start_coordinator(std::move(more));
  }
  Process& train(std::uint32_t replica, std::vector<std::string> more = {}, const std::string& params = "60000") {
    std::vector<std::string> arguments{kTrainer,    "--replica",     std::to_string(replica),
                                       "--socket",  socket(replica), "--data",
                                       REJOIN_DATA, "--params",      params,
                                       "--events",  file("ev")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    trainers[replica] = std::make_unique<Process>(arguments, file("trainer" + std::to_string(++started)));
    return *trainers[replica];
  }
  std::string log() const { return read_file(file("coordinator.out")); }
  // The state's digests that trainers told at the end.
  std::set<std::string> last_digests() const {
    std::set<std::string> digests;
    for (const auto& entry : std::filesystem::directory_iterator(file("ev"))) {
      std::istringstream lines(read_file(entry.path()));
      for (std::string line; std::getline(lines, line);) {
        const auto event = nlohmann::json::parse(line, nullptr, false);
        if (!event.is_discarded() && event.at("kind") == "digest" &&
            std::to_string(event.at("version").get<int>()) == steps)
          digests.insert(event.at("digest"));
      }
    }
    return digests;
  }
  void expect_all_end_with_the_same_bits() {
    for (auto& trainer : trainers) EXPECT_EQ(trainer->wait(std::chrono::seconds(60)), 0) << trainer->output() << log();
    EXPECT_EQ(last_digests().size(), 1u);
  }
};

TEST(Drift, AReplicaThatComputesSomethingElseIsPutOutWithinThePeriodAndComesBackWithTheSameBits) {
  Job job(3, "150");
  job.train(0), job.train(2);
  Process& wrong = job.train(1, {"--drift-from", "20"});
  EXPECT_EQ(wrong.wait(std::chrono::seconds(60)), 3) << wrong.output() << job.log();
  EXPECT_NE(wrong.output().find("its state differs from that of most replicas at version"), std::string::npos)
      << wrong.output();
  EXPECT_NE(wrong.output().find("tensor 'hidden.weight' elements"), std::string::npos) << wrong.output();
  job.train(1);
  job.expect_all_end_with_the_same_bits();
  std::uint64_t version = 0;
  const std::string said = job.log(), mark = "of rank 0 differ at version ";
  const auto at = said.find(mark);
  ASSERT_NE(at, std::string::npos) << said;
  version = std::stoull(said.substr(at + mark.size()));
  EXPECT_GE(version, 20u);
  EXPECT_LE(version, 20u + 8u) << "the period";
  EXPECT_NE(said.find("replica 1 is out: its state differs"), std::string::npos) << said;
}

TEST(Drift, OfTwoThatDifferNobodyIsRightUntilAnOperatorSaysSo) {
  Job job(2, "120");
  job.train(0);
  Process& wrong = job.train(1, {"--drift-from", "20"});
  ASSERT_TRUE(eventually([&] { return !job.status().value("stopped", "").empty(); }, std::chrono::seconds(60)))
      << job.log();
  const auto stopped = job.status();
  const std::string why = stopped.at("stopped");
  const auto version = stopped.at("committed").get<std::uint64_t>();
  for (const std::string& part : {std::string("tensor 'hidden.weight' elements"), std::string(" at replica 0, "),
                                  "--drop-replica 0@" + std::to_string(version)})
    EXPECT_NE(why.find(part), std::string::npos) << why;
  EXPECT_NE(run({kCli, "status", job.coordinator_status}).output.find("STOPPED: the replicas' states differ"),
            std::string::npos);
  // The coordinator's restart changes nothing.
  job.restart_coordinator(job.coordinator, {});
  ASSERT_TRUE(eventually([&] { return job.status().value("members", nlohmann::json()).size() == 2; }));
  EXPECT_EQ(job.status().at("stopped"), why);
  EXPECT_EQ(job.status().at("committed"), version);
  // Another version than the one that the operator has seen: no.
  job.restart_coordinator(job.coordinator, {"--drop-replica", "1@" + std::to_string(version + 1)});
  EXPECT_EQ(job.status().at("stopped"), why);
  job.restart_coordinator(job.coordinator, {"--drop-replica", "1@" + std::to_string(version)});
  EXPECT_EQ(wrong.wait(std::chrono::seconds(30)), 3) << wrong.output() << job.log();
  job.train(1);
  job.expect_all_end_with_the_same_bits();
}

TEST(Drift, ABitThatFlipsOnItsWayCostsARepeatedStepAndItsHopIsNamed) {
  for (const std::string params : {"60000", "4200"}) {  // by the ring, and directly
    Job job(3, "60");
    job.train(0, {}, params), job.train(1, {}, params), job.train(2, {"--flip-bit-at", "20"}, params);
    job.expect_all_end_with_the_same_bits();
    const std::string said = job.log();
    EXPECT_NE(said.find("the results of rank 0 differ in step 20"), std::string::npos) << said;
    EXPECT_NE(said.find("of rank 0 differs at replica 2 from what replica"), std::string::npos) << said;
    EXPECT_EQ(said.find(" is out: "), std::string::npos) << said;
  }
}

TEST(Drift, WhatCantBeReadOfAnAuditOrADroppedReplicaIsRefused) {
  Scratch scratch;
  const auto refusal_of = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments{kDaemon,         "--job-key-file",  scratch.key(),
                                       "--coordinator", "--log-directory", scratch.path + "/log"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments).output;
  };
  EXPECT_NE(refusal_of({"--audit", "often"}).find("--audit: 'often' is not auto, off, or a number of steps"),
            std::string::npos);
  EXPECT_NE(refusal_of({"--audit", "0"}).find("'0' is not auto, off, or a number of steps"), std::string::npos);
  EXPECT_NE(refusal_of({"--drop-replica", "1"}).find("'1' is not REPLICA@STEP"), std::string::npos);
}

}  // namespace
}  // namespace rejoin::test
