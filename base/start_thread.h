// Threads that may not be had.
#pragma once

#include <system_error>
#include <thread>
#include <utility>

#include "base/fail.h"

namespace rejoin {

// Starts a thread. Errors: `exhausted`, where the system gives none.
template <typename Run>
Result<std::thread> start_thread(Run run) {
  try {
    return std::thread(std::move(run));
  } catch (const std::system_error& error) {
    return fail(ErrorCode::exhausted,
                "the system gives no thread ({}): 'ulimit -u', or the container's limit of processes, is too low",
                error.what());
  }
}

}  // namespace rejoin
