// Numbers that have nothing in common, of those that lie close together.
#pragma once

#include <cstdint>

namespace rejoin {

// A bijection: the finalizer of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
// 2014).
constexpr std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace rejoin
