// The arithmetic of an all-reduce, element by element: the same code, and the same bits, on every CPU and GPU, NaNs
// included. Compilers must not contract any of it into fused multiply-adds: -ffp-contract=off, nvcc's -fmad=false. The
// thread rounds to nearest, and flushes nothing to zero (base/start_thread.h).
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "base/types.h"

namespace rejoin::arithmetic {

// Loops over these are compiled for several instruction sets, so none may be a function of its own.
#define REJOIN_INLINE [[gnu::always_inline]] constexpr inline

REJOIN_INLINE float from_bfloat16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

REJOIN_INLINE std::uint16_t to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const std::uint32_t quiet_nan = (bits >> 16) | 0x40;
  return static_cast<std::uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded);
}

REJOIN_INLINE float from_float16(std::uint16_t half) {
  const std::uint32_t sign = std::uint32_t{half & 0x8000u} << 16;
  const std::uint32_t exponent = (half >> 10) & 0x1f, mantissa = half & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa × 2⁻²⁴, exact in float
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | sign);
  }
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

REJOIN_INLINE std::uint16_t to_float16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000);
  const std::uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<std::uint16_t>(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));
  if (magnitude >= 0x477ff000) return static_cast<std::uint16_t>(sign | 0x7c00);  // rounds to infinity
  if (magnitude < 0x38800000) {  // subnormal: round in units of 2⁻²⁴
    const float units = std::bit_cast<float>(magnitude) * 0x1p24f;
    const float rounded = (units + 0x1p23f) - 0x1p23f;  // to nearest even, as the addition rounds
    return static_cast<std::uint16_t>(sign | static_cast<std::uint16_t>(rounded));
  }
  const std::uint32_t rebased = magnitude - (112u << 23);
  return static_cast<std::uint16_t>(sign | ((rebased + 0xfff + ((rebased >> 13) & 1)) >> 13));
}

// An element as it is stored and as it is added.
template <typename T>
struct Plain {
  using Storage = T;
  using Value = T;
  static constexpr Value kMost = std::numeric_limits<T>::max();  // that is finite
  REJOIN_INLINE static Value load(Storage s) { return s; }
  REJOIN_INLINE static Storage store(Value v) { return v; }
};
struct Bfloat16 {
  using Storage = std::uint16_t;
  using Value = float;
  static constexpr Value kMost = 0x1.fep127f;
  REJOIN_INLINE static Value load(Storage s) { return from_bfloat16(s); }
  REJOIN_INLINE static Storage store(Value v) { return to_bfloat16(v); }
};
struct Float16 {
  using Storage = std::uint16_t;
  using Value = float;
  static constexpr Value kMost = 65504;
  REJOIN_INLINE static Value load(Storage s) { return from_float16(s); }
  REJOIN_INLINE static Storage store(Value v) { return to_float16(v); }
};

template <typename T>
REJOIN_INLINE T sum_of(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));  // wraps; overflow is the user's, not undefined
  } else {
    return a + b;
  }
}

// Which of two NaNs an addition gives is up to the compiler on a CPU, and a GPU gives one of its own: a result that is
// none of the numbers is always the same one.
template <typename T>
REJOIN_INLINE T one_nan(T value) {
  if constexpr (std::is_floating_point_v<T>) return value == value ? value : std::numeric_limits<T>::quiet_NaN();
  else return value;
}

// What turns a sum into a mean. Made once for many elements.
template <typename Value>
struct Divisor {
  Value by;  // of integers: what to divide by; else its reciprocal
  REJOIN_INLINE explicit Divisor(std::uint32_t n)
      : by(std::is_integral_v<Value> ? static_cast<Value>(n) : Value{1} / static_cast<Value>(n)) {}
  REJOIN_INLINE Value operator()(Value sum) const {
    if constexpr (std::is_integral_v<Value>) return sum / by;
    else return sum * by;
  }
};

// Calls `with` with the element type's traits.
template <typename With>
REJOIN_INLINE void dispatch(DataType type, With with) {
  switch (type) {
    case DataType::float32: return with(Plain<float>{});
    case DataType::float64: return with(Plain<double>{});
    case DataType::bfloat16: return with(Bfloat16{});
    case DataType::float16: return with(Float16{});
    case DataType::int32: return with(Plain<std::int32_t>{});
    case DataType::int64: return with(Plain<std::int64_t>{});
  }
}

}  // namespace rejoin::arithmetic
