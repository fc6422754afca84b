// How fast a link takes writes: the bytes of those that have completed, over the time in which any were under way.
#pragma once

#include <cstddef>
#include <optional>

#include "base/bytes.h"
#include "base/clock.h"

namespace rejoin::ftar {

class LinkRate {
 public:
  void on_posted(std::size_t bytes, TimePoint now) {
    if (under_way_++ == 0) since_ = now, bytes_ = 0;
    bytes_ += bytes;
  }
  // Of a time without a pause, when it ends. One with few bytes says more of delays than of the link.
  void on_completed(TimePoint now) {
    if (--under_way_ > 0 || bytes_ < kLeast || now <= since_) return;
    const double here = static_cast<double>(bytes_) / seconds(now - since_);
    rate_ = rate_ ? *rate_ + (here - *rate_) * kWeight : here;
  }
  std::optional<double> bytes_per_second() const { return rate_; }

 private:
  static constexpr std::size_t kLeast = 128 * KiB;
  static constexpr double kWeight = 0.25;  // of the last time
  std::size_t under_way_ = 0, bytes_ = 0;
  TimePoint since_{};
  std::optional<double> rate_;
};

}  // namespace rejoin::ftar
