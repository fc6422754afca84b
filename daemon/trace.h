// Event files (base/events.h) of any number of processes as one Chrome/Perfetto trace.
#pragma once

#include <string>

#include "base/result.h"

namespace rejoin::daemon {

// Reads all event files in `directory` and writes `output`: a row for each process that has emitted an event, in it the
// phases of each step as spans and everything else as instants. Returns the number of processes. Errors: `not_found`
// for a directory without events, `io`.
Result<int> merge_trace(const std::string& directory, const std::string& output);

}  // namespace rejoin::daemon
