// Whoever was away suspects itself first. A process that was stopped or suspended, or whose thread stood in a slow
// call, finds everybody silent when it goes on, though it was itself that did not listen. See "Away" in
// docs/design-notes.md.
#pragma once

#include <algorithm>

#include "base/clock.h"

namespace rejoin::membership {

class Attendance {
 public:
  explicit Attendance(Duration silence) : silence_(silence) {}

  // With each tick, of which there is one every silence / 8 at least: how long this process was away since the last
  // one, zero as a rule. That time does not count as anybody's silence (forgive()).
  Duration on_tick(TimePoint now) {
    const Duration gap = last_ == TimePoint{} ? Duration{} : now - last_;
    last_ = now;
    if (gap <= silence_ / 4) return {};
    settled_at_ = now + silence_ / 8;
    return gap;
  }
  // After that, what is queued is heard before anyone is judged.
  bool settling(TimePoint now) const { return now < settled_at_; }

 private:
  Duration silence_;
  TimePoint last_{}, settled_at_{};
};

// A time from which somebody's silence is counted, when this process was `away` until now.
inline void forgive(TimePoint& since, Duration away, TimePoint now) { since = std::min(now, since + away); }

}  // namespace rejoin::membership
