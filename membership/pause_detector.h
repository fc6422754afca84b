// Whoever was paused suspects itself first. A process that was stopped or suspended, or whose thread stood in a slow
// call, finds everybody silent when it goes on, though it was itself that did not listen. See "Paused" in
// docs/design-notes.md.
#pragma once

#include <algorithm>

#include "base/clock.h"

namespace rejoin::membership {

class PauseDetector {
 public:
  explicit PauseDetector(Duration silence) : silence_(silence) {}

  // The caller ticks at least every silence / 8. Returns how long this process was paused since the last tick, which is
  // zero as a rule. The caller does not count that time as anybody's silence (forgive()).
  Duration on_tick(TimePoint now) {
    const Duration pause = unseen(now);
    last_ = now;
    if (pause > Duration{}) settled_at_ = now + silence_ / 8;
    return pause;
  }
  // A pause that ends just now, before the tick that will tell of it.
  Duration unseen(TimePoint now) const {
    return last_ != TimePoint{} && now - last_ > silence_ / 4 ? now - last_ : Duration{};
  }
  // Whether the process has been paused just now: it hears what is queued before it judges anyone.
  bool settling(TimePoint now) const { return now < settled_at_; }
  // … also before the tick that will tell of it: what it hears first after a pause is not what was sent first.
  bool just_paused(TimePoint now) const { return settling(now) || unseen(now) > Duration{}; }

 private:
  Duration silence_;
  TimePoint last_{}, settled_at_{};
};

// A time from which somebody's silence is counted, when this process was paused for `pause` until now.
inline void forgive(TimePoint& since, Duration pause, TimePoint now) { since = std::min(now, since + pause); }

}  // namespace rejoin::membership
