// The command `rejoin doctor`.
#pragma once

#include "daemon/doctor.h"

namespace rejoin {
class CommandLine;
}

namespace rejoin::daemon {

struct DoctorCommand {
  DoctorSettings settings;
  std::uint64_t patience_ms = 2000, wait_s = 10;
  std::string pairs;
  bool json = false, strict = false, verbose = false;
  void bind(CommandLine& line);
  int run() const;  // the status to exit with
};

}  // namespace rejoin::daemon
