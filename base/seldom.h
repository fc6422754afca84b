// For log lines that may repeat as fast as somebody tries again.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "base/clock.h"

namespace rejoin {

constexpr Duration kSameLineAgain = std::chrono::seconds(10);

class Seldom {
 public:
  explicit Seldom(Duration at_least_apart) : at_least_apart_(at_least_apart) {}
  // Whether nothing was said for so long that this may be forgotten.
  bool is_over(TimePoint now) const { return !last_ || now - *last_ >= at_least_apart_; }
  // Whether the line may be logged now: how many were left out since the last one. Nothing: this one is left out, too.
  std::optional<std::uint64_t> may_say(TimePoint now) {
    if (last_ && now - *last_ < at_least_apart_) return ++left_out_, std::nullopt;
    last_ = now;
    return std::exchange(left_out_, 0);
  }

 private:
  Duration at_least_apart_;
  std::optional<TimePoint> last_;
  std::uint64_t left_out_ = 0;
};

}  // namespace rejoin
