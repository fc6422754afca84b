// What a rank reports of a step, for the drift audit's tests.
#pragma once

#include <cstdint>
#include <vector>

#include "control.pb.h"

namespace rejoin::membership {

inline proto::Reduced report(const std::vector<std::uint64_t>& results, const std::vector<std::uint64_t>& state) {
  proto::Reduced reduced;
  auto& ranks = *reduced.add_ranks();
  ranks.set_end(results.size());
  reduced.mutable_results()->Add(results.begin(), results.end());
  reduced.mutable_state()->Add(state.begin(), state.end());
  return reduced;
}

}  // namespace rejoin::membership
