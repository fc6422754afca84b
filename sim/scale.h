// What the control plane costs at size: the coordinator, relays and daemons' machines that ship, in one process, every
// message between them serialized and parsed as it is on a wire, and each machine's processor time counted apart. No
// sockets, no log on disk, and ranks that only answer: they have reduced as soon as they hear a plan.
#pragma once

#include <cstdint>
#include <functional>

namespace rejoin::sim {

struct ScaleOptions {
  std::uint32_t replicas = 24, ranks = 4096, ranks_per_node = 8;
  bool relays = true;  // one for each replica; otherwise all daemons connect to the coordinator
  std::uint32_t rails = 1;
  std::uint32_t steps = 20;
  std::uint32_t full_mesh_members = 64;
};

struct Load {                                  // of one machine, for each step
  double cpu_ms = 0, messages = 0, bytes = 0;  // messages and bytes: in and out
};

struct ScaleResult {
  std::uint64_t ranks = 0, nodes = 0;
  Load coordinator, relay, node;          // of relays and nodes, the mean
  double coordinator_bytes_per_rank = 0;  // of memory
  // A rank's process ends: the coordinator's processor time from the report of it to the new epoch's plan, ready to
  // be sent; all messages until every node has that plan.
  double epoch_change_ms = 0;
  std::uint64_t epoch_change_messages = 0;
  // The coordinator's processor time for a whole job, or a whole replica, that registers.
  double start_ms = 0, replica_ms = 0;
  std::uint64_t start_bytes = 0;    // through the coordinator, until the job has started
  std::size_t largest_message = 0;  // of all
  double links = 0;                 // connections of a rank with others, the mean
};

ScaleResult measure_scale(const ScaleOptions& options);

// For tests. What all of it holds, in bytes as `held` counts those of this process, after options.steps and after ten
// times as many, in which a replica is lost every tenth step and comes back; without what the ledger keeps of each
// step.
struct Kept {
  std::uint64_t after_some = 0, after_many = 0;
};
Kept measure_kept(const ScaleOptions& options, const std::function<std::uint64_t()>& held);

}  // namespace rejoin::sim
