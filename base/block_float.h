// Block floating point, number by number: the same code, and the same bits, on every CPU and GPU. A block is 64 bytes
// of elements (16 of float32, 32 of the 16-bit types). It is coded as whole numbers of 8 or 4 bits and one byte that
// says by which power of two they are to be multiplied: the smallest with which the largest element fits. So an
// element's error is at most half that power of two, which is at most 1/127.5 (8 bits) or 1/7.5 (4 bits) of the block's
// largest. What is decoded fits every type exactly. (OCP's Microscaling formats have such scales, too.)
//
// Infinities and NaNs stay what they are, but the other elements of their block become NaNs. So do those beside an
// element of so large a magnitude (above 1.875 × 2¹²⁷ at least) that it would be rounded up to an infinity: it becomes
// that. Below 2⁻¹²⁶ the power of two grows no smaller, so that the error is at most 2⁻¹²⁷ there.
#pragma once

#include <algorithm>

#include "base/arithmetic.h"

namespace rejoin::block_float {

constexpr std::size_t kBlock = 64;  // bytes of elements
constexpr std::uint32_t kNotFinite = 255;
constexpr float kMagic =
    0x1.8p23f;  // what is added to it is rounded to a whole number, to the nearest and then to even

// By the bits of the largest magnitude: the scale's byte, which is its exponent as float32 has it.
template <unsigned kBits>
REJOIN_INLINE std::uint32_t scale_byte(std::uint32_t largest) {
  constexpr std::uint32_t smaller = kBits == 8 ? 6 : 2;  // of the largest: a power of two of the largest whole number
  // From 127.5, resp. 7.5, times the scale on the next one is needed: rounding up this far carries into the exponent.
  constexpr std::uint32_t carry = std::uint32_t{1} << (kBits == 8 ? 16 : 20);
  const std::uint32_t exponent = (largest + carry) >> 23;
  const std::uint32_t byte = exponent > smaller ? exponent - smaller : 1;
  return exponent >= 255 ? kNotFinite : byte;
}

REJOIN_INLINE float scale(std::uint32_t byte) { return std::bit_cast<float>(byte << 23); }
REJOIN_INLINE float inverse(std::uint32_t byte) { return std::bit_cast<float>((254 - byte) << 23); }

REJOIN_INLINE std::uint32_t magnitude(float value) { return std::bit_cast<std::uint32_t>(value) & 0x7fffffff; }

// Of a block that is finite: kMagic and the whole number, which the sum's low bits hold.
REJOIN_INLINE float coded(float value, float inverse) { return value * inverse + kMagic; }
REJOIN_INLINE float decoded(float coded, float scale) { return (coded - kMagic) * scale; }

// Of one that is not.
template <unsigned kBits>
REJOIN_INLINE int coded_not_finite(float value) {
  if (magnitude(value) > 0x7f800000 || scale_byte<kBits>(magnitude(value)) != kNotFinite) return 0;
  return value > 0 ? 1 : -1;
}
REJOIN_INLINE float decoded_not_finite(int code) {
  return std::bit_cast<float>(code == 0 ? 0x7fc00000u : code > 0 ? 0x7f800000u : 0xff800000u);
}

}  // namespace rejoin::block_float
