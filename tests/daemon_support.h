// The job of the minimal trainer that the daemons' tests run.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/daemons.h"

namespace rejoin::test {

inline const std::string kMinimal = binaries() + "/rejoin-minimal";

// A coordinator of a job of one trainer, with this added.
inline std::vector<std::string> lone_coordinator(std::vector<std::string> with) {
  with.insert(with.begin(), {kDaemon, "--coordinator", "--replicas", "1", "--ranks", "1", "--batch", "1", "--listen",
                             "127.0.0.1:0", "--status", "127.0.0.1:0", "--flight-dir", "off"});
  return with;
}

struct Job : Daemons {
  std::vector<std::unique_ptr<Process>> processes;

  void start(std::uint32_t replicas, std::uint64_t steps) {
    processes.push_back(start_coordinator(
        {"--replicas", std::to_string(replicas), "--ranks", "1", "--batch", "8", "--steps", std::to_string(steps)}));
    for (std::uint32_t r = 0; r < replicas; ++r) processes.push_back(start_node(r, {"--connect", coordinator}));
  }
  std::vector<std::string> environment(std::uint32_t replica) const {
    return {"REJOIN_REPLICA=" + std::to_string(replica), "REJOIN_RANK=0", "REJOIN_SOCKET=" + socket(replica)};
  }
};

}  // namespace rejoin::test
