// Which protocols and releases there are in the job, as the coordinator that decides hears of them: while an upgrade is
// rolled out they are mixed, and when it is over they are not.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "base/clock.h"
#include "base/seldom.h"
#include "membership/coordinator.h"

namespace rejoin::daemon {

nlohmann::json versions_of(const membership::Coordinator& machine);
// The same as a sentence.
std::string versions_line(const nlohmann::json& versions);

// Logs it when it has changed.
class VersionsLog {
 public:
  void look_at(const membership::Coordinator& machine, TimePoint now);

 private:
  Seldom due_{std::chrono::seconds(1)};
  std::string reported_;
};

}  // namespace rejoin::daemon
