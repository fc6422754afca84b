// What a coordinator is told about the comparison of replicas (drift_audit.h).
#pragma once

#include <cstdint>

namespace rejoin::membership {

struct AuditConfig {
  bool on = true;
  std::uint64_t period = 0;  // steps in which all of the state is compared; 0: so many that it takes 0.5 % of the time
};

}  // namespace rejoin::membership
