// Block floating point, number by number: the same code, and the same bits, on every CPU and GPU. A block is 64 bytes
// of elements (16 of float32, 32 of the 16-bit types). It is coded as whole numbers of 8 or 4 bits and a scale, by
// which they are to be multiplied: about the smallest with which the largest element fits. An element's error is at
// most half the scale. Scales have so few digits that what is decoded fits every type exactly:
//  - of 8 bits, a power of two, in a byte (OCP's Microscaling formats have such, too): at most 1/63.75 of the largest;
//  - of 4 bits, a number of five binary digits, in two bytes: at most 1/7 of the largest.
//
// Infinities and NaNs stay what they are, but the other elements of their block become NaNs. So do, in 8 bits, those
// beside an element of so large a magnitude (255/128 × 2¹²⁷) that it would be rounded up to an infinity: it becomes
// that. Scales are not below 2⁻¹²⁶, so that the error is at most 2⁻¹²⁷ there. Where a float16 of 65,280 or more is in
// its block, magnitudes above 64,512 are coded as that, in 8 bits: rounded to the nearest they would be infinities.
#pragma once

#include <algorithm>
#include <type_traits>

#include "base/arithmetic.h"

namespace rejoin::block_float {

constexpr std::size_t kBlock = 64;  // bytes of elements
constexpr float kMagic =
    0x1.8p23f;  // what is added to it is rounded to a whole number, to the nearest and then to even

// A scale as it is stored, by the bits of the largest magnitude.
template <unsigned kBits>
REJOIN_INLINE std::uint32_t scale_word(std::uint32_t largest) {
  if constexpr (kBits == 8) {  // its exponent as float32 has it
    // From 127.5 times the scale on the next one is needed: rounding up this far carries into the exponent.
    const std::uint32_t exponent = (largest + (1u << 16)) >> 23;
    const std::uint32_t word = exponent > 6 ? exponent - 6 : 1;
    return exponent >= 255 ? 0xff : word;
  } else {  // the upper half of it as float32, rounded up to four digits behind the point
    // The largest is at most 7.45 times as large, which is rounded to 7 whatever the last bits of the reciprocal are.
    const auto bits = std::bit_cast<std::uint32_t>(std::bit_cast<float>(largest) * (1 / 7.45f));
    const std::uint32_t rounded = (bits + 0x7ffff) >> 19 << 3;
    return largest >= 0x7f800000 ? 0x7f80 : std::max(rounded, 0x80u);
  }
}
template <unsigned kBits>
constexpr std::uint32_t kNotFinite = kBits == 8 ? 0xff : 0x7f80;

template <unsigned kBits>
REJOIN_INLINE float scale(std::uint32_t word) {
  return std::bit_cast<float>(word << (kBits == 8 ? 23 : 16));
}
template <unsigned kBits>
REJOIN_INLINE float inverse(std::uint32_t word) {
  if constexpr (kBits == 8) return std::bit_cast<float>((254 - word) << 23);
  else return 1.0f / scale<4>(word);
}

// Of a block whose largest magnitude has at least the bits kTop: what is finite in the type is so when it is decoded.
template <typename Element, unsigned kBits>
constexpr bool kTopIsRoundedUp = kBits == 8 && std::is_same_v<Element, arithmetic::Float16>;
constexpr std::uint32_t kTop = std::bit_cast<std::uint32_t>(65280.0f);
REJOIN_INLINE float below_top(float value) {
  constexpr float most = 63 * 1024.0f, infinite = 65520.0f;  // from here on float16 has none but infinities
  return value > -infinite && value < infinite ? std::clamp(value, -most, most) : value;
}

REJOIN_INLINE std::uint32_t magnitude(float value) { return std::bit_cast<std::uint32_t>(value) & 0x7fffffff; }

// Of a block that is finite: kMagic and the whole number, which the sum's low bits hold. Of a float, or a vector of
// them.
template <typename Values>
REJOIN_INLINE void code(Values& values, float inverse) {
  values = values * inverse + kMagic;
}
template <typename Values>
REJOIN_INLINE void decode(Values& coded, float scale) {
  coded = (coded - kMagic) * scale;
}

// Of one that is not.
template <unsigned kBits>
REJOIN_INLINE int coded_not_finite(float value) {
  if (magnitude(value) > 0x7f800000 || scale_word<kBits>(magnitude(value)) != kNotFinite<kBits>) return 0;
  return value > 0 ? 1 : -1;
}
REJOIN_INLINE float decoded_not_finite(int code) {
  return std::bit_cast<float>(code == 0 ? 0x7fc00000u : code > 0 ? 0x7f800000u : 0xff800000u);
}

}  // namespace rejoin::block_float
