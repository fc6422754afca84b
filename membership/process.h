// Processes by the place that they have, or want, in messages.
#pragma once

#include <algorithm>

#include "control.pb.h"

namespace rejoin::membership {

inline bool same_process(const auto& one, const auto& other) {
  return one.replica() == other.replica() && one.rank() == other.rank() && one.instance() == other.instance();
}

// Processes that wait to be answered, for one place.
inline bool too_many(const auto& waiting, const proto::RankUp& up) {
  return std::count_if(waiting.begin(), waiting.end(), [&](const auto& one) {
           return one.up.replica() == up.replica() && one.up.rank() == up.rank();
         }) >= 8;
}

}  // namespace rejoin::membership
