// What the page shows, as JSON of bounded size, however large the job is. docs/operations.md has the page.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "daemon/job_history.h"

namespace rejoin::daemon {

// `status`: the status document; `history`: of a coordinator; null: this process is none.
nlohmann::json overview(const nlohmann::json& status, const JobHistory* history, TimePoint now);

}  // namespace rejoin::daemon
