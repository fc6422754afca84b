// How fast links are, coarsely: by this a ring's link is found that is much slower than the others.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>

namespace rejoin {

// The exponent of the power of two of MB/s that the rate is below.
using CoarseRate = std::uint8_t;
constexpr CoarseRate kFastest = 30;

constexpr CoarseRate coarse_rate(double bytes_per_second) {
  const auto mb = static_cast<std::uint64_t>(std::clamp(bytes_per_second * 1e-6, 0.0, 1e9));
  return static_cast<CoarseRate>(std::bit_width(mb));
}
// What has been told stays where the rate is a quarter beyond it at most.
constexpr CoarseRate coarse_rate(double bytes_per_second, std::optional<CoarseRate> told) {
  const CoarseRate rate = coarse_rate(bytes_per_second);
  if (told && (coarse_rate(bytes_per_second * 1.25) == *told || coarse_rate(bytes_per_second * 0.8) == *told))
    return *told;
  return rate;
}
// Which it is below.
constexpr std::uint64_t mb_of(CoarseRate rate) { return std::uint64_t{1} << rate; }

}  // namespace rejoin
