// What a coordinator's log says of every sample. A reading of its own: of how samples are handed out it knows only that
// those which come back go out before new ones do.
#pragma once

#include <optional>
#include <vector>

#include "base/ids.h"
#include "control.pb.h"

namespace rejoin::daemon {

struct LogAudit {
  std::uint64_t epochs = 0, committed = 0;  // the job's, at the log's end
  std::uint64_t samples = 0;                // up to the highest one that a commit names, rolled back or not
  std::uint64_t once = 0, repeated = 0;     // trained once, more than once
  std::uint64_t lost = 0;                   // not trained, and never handed out again
  // Not trained either: they were handed out and not committed, or rolled back. They go out before new ones do.
  std::uint64_t to_be_trained = 0;
  // The job has gone on from the checkpoint of this step (0: from none), by which so many of `once` are trained.
  std::uint64_t checkpoint = 0, before_checkpoint = 0;
  // The log was compacted after this step (0: it was not, or its archives are there), and so many of `once` are trained
  // by what it says of the steps before.
  std::uint64_t compacted = 0, before_compacted = 0;
};

// `last_step`: where it is known, the step after which the job is finished. The log doesn't name it; without it a
// sample is lost only where new ones went out before it.
LogAudit audit_log(const std::vector<proto::LogRecord>& records, std::optional<Step> last_step);

}  // namespace rejoin::daemon
