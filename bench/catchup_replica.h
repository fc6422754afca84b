// rejoin_catchup_bw's parts: what it is told, and what one replica's process does.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bench/meeting.h"
#include "catchup/service.h"

namespace rejoin::bench {

struct CatchUpSettings {
  std::uint64_t bytes = 1 * GiB;
  std::uint32_t sources = 2;
  int repeats = 3;
  std::string transport = "shm", json, compression_name = "auto";
  catchup::Compression compression = catchup::Compression::when_it_pays;
  double limit = 0;  // bytes/s of each source
  bool real_data = false;
  std::optional<int> cuda;         // states in this device's memory
  std::vector<std::string> hosts;  // where each replica runs, the joiner first: network namespaces
};

struct CatchUpMeasured {
  double bulk_seconds = 0, arrived_seconds = 0, verified_seconds = 0;
  double joiner_cpu = 0, sources_cpu = 0;  // seconds, until it was verified
  double joiner_calls = 0, sources_calls = 0;
  std::vector<double> shares;     // of what the sources sent, by source
  std::string calls_not_counted;  // why; empty: they are
};

// What replica `number` of `settings.sources` + 1 does; number 0 is the joiner. Collective. Returns what was measured
// in each of the repetitions.
Result<std::vector<CatchUpMeasured>> run_replica(const CatchUpSettings& settings, Meeting& meeting,
                                                 std::uint32_t number);

}  // namespace rejoin::bench
