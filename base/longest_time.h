// How long a time may be that somebody sets. Longer ones would not be for ever, but overflow where they are counted in
// nanoseconds.
#pragma once

#include <chrono>
#include <cstdint>

namespace rejoin {

constexpr std::uint64_t kLongestTimeMs = std::uint64_t{1} << 40;  // 34 years
constexpr std::chrono::milliseconds kLongestTime{kLongestTimeMs};

}  // namespace rejoin
