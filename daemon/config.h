// rejoind's settings.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/deadlines.h"
#include "base/result.h"
#include "daemon/certificates.h"
#include "daemon/node_options.h"
#include "daemon/store_settings.h"
#include "membership/job_config.h"

namespace rejoin {
class CommandLine;
}

namespace rejoin::daemon {

// Everything that can be set, from a file (--config), REJOIN_* variables and flags, the later ones winning.
struct Config {
  bool coordinator = false;
  std::string listen = "127.0.0.1:0", log_directory = "rejoin-log";
  std::uint64_t log_compact_kib = 64 * 1024;
  std::uint32_t log_archives = 0;  // 0: all
  std::uint32_t replicas = 3, ranks = 2, full_mesh_members = 64;
  bool constant_batch = false, balance_batches = false;
  double balance_at_least = 0.5, balance_at_most = 1.5;  // of an equal share
  std::uint64_t batch = 1, steps = 0, silence_ms = deadlines::kSilence.count(), start_patience_ms = 0;
  std::string audit = "auto", roll_back_to, drop_replica, round_trips = "auto";
  std::optional<std::uint32_t> end_with;  // a process
  std::string relay, key_file, other_key_file, status, address_file, log_level = "info", events, flight;
  StoreSettings store;
  CertificateFiles certificates;
  NodeOptions node;
};
void bind(CommandLine& line, Config& c);

// What no flag alone says: whether they go together.
Result<> check(const Config& c);

// What is allowed and hardly meant, as a warning; empty: nothing.
std::string doubt(const Config& c);

// The job as these settings describe it, which bind() has checked.
membership::JobConfig job_of(const Config& c);

}  // namespace rejoin::daemon
