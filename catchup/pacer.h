// A bandwidth limit shared by all streams of a node: a token bucket that holds at most 50 ms of the limit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/clock.h"

namespace rejoin::catchup {

class Pacer {
 public:
  explicit Pacer(double bytes_per_second) : rate_(bytes_per_second), tokens_(capacity()) {}  // 0: no limit

  double limit() const { return rate_; }
  // Whether something may be sent now; it may be larger than what is left, and is paid off before the next.
  bool may_send(TimePoint now) {
    if (rate_ == 0) return true;
    if (filled_ != TimePoint{}) tokens_ = std::min(capacity(), tokens_ + rate_ * seconds(now - filled_));
    filled_ = now;
    return tokens_ > 0;
  }
  void spend(std::uint64_t bytes) { tokens_ -= static_cast<double>(bytes); }

 private:
  double capacity() const { return rate_ * 0.05; }
  const double rate_;
  double tokens_;
  TimePoint filled_{};
};

}  // namespace rejoin::catchup
