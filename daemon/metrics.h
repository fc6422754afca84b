// The figures of a status document and of the job's history as Prometheus metrics. docs/operations.md has the table.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>

#include "daemon/job_history.h"

namespace rejoin::daemon {

// `history`: of a coordinator; null: this process is none.
std::string metrics_text(const nlohmann::json& status, const JobHistory* history, TimePoint now);

// By why, as base/refusals.h counts them; of another process, maybe fewer.
nlohmann::json refusals_json(std::span<const std::uint64_t> counted);

}  // namespace rejoin::daemon
