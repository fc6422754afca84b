// Processes by the place that they have, or want, in messages.
#pragma once

#include <algorithm>
#include <cstdint>

#include "control.pb.h"

namespace rejoin::membership {

inline bool same_place(const auto& one, const auto& other) {
  return one.replica() == other.replica() && one.rank() == other.rank();
}

inline bool same_process(const auto& one, const auto& other) {
  return same_place(one, other) && one.instance() == other.instance();
}

// What is said of one job is nothing to a process of another. 0: not known.
inline bool of_another_job(std::uint64_t its, std::uint64_t job) { return its != 0 && job != 0 && its != job; }

// Processes that wait to be answered, for one place.
inline bool too_many(const auto& waiting, const proto::RankUp& up) {
  return std::count_if(waiting.begin(), waiting.end(), [&](const auto& one) { return same_place(one.up, up); }) >= 8;
}

}  // namespace rejoin::membership
