// The invariant prompt: where processes end, hang or start again, nothing else is wrong, and a healthy replica goes on,
// there is a commit every few silences, and not only when the fault is over.
#pragma once

#include <algorithm>
#include <optional>

#include "base/clock.h"

namespace rejoin::sim {

class Promptness {
 public:
  // From now on a commit is due; or, where something else is wrong, none is before all is calm again.
  void begin(TimePoint now) { since_ = std::max(since_.value_or(now), now); }
  void end() { since_.reset(); }
  bool watched() const { return since_.has_value(); }

  // A step is committed, or nobody could now.
  void put_off(TimePoint now) {
    if (since_) since_ = now;
  }
  // For how long none has been, if that is too long.
  std::optional<Duration> late(TimePoint now, Duration silence) const {
    if (!since_ || now - *since_ <= kSilences * silence) return std::nullopt;
    return now - *since_;
  }

 private:
  static constexpr int kSilences = 3;
  std::optional<TimePoint> since_;
};

}  // namespace rejoin::sim
