// How much of a stream one source lets be under way to one joiner, so that little of it is left on the link when the
// trainer begins to exchange gradients over it: what the link moves in 20 ms, beyond what keeps it busy. Rate and delay
// are estimated as BBR does (Cardwell et al., ACM Queue 14(5), 2016, "Characterizing the bottleneck"): the largest rate
// of the last slices and the least time that one took. Over a link that moves 16 slices in that time it holds nothing
// back.
//
// While gradients are exchanged one slice is under way at most, and between two of them nothing for as long as the last
// one took: a link that training fills is training's alone half of the time, and shared in the other half.
// Pure: the caller passes in times.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "base/clock.h"

namespace rejoin::catchup {

class LinkShare {
 public:
  static constexpr Duration kYield = std::chrono::milliseconds(20);

  // Of a slice, kept by the caller until it ends.
  struct Begun {
    TimePoint at{};
    std::uint64_t delivered = 0;
  };

  bool may_begin(bool exchanging, TimePoint now) const {
    if (under_way_ == 0) return !exchanging || now >= std::max(begun_ + kYield, ended_ + took_);
    return !exchanging && (count_ == 0 || static_cast<double>(under_way_) < window());
  }
  Begun on_begin(std::uint64_t bytes, TimePoint now) {
    under_way_ += bytes;
    begun_ = now;
    return {now, delivered_};
  }
  void on_end(const Begun& begun, std::uint64_t bytes, TimePoint now) {
    under_way_ -= bytes;
    delivered_ += bytes;
    ended_ = now;
    took_ = std::max<Duration>(now - begun.at, std::chrono::nanoseconds(1));
    least_ = std::min(least_, took_);
    rates_[count_++ % rates_.size()] = static_cast<double>(delivered_ - begun.delivered) / seconds(took_);
  }

  std::uint64_t under_way() const { return under_way_; }
  double window() const {  // bytes; once a slice has ended
    return *std::max_element(rates_.begin(), rates_.end()) * seconds(least_ + kYield);
  }

 private:
  std::uint64_t under_way_ = 0, delivered_ = 0;  // bytes
  std::array<double, 16> rates_{};               // bytes/s, of the last slices that have ended
  std::size_t count_ = 0;                        // … so many in all
  Duration least_ = std::chrono::hours(1);       // that one took: most of the way alone on the link
  TimePoint begun_{}, ended_{};
  Duration took_{};
};

}  // namespace rejoin::catchup
