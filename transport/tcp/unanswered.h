// Whether a peer's machine is gone, by what the kernel counts on a connection.
//
// TCP_USER_TIMEOUT would tell, too, but it also ends a connection whose peer lives and does not read: that its kernel
// answers each question for room does not count there. How long a peer may read nothing is the business of whoever uses
// the connection ("A peer that does not read" in docs/design-notes.md). Time comes in as a parameter.
#pragma once

#include <algorithm>

#include "base/deadlines.h"
#include "transport/tcp/round_trip.h"

namespace rejoin::transport::tcp {

// An idle connection is asked whether it is there, by either end, so often.
constexpr std::chrono::seconds kShortestProbe{1};  // the kernel counts in seconds
constexpr std::chrono::seconds kLongestProbe{60};  // clouds forget what is idle after 240 at the least
inline std::chrono::seconds probe_after(Duration silence) {
  return std::clamp(std::chrono::floor<std::chrono::seconds>(deadlines::kProbeOfIdle.of(silence)), kShortestProbe,
                    kLongestProbe);
}

// When to look at connections, and how much of the time since the last look counts: who stood still itself may find
// what came meanwhile.
class Looks {
 public:
  // The time that counts; nothing: it is not time to look.
  std::optional<Duration> due(TimePoint now, Duration silence) {
    const Duration passed = now - looked_, each = deadlines::kUnacknowledged.of(silence) / 10;
    if (passed < each) return std::nullopt;
    looked_ = now;
    return std::min(passed, 2 * each);
  }

 private:
  TimePoint looked_{};
};

class Unanswered {
 public:
  // For how long the peer's machine has answered nothing, where that is too long. `passed`: since the last look.
  std::optional<Duration> too_long(const Traffic& traffic, Duration passed, Duration silence) {
    // Our kernel asks a peer without room ever less often. But what that one sends is read here, so that its connection
    // is idle, and its kernel asks whether this end is there.
    const bool answered =
        traffic.acknowledged != last_.acknowledged || (traffic.held_back && traffic.segments != last_.segments);
    for_ = traffic.under_way && last_.under_way && !answered ? for_ + passed : Duration{};
    last_ = traffic;
    const Duration patience = deadlines::kUnacknowledged.of(silence);
    const Duration enough = traffic.held_back ? std::max<Duration>(patience, 5 * probe_after(silence)) : patience;
    return for_ > enough ? std::optional(for_) : std::nullopt;
  }

 private:
  Traffic last_;
  Duration for_{};
};

}  // namespace rejoin::transport::tcp
