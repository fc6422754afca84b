// What each open() of the library does first, for the process that it is in.
#pragma once

#include "base/fd.h"
#include "base/proof.h"

namespace rejoin {

// Lines go to standard error, unless the program has set another sink; or, in the project's own programs, which have
// one spdlog with the library, a default logger with a name: spdlog's own, without one, is not meant for them.
void log_to_stderr_by_default();

inline void prepare_process() {
  open_standard_descriptors();
  keep_openssl();
  log_to_stderr_by_default();
}

}  // namespace rejoin
