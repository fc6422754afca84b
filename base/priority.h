// Threads that work beside training.
#pragma once

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace rejoin {

// Of the calling thread. Training goes first on a crowded node, but not alone: with far less than its share the stream
// would hardly move there, and a replica that is not back costs more than the cycles that bring it back.
inline void let_training_go_first() { (void)::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), 4); }

}  // namespace rejoin
