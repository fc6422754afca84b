// What much of a step is made of, by itself on this machine.
#pragma once

#include "base/result.h"

namespace rejoin::bench {

// Microseconds, median: from a process's write to an eventfd until another one, which sleeps in poll(), has read it.
Result<double> wake_up_us();

}  // namespace rejoin::bench
