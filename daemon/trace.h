// Flight recordings (recording.h) and event files (base/events.h) of any number of processes as one Chrome/Perfetto
// trace.
#pragma once

#include <string>
#include <vector>

#include "base/result.h"

namespace rejoin::daemon {

struct MergedTrace {
  int processes = 0;
  std::vector<std::string> notes;  // what is not whole or not known
};

// Reads files and directories (none: the default directory of recordings) and writes `output`: a process for each that
// has said anything, with rows for its steps, all-reduces, streams and decisions, and arrows from each epoch's decision
// to those who enter it. Event files of another machine than the coordinator's are not put on its clock. Errors:
// `not_found` where nothing is found, and `output` is left as it is then; `invalid_argument` where it is one of the
// files that are read; `io`.
Result<MergedTrace> merge_trace(const std::vector<std::string>& paths, const std::string& output,
                                std::uint64_t job = 0);

}  // namespace rejoin::daemon
