// For tests over real networks, whose other side takes its time.
#pragma once

#include <chrono>

#include "base/clock.h"

namespace rejoin::transport {

// Asks again and again until it is so; false: not within that time. What it asks moves both sides on.
template <typename Condition>
[[nodiscard]] bool within(std::chrono::seconds limit, Condition condition) {
  const TimePoint deadline = SteadyClock().now() + limit;
  while (!condition())
    if (SteadyClock().now() > deadline) return false;
  return true;
}

}  // namespace rejoin::transport
