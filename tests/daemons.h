// A job's daemons as a test runs them, with all their files in one directory.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "tests/process.h"

namespace rejoin::test {

inline const std::string kDaemon = binaries() + "/rejoind", kCli = binaries() + "/rejoin";

struct Daemons {
  Scratch scratch;
  std::string silence_ms = "1000", log_directory = "log";
  std::string key = scratch.key();
  std::string coordinator, coordinator_status;  // addresses
  std::vector<std::string> of_all;              // more arguments of each daemon
  bool usual_status = false;                    // where daemons have it of their own accord, if that is free

  std::string file(const std::string& name) const { return scratch.path + "/" + name; }
  std::string socket(std::uint32_t node) const { return file("node" + std::to_string(node) + ".sock"); }

  std::unique_ptr<Process> daemon(const std::string& name, std::vector<std::string> more) const {
    std::vector<std::string> arguments{
        kDaemon,        "--job-key-file", key, "--name", name, "--address-file", file(name + ".json"),
        "--silence-ms", silence_ms};
    if (!usual_status && std::ranges::find(more, "--status") == more.end())
      more.insert(more.begin(), {"--status", "127.0.0.1:0"});
    arguments.insert(arguments.end(), of_all.begin(), of_all.end());
    arguments.insert(arguments.end(), more.begin(), more.end());
    return std::make_unique<Process>(arguments, file(name + ".out"));
  }
  std::unique_ptr<Process> start_coordinator(std::vector<std::string> more) {
    more.insert(more.begin(), {"--coordinator", "--log-directory", file(log_directory)});
    std::filesystem::remove(file("coordinator.json"));  // of one that ran before
    auto process = daemon("coordinator", std::move(more));
    const auto json = addresses("coordinator");
    coordinator = json.at("coordinator");
    coordinator_status = json.at("status");
    return process;
  }
  std::unique_ptr<Process> start_node(std::uint32_t node, std::vector<std::string> more) const {
    more.insert(more.begin(), {"--socket", socket(node)});
    const std::string name = "node" + std::to_string(node);
    auto process = daemon(name, std::move(more));
    addresses(name);
    return process;
  }
  // When it has written them.
  nlohmann::json addresses(const std::string& name) const {
    EXPECT_TRUE(eventually([&] { return std::filesystem::exists(file(name + ".json")); }))
        << read_file(file(name + ".out"));
    return nlohmann::json::parse(read_file(file(name + ".json")), nullptr, false);
  }
  // The coordinator's; null where it doesn't answer.
  nlohmann::json status() const {
    const auto json = nlohmann::json::parse(run({kCli, "status", "--json", coordinator_status}).output, nullptr, false);
    return json.is_discarded() ? nlohmann::json() : json.at("coordinator_role");
  }
};

// What the daemon there says that it has refused, by why.
inline std::map<std::string, int> refused_by(const std::string& status) {
  return nlohmann::json::parse(run({kCli, "status", "--json", status}).output).at("refused");
}

}  // namespace rejoin::test
