#include "ftar/reduce.h"

#include <immintrin.h>

#include <bit>
#include <cmath>
#include <cstring>

namespace rejoin::ftar {

namespace {

// Every loop is written once, always inlined, and compiled for each instruction set by a wrapper with that target.
// No expression here can be fused into a multiply-add, so that all of them round alike.
#define REJOIN_INLINE [[gnu::always_inline]] inline

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

template <typename T>
struct Plain {
  using Storage = T;
  using Value = T;
  REJOIN_INLINE static Value load(Storage s) { return s; }
  REJOIN_INLINE static Storage store(Value v) { return v; }
};
struct Bfloat16 {
  using Storage = std::uint16_t;
  using Value = float;
  REJOIN_INLINE static Value load(Storage s) { return from_bfloat16(s); }
  REJOIN_INLINE static Storage store(Value v) { return to_bfloat16(v); }
};
struct Float16 {
  using Storage = std::uint16_t;
  using Value = float;
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

template <typename Element>
REJOIN_INLINE void loop(void* out, const void* a, const void* b, std::size_t count, std::uint32_t divisor) {
  using Storage = typename Element::Storage;
  using Value = typename Element::Value;
  auto* o = static_cast<std::byte*>(out);
  const auto* x = static_cast<const std::byte*>(a);
  const auto* y = static_cast<const std::byte*>(b);
  const auto at = [](const std::byte* base, std::size_t i) {
    Storage value;
    std::memcpy(&value, base + i * sizeof value, sizeof value);
    return Element::load(value);
  };
  const auto put = [&](std::size_t i, Value value) {
    const Storage stored = Element::store(value);
    std::memcpy(o + i * sizeof stored, &stored, sizeof stored);
  };
  if (divisor <= 1) {
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) put(i, sum_of(at(x, i), at(y, i)));
  } else if constexpr (std::is_integral_v<Value>) {
    for (std::size_t i = 0; i < count; ++i) put(i, sum_of(at(x, i), at(y, i)) / static_cast<Value>(divisor));
  } else {
    const Value scale = Value{1} / static_cast<Value>(divisor);
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) put(i, sum_of(at(x, i), at(y, i)) * scale);
  }
}

REJOIN_INLINE void dispatch(DataType type, void* out, const void* a, const void* b, std::size_t count,
                            std::uint32_t divisor) {
  switch (type) {
    case DataType::float32: return loop<Plain<float>>(out, a, b, count, divisor);
    case DataType::float64: return loop<Plain<double>>(out, a, b, count, divisor);
    case DataType::bfloat16: return loop<Bfloat16>(out, a, b, count, divisor);
    case DataType::float16: return loop<Float16>(out, a, b, count, divisor);
    case DataType::int32: return loop<Plain<std::int32_t>>(out, a, b, count, divisor);
    case DataType::int64: return loop<Plain<std::int64_t>>(out, a, b, count, divisor);
  }
}

void generic(DataType type, void* out, const void* a, const void* b, std::size_t count, std::uint32_t divisor) {
  dispatch(type, out, a, b, count, divisor);
}

// The hardware's conversions of float16 round as ours do; the compiler does not find them by itself.
[[gnu::target("avx2,f16c")]] void float16_f16c(void* out, const void* a, const void* b, std::size_t count,
                                               std::uint32_t divisor) {
  const __m256 scale = _mm256_set1_ps(divisor <= 1 ? 1.0f : 1.0f / static_cast<float>(divisor));
  const auto* x = static_cast<const std::byte*>(a);
  const auto* y = static_cast<const std::byte*>(b);
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 left = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + 2 * i)));
    const __m256 right = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(y + 2 * i)));
    __m256 sum = _mm256_add_ps(left, right);
    if (divisor > 1) sum = _mm256_mul_ps(sum, scale);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<std::byte*>(out) + 2 * i),
                     _mm256_cvtps_ph(sum, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  generic(DataType::float16, static_cast<std::byte*>(out) + 2 * i, x + 2 * i, y + 2 * i, count - i, divisor);
}

[[gnu::target("avx2,f16c")]] void avx2(DataType type, void* out, const void* a, const void* b, std::size_t count,
                                       std::uint32_t divisor) {
  if (type == DataType::float16) return float16_f16c(out, a, b, count, divisor);
  dispatch(type, out, a, b, count, divisor);
}

[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,prefer-vector-width=512")]] void avx512(
    DataType type, void* out, const void* a, const void* b, std::size_t count, std::uint32_t divisor) {
  if (type == DataType::float16) return float16_f16c(out, a, b, count, divisor);
  dispatch(type, out, a, b, count, divisor);
}

using Add = void (*)(DataType, void*, const void*, const void*, std::size_t, std::uint32_t);

Add find(std::string_view name) {
  if (name == "generic") return generic;
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (name == "avx2" && has_avx2) return avx2;
  if (name == "avx512" && has_avx2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return avx512;
  return nullptr;
}

std::string_view choose() {
  for (std::string_view name : {"avx512", "avx2"})
    if (find(name) != nullptr) return name;
  return "generic";
}

const std::string_view chosen_name = choose();
const Add chosen = find(chosen_name);

}  // namespace

void add(DataType type, void* out, const void* a, const void* b, std::size_t count, std::uint32_t divisor) {
  chosen(type, out, a, b, count, divisor);
}

std::string_view instruction_set() { return chosen_name; }

bool add_with(std::string_view name, DataType type, void* out, const void* a, const void* b, std::size_t count,
              std::uint32_t divisor) {
  const Add with = find(name);
  if (with == nullptr) return false;
  with(type, out, a, b, count, divisor);
  return true;
}

}  // namespace rejoin::ftar
