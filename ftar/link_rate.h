// How fast a link takes writes: the bytes of those that have completed, over the time in which any were under way.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>

#include "base/bytes.h"
#include "base/clock.h"

namespace rejoin::ftar {

class LinkRate {
 public:
  void on_posted(std::size_t bytes, TimePoint now) {
    if (under_way_++ == 0) since_ = now;
    bytes_ += bytes;
  }
  // Of the times in which any were under way, as soon as there are bytes enough: few say more of delays than of the
  // link.
  void on_completed(TimePoint now) {
    if (--under_way_ > 0) return;
    took_ += now - since_;
    if (bytes_ < kLeast || took_ <= Duration::zero()) return;
    const double here = static_cast<double>(std::exchange(bytes_, 0)) / seconds(std::exchange(took_, {}));
    rate_ = rate_ ? *rate_ + (here - *rate_) * kWeight : here;
    best_ = std::max(best_.value_or(0), *rate_);
  }
  std::optional<double> bytes_per_second() const { return rate_; }
  // The best of it since the last call: what is in the way for a moment only makes no link slow.
  std::optional<double> take_best() { return std::exchange(best_, std::nullopt); }

 private:
  static constexpr std::size_t kLeast = 128 * KiB;
  static constexpr double kWeight = 0.25;  // of the last time
  std::size_t under_way_ = 0, bytes_ = 0;
  TimePoint since_{};
  Duration took_{};  // before that, for the bytes of which nothing is known yet
  std::optional<double> rate_, best_;
};

}  // namespace rejoin::ftar
