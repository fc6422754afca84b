// Threads that may not be had. None takes a signal that is for the program (no_signals.h). Each rounds to nearest and
// keeps subnormal numbers, whatever the thread that starts it does: a replica whose trainer flushes them to zero adds
// up the same bits as the others.
#pragma once

#include <cfenv>
#include <system_error>
#include <thread>
#include <utility>

#include "base/fail.h"
#include "base/no_signals.h"

namespace rejoin {

inline tl::unexpected<Error> gives_no_thread(const std::system_error& error) {
  return fail(ErrorCode::exhausted,
              "the system gives no thread ({}): raise the limit of processes ('ulimit -u', or pids.max of the "
              "container), or that of memory for its stack ('ulimit -v', vm.overcommit_memory; 'ulimit -l' where this "
              "process locks its memory)",
              error.what());
}

// Errors: `exhausted`, where the system gives none.
template <typename Run>
Result<> start_thread(std::thread& thread, Run run) {
  const NoSignals no_signals;
  try {
    thread = std::thread([run = std::move(run)]() mutable {
      std::fesetenv(FE_DFL_ENV);
      run();
    });
    return {};
  } catch (const std::system_error& error) {
    return gives_no_thread(error);
  }
}

// In a child of fork(), where it is not, so that it can neither be joined nor detached.
inline void leave_to_parent(std::thread& thread) { (void)new std::thread(std::move(thread)); }

}  // namespace rejoin
