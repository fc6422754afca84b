// Chance from a seed, a stream of its own for each purpose: what one draws more or less changes nothing for another, so
// that a run without one of its faults is otherwise the same run.
#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>

#include "base/clock.h"
#include "base/digest.h"
#include "base/mix.h"

namespace rejoin::sim {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  Random(std::uint64_t seed, std::string_view purpose, std::uint64_t number = 0)
      : state_(combine_digests(combine_digests(digest(as_bytes(purpose)), seed), number)) {}

  // splitmix64 (Steele, Lea, Flood 2014)
  std::uint64_t next() {
    state_ += 0x9e3779b97f4a7c15;
    return mixed(state_);
  }
  std::uint64_t pick(std::uint64_t n) { return n == 0 ? 0 : next() % n; }
  bool one_in(std::uint64_t n) { return pick(n) == 0; }
  Duration between(Duration least, Duration most) {
    return least + Duration(static_cast<std::int64_t>(pick(static_cast<std::uint64_t>((most - least).count()) + 1)));
  }
  // Every order of magnitude is as likely.
  Duration of_any_size(Duration least, Duration most) {
    const double low = std::log(static_cast<double>(least.count())), high = std::log(static_cast<double>(most.count()));
    const double unit = static_cast<double>(next() >> 11) * 0x1p-53;
    return Duration(static_cast<std::int64_t>(std::exp(low + unit * (high - low))));
  }

 private:
  std::uint64_t state_;
};

}  // namespace rejoin::sim
