// The event file of a process, as programs open it (events.h).
#pragma once

#include <string>

#include "base/events.h"

namespace rejoin::events {

// open(); what makes it impossible is said in the log, and harms nothing.
void open_file(const std::string& directory, const std::string& who);

}  // namespace rejoin::events
