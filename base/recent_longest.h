// The longest of what took some time in the last seconds: at least the last ten, at most the last twenty.
#pragma once

#include <algorithm>

#include "base/clock.h"

namespace rejoin {

class RecentLongest {
 public:
  void add(Duration took, TimePoint now) {
    turn(now);
    this_window_ = std::max(this_window_, took);
  }
  Duration at(TimePoint now) const {
    if (now - begun_ < kWindow) return std::max(this_window_, window_before_);
    return now - begun_ < 2 * kWindow ? this_window_ : Duration{};
  }

 private:
  static constexpr Duration kWindow = std::chrono::seconds(10);
  void turn(TimePoint now) {
    if (now - begun_ < kWindow) return;
    window_before_ = now - begun_ < 2 * kWindow ? this_window_ : Duration{};
    this_window_ = {};
    begun_ = now;
  }

  TimePoint begun_{};
  Duration this_window_{}, window_before_{};
};

}  // namespace rejoin
