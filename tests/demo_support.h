// Runs of the demo, and what must be true of each.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tests/process.h"

namespace rejoin::test {

inline nlohmann::json demo(std::vector<std::string> more, const std::vector<std::string>& environment = {}) {
  Scratch scratch;
  const std::string json = scratch.path + "/report.json";
  std::vector<std::string> arguments{
      binaries() + "/rejoin-demo", "--data", REJOIN_DATA, "--json", json, "--no-baseline", "--limit-seconds", "60"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  if (std::find(more.begin(), more.end(), "--params") == more.end())
    arguments.insert(arguments.end(), {"--params", "300000"});  // a small model unless the test is about its size
  const Ended ended = run(arguments, environment, std::chrono::seconds(90));
  EXPECT_EQ(ended.status, 0) << ended.output;
  return nlohmann::json::parse(read_file(json), nullptr, false);
}

// `deeds`: what was done to the job, in the order of their names. Each must have happened, and have been seen.
inline void expect_sound(const nlohmann::json& report, std::uint64_t steps, const std::vector<std::string>& deeds) {
  ASSERT_FALSE(report.is_discarded());
  std::vector<std::string> done;
  for (const auto& failure : report.at("failures")) {
    done.push_back(failure.at("kind"));
    const std::string& kind = done.back();
    if (kind == "kill_daemon" || kind.ends_with("_coordinator") || kind == "pause_all" || kind.ends_with("_leader") ||
        kind.ends_with("_etcd"))
      continue;  // nobody is out
    EXPECT_GE(failure.at("detected_ms").get<double>(), 0) << "nobody noticed: " << failure.dump();
  }
  std::sort(done.begin(), done.end());
  EXPECT_EQ(done, deeds);
  EXPECT_EQ(report.at("steps_committed"), steps);
  EXPECT_TRUE(report.at("same_bits").get<bool>()) << "same-bits";
  EXPECT_TRUE(report.at("absent").empty()) << "progress: " << report.at("absent").dump();
  EXPECT_EQ(report.at("ledger").at("lost"), 0) << "exactly-once";
  EXPECT_EQ(report.at("ledger").at("repeated"), 0) << "exactly-once";
  for (const auto& failure : report.at("failures")) EXPECT_EQ(failure.at("recomputed_steps"), 0) << failure.dump();
}

// Nobody is put out for having been paused, or for what happened while another was.
inline void expect_nobody_out(const nlohmann::json& report) {
  EXPECT_EQ(report.at("rolled_back_steps"), 0) << "state-survives";
  EXPECT_TRUE(report.at("catch_ups").empty()) << report.at("catch_ups").dump();
  for (const auto& event : report.at("events"))
    if (event.at("kind") == "epoch") {
      EXPECT_EQ(event.at("members"), "0,1,2") << event.dump();
    }
}

}  // namespace rejoin::test
