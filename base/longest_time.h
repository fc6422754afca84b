// How long a time may be that somebody sets. Longer ones would not be for ever, but overflow where they are counted in
// nanoseconds.
#pragma once

#include <cstdint>

#include "base/clock.h"

namespace rejoin {

constexpr std::uint64_t kLongestTimeMs = std::uint64_t{1} << 40;  // 34 years
constexpr std::chrono::milliseconds kLongestTime{kLongestTimeMs};

// In so long, which may be for ever.
inline TimePoint in(Duration limit) {
  const TimePoint now = SteadyClock().now();
  return limit < TimePoint::max() - now ? now + limit : TimePoint::max();
}

}  // namespace rejoin
