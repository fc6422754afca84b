// How long round trips are, coarsely: where nobody says where machines stand, this tells who is near whom.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "base/clock.h"

namespace rejoin {

// The exponent of the power of two of microseconds that is just longer than the round trip. All that is shorter than
// 128 µs is one length: inside of a building what differs there is the machines' load.
using RoundTripLength = std::uint8_t;
constexpr RoundTripLength kNear = 7, kLongestRoundTrip = 26;  // a minute

constexpr RoundTripLength length_of(Duration round_trip) {
  const auto us = std::max<std::int64_t>(0, round_trip / std::chrono::microseconds(1));
  const auto length = static_cast<RoundTripLength>(std::bit_width(static_cast<std::uint64_t>(us)));
  return std::clamp(length, kNear, kLongestRoundTrip);
}
// Which it is shorter than.
constexpr std::uint64_t us_of(RoundTripLength length) { return std::uint64_t{1} << length; }

// What makes a difference: four times as long, give or take what is lost by coarseness.
constexpr bool much_longer(RoundTripLength one, RoundTripLength other) { return one >= other + 2; }

}  // namespace rejoin
