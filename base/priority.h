// Threads that work beside training.
#pragma once

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace rejoin {

// Of the calling thread, against the one that the process has. Training goes first on a crowded node, but not alone:
// with far less than its share the stream would hardly move there, and a replica that is not back costs more than the
// cycles that bring it back.
inline void let_training_go_first() {
  constexpr int behind = 4, last = 19;
  const int of_process = ::getpriority(PRIO_PROCESS, static_cast<id_t>(::getpid()));  // its first thread's
  (void)::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), std::min(last, of_process + behind));
}

}  // namespace rejoin
