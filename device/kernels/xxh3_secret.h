// XXH3's default secret, a constant of the algorithm: 192 bytes, here as 64-bit words, little-endian.
#pragma once

#include <cstdint>

namespace rejoin::device::kernels::xxh3 {

// The eight bytes from `at` on. (The words are inside, since a GPU's code sees no constants of the host's.)
constexpr inline std::uint64_t secret(unsigned at) {
  constexpr std::uint64_t words[24] = {
      0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb,
      0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088,
      0x4ef90da297486471, 0xd8acdea946ef1938, 0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a,
      0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
      0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
  };
  const unsigned shift = at % 8 * 8;
  const std::uint64_t low = words[at / 8];
  return shift == 0 ? low : (low >> shift) | (words[at / 8 + 1] << (64 - shift));
}

}  // namespace rejoin::device::kernels::xxh3
