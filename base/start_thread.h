// Threads that may not be had.
#pragma once

#include <system_error>
#include <thread>
#include <utility>

#include "base/fail.h"

namespace rejoin {

// Errors: `exhausted`, where the system gives none.
template <typename Run>
Result<> start_thread(std::thread& thread, Run run) {
  try {
    thread = std::thread(std::move(run));
    return {};
  } catch (const std::system_error& error) {
    return fail(ErrorCode::exhausted,
                "the system gives no thread ({}): 'ulimit -u', or the container's limit of processes, is too low",
                error.what());
  }
}

}  // namespace rejoin
