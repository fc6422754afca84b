// How much of a stream one source lets be under way to one joiner, so that little of it is left on the link when the
// trainer begins to exchange gradients over it: what keeps the link busy, and what it moves in 20 ms beyond that. Over
// a link that moves 16 slices in that time it holds nothing back. Rate and delay are estimated as BBR does it (Cardwell
// et al., ACM Queue 14(5), 2016): the largest rate of the last slices, and the least time that one took by itself, of
// the last 10 s. When that is older the link is left to run empty once, so that the next slice is by itself.
//
// While gradients are exchanged one slice is under way at most, and between two of them nothing for as long as the link
// took for the last one: half of a link that training fills is left to training alone.
// Pure: the caller passes in times.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "base/clock.h"

namespace rejoin::catchup {

class LinkShare {
 public:
  // Of a slice, kept by the caller until it ends.
  struct Begun {
    TimePoint at{}, since{};  // … and since when the bytes count that are delivered until then
    std::uint64_t delivered = 0;
    bool alone = false;
  };

  bool may_begin(bool exchanging, TimePoint now) const {
    if (under_way_ == 0) return !exchanging || now >= due();
    if (exchanging) return false;
    if (count_ == 0) return true;  // nothing is known yet
    return now - least_.at < kLeastHolds && static_cast<double>(under_way_) < window();
  }
  TimePoint due() const { return std::max(begun_ + kYield, ended_ + took_); }  // while gradients are exchanged

  Begun on_begin(std::uint64_t bytes, TimePoint now) {
    const bool alone = under_way_ == 0;
    if (alone) since_ = now;
    under_way_ += bytes;
    begun_ = now;
    return {now, since_, delivered_, alone};
  }
  void on_end(const Begun& begun, std::uint64_t bytes, TimePoint now) {
    under_way_ -= bytes;
    delivered_ += bytes;
    took_ = std::min<Duration>(now - std::max(begun.at, ended_), kLongestPause);
    ended_ = since_ = now;
    const Duration whole = std::max<Duration>(now - begun.at, std::chrono::nanoseconds(1));
    if (begun.alone && (least_.took > whole || now - least_.at >= kLeastHolds)) least_ = {whole, bytes, now};
    const Duration counted = std::max<Duration>(now - begun.since, std::chrono::nanoseconds(1));
    last_[count_++ % last_.size()] = {bytes, static_cast<double>(delivered_ - begun.delivered) / seconds(counted)};
  }

  std::uint64_t under_way() const { return under_way_; }  // bytes; for tests

 private:
  static constexpr Duration kYield = std::chrono::milliseconds(20);
  static constexpr Duration kLeastHolds = std::chrono::seconds(10);
  static constexpr Duration kLongestPause = std::chrono::seconds(1);  // a joiner may have been stopped
  struct Ended {
    std::uint64_t bytes = 0;
    double bytes_per_second = 0;
  };
  struct Least {
    Duration took = Duration::max();
    std::uint64_t bytes = 0;
    TimePoint at{};
  };

  // Bytes; another slice may begin while less is under way. What a slice took by itself, without its own time on the
  // link, is the way there and back.
  double window() const {
    Ended most;
    for (const auto& one : last_)
      most = {std::max(most.bytes, one.bytes), std::max(most.bytes_per_second, one.bytes_per_second)};
    const double way = seconds(least_.took) - static_cast<double>(least_.bytes) / most.bytes_per_second;
    return most.bytes_per_second * (std::max(way, 0.0) + seconds(kYield)) + static_cast<double>(most.bytes);
  }

  std::uint64_t under_way_ = 0, delivered_ = 0;  // bytes
  std::array<Ended, 16> last_{};
  std::size_t count_ = 0;  // slices that have ended
  Least least_;
  TimePoint begun_{}, ended_{}, since_{};
  Duration took_{};  // that the link had for the last one
};

}  // namespace rejoin::catchup
