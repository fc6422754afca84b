// Digests of parts of the state, chosen by number alone, so that all replicas digest the same
// (membership/drift_audit.h). The state must not be changing. Thread: one at a time, any.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "local/owner.h"

namespace rejoin {

class StateAudit {
 public:
  static constexpr std::size_t kMostRanges = 500, kLongestName = 200;  // of range_digests(): they go in one message

  // `owner` outlives this. Errors: of the device.
  static Result<std::unique_ptr<StateAudit>> make(const local::Owner& owner);

  // The state, all columns side by side, is cut into `period` ranges of nearly equal length: of number `phase`.
  // Errors: of the device; `invalid_argument` where there is no such phase.
  Result<std::uint64_t> digest(std::uint64_t period, std::uint64_t phase);

  struct RangeDigest {  // of one tensor; of several where there would be too many for a message
    std::string tensor;
    std::uint64_t first = 0, count = 0;  // elements of the first of them
    std::uint64_t digest = 0;
  };
  // The digests of the same range, one for each tensor.
  Result<std::vector<RangeDigest>> range_digests(std::uint64_t period, std::uint64_t phase);
  device::Access& access() { return *access_; }  // to the device's memory, for what else is to be digested

 private:
  explicit StateAudit(const local::Owner& owner);
  Result<std::vector<local::Part>> ranges(std::uint64_t period, std::uint64_t phase) const;

  const local::Owner& owner_;
  std::unique_ptr<device::Access> access_;
  std::vector<std::uint64_t> begins_;  // of the parts: bytes of the weights before each, and at the end of all
};

}  // namespace rejoin
