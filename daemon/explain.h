// An incident of a job in about ten plain sentences, out of its flight recordings: what ended or stood still, who
// noticed, what was decided, what the others did, who came back how, and what it cost. What is not known is said to be
// unknown.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "daemon/incidents.h"

namespace rejoin::daemon {

struct ExplainOptions {
  std::vector<std::string> paths;      // none: the default directory
  std::uint64_t job = 0;               // 0: the one with the last event
  std::string at;                      // the incident nearest to this time
  std::optional<std::uint64_t> epoch;  // … or the one that this epoch belongs to; neither: the last one
  bool list = false;                   // a line for each instead
};

// Errors: `not_found` where there are no recordings or no incident, `invalid_argument` for a time that is none.
Result<std::string> explain(const ExplainOptions& options);

// The sentences, a line each.
std::vector<std::string> explain(const Recordings& recordings, const Incidents& incidents, const Incident& incident);
std::vector<std::string> list(const Recordings& recordings, const Incidents& incidents);

// By the time of the day in UTC: 14:01:22.125, or 2026-11-26T14:01:22.125Z, or seconds since 1970. The first is the one
// that is nearest to `near`. Both are ns since 1970.
Result<std::int64_t> parse_time(const std::string& text, std::int64_t near);

}  // namespace rejoin::daemon
