// Whether this process was stopped between two turns of the stream's thread, or kept from running.
#pragma once

#include <algorithm>

#include "base/deadlines.h"

namespace rejoin::catchup {

// The thread looks so seldom while nothing comes (daemon/stream_thread.cc), and a little later on a busy machine.
constexpr Duration kLongestTurn = 2 * std::chrono::milliseconds(20);

constexpr bool is_pause(Duration between_turns, Duration silence) {
  return between_turns > std::max<Duration>(deadlines::kIdleStream.of(silence), kLongestTurn);
}

}  // namespace rejoin::catchup
