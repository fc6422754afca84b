// What a job that runs for long leaves behind: its decisions as the coordinator writes them, in the log that ships,
// which is compacted as it grows. Replicas are lost and come back. Each compaction recovers a coordinator from the log,
// whose ledger must be the one that has given the samples out.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/result.h"

namespace rejoin::sim {

struct LongJobOptions {
  std::uint32_t replicas = 1024;
  std::uint64_t steps = 1'000'000;
  std::uint64_t steps_between_losses = 500;
  std::uint64_t log_compact = 64 << 20;  // bytes, as --log-compact-kib
  std::string directory;                 // for the log; archives are removed, as an operator may
};

struct LongJobState {  // after so many steps; the largest since the state before
  std::uint64_t steps = 0;
  std::uint64_t log_bytes = 0, snapshot_bytes = 0;
  double recovery_ms = 0;          // of a coordinator, from the log just before it is compacted
  std::uint64_t memory_bytes = 0;  // of this process, while a recovered coordinator is there, too
  std::uint64_t heap_bytes = 0;    // in use when that is gone; 0 where the allocator does not tell (sanitizers)
};

// `report` is called at 1,000, 10,000, 100,000 … steps and at the end. Errors: a log that can't be written, or that
// leads to another state.
Result<> run_long_job(const LongJobOptions& options, const std::function<void(const LongJobState&)>& report);

}  // namespace rejoin::sim
