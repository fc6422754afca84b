// What is done to a run of the demo, as it was asked for on the command line.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "examples/demo_job.h"

namespace rejoin::demo {

struct Faults {
  std::vector<std::string> kills, hangs;                                                   // REPLICA.RANK@STEP
  std::string kill_daemon, drift;                                                          // REPLICA@STEP
  std::uint64_t kill_coordinator = 0, pause_coordinator = 0, pause_all = 0, flip_bit = 0;  // a step; 0: not at all
  std::uint64_t kill_leader = 0, pause_leader = 0, kill_etcd = 0, pause_etcd = 0;  // … of several coordinators
  std::string etcd_members = "leader";                                             // or follower, or all
  bool kill_source = false, kill_joiner = false, no_kill = false;

  bool none() const;
  struct OfLead {
    const char* flag;
    const char* kind;  // in the story
    std::uint64_t step;
  };
  std::array<OfLead, 4> of_lead() const;  // those of several coordinators, asked for or not
  // Whether every replica loses a rank: then its state may be lost.
  bool lose_all(const JobSettings& job) const;
};

struct Target {
  RankName rank;
  std::uint64_t step = 0;
};

struct Plan {
  std::vector<std::pair<Target, std::string>> ranks;  // with "kill" or "hang"
  std::optional<Target> daemon, drift;
};

// Errors: what would have no effect on such a job, as it was typed.
Result<Plan> plan_of(const Faults& faults, const JobSettings& job);

}  // namespace rejoin::demo
