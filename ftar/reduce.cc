#include "ftar/reduce.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/arithmetic.h"

namespace rejoin::ftar {

namespace {

using namespace arithmetic;

// Every loop is written once, always inlined, and compiled for each instruction set by a wrapper with that target.
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
    for (std::size_t i = 0; i < count; ++i) put(i, one_nan(sum_of(at(x, i), at(y, i))));
  } else {
    const Divisor<Value> mean(divisor);
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) put(i, one_nan(mean(sum_of(at(x, i), at(y, i)))));
  }
}

REJOIN_INLINE void add_all(DataType type, void* out, const void* a, const void* b, std::size_t count,
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
  add_all(type, out, a, b, count, divisor);
}

// The hardware's conversions of float16 round as ours do; the compiler does not find them by itself.
#if defined(__x86_64__)
[[gnu::target("avx2,f16c")]] void float16_f16c(void* out, const void* a, const void* b, std::size_t count,
                                               std::uint32_t divisor) {
  const __m256 scale = _mm256_set1_ps(divisor <= 1 ? 1.0f : 1.0f / static_cast<float>(divisor));
  const __m256 nan = _mm256_set1_ps(std::numeric_limits<float>::quiet_NaN());
  const auto* x = static_cast<const std::byte*>(a);
  const auto* y = static_cast<const std::byte*>(b);
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 left = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + 2 * i)));
    const __m256 right = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(y + 2 * i)));
    __m256 sum = _mm256_add_ps(left, right);
    if (divisor > 1) sum = _mm256_mul_ps(sum, scale);
    sum = _mm256_blendv_ps(sum, nan, _mm256_cmp_ps(sum, sum, _CMP_UNORD_Q));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<std::byte*>(out) + 2 * i),
                     _mm256_cvtps_ph(sum, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  generic(DataType::float16, static_cast<std::byte*>(out) + 2 * i, x + 2 * i, y + 2 * i, count - i, divisor);
}

[[gnu::target("avx2,f16c")]] void avx2(DataType type, void* out, const void* a, const void* b, std::size_t count,
                                       std::uint32_t divisor) {
  if (type == DataType::float16) return float16_f16c(out, a, b, count, divisor);
  add_all(type, out, a, b, count, divisor);
}

[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,prefer-vector-width=512")]] void avx512(
    DataType type, void* out, const void* a, const void* b, std::size_t count, std::uint32_t divisor) {
  if (type == DataType::float16) return float16_f16c(out, a, b, count, divisor);
  add_all(type, out, a, b, count, divisor);
}
#elif defined(__aarch64__)
// The generic loops are compiled for the vectors that every CPU has.
void neon(DataType type, void* out, const void* a, const void* b, std::size_t count, std::uint32_t divisor) {
  if (type != DataType::float16) return generic(type, out, a, b, count, divisor);
  const float scale = divisor <= 1 ? 1.0f : 1.0f / static_cast<float>(divisor);
  const float32x4_t nan = vdupq_n_f32(std::numeric_limits<float>::quiet_NaN());
  auto* o = static_cast<std::uint8_t*>(out);
  const auto* x = static_cast<const std::uint8_t*>(a);
  const auto* y = static_cast<const std::uint8_t*>(b);
  const auto load = [](const std::uint8_t* from) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from))); };
  std::size_t i = 0;
  for (; i + 4 <= count; i += 4) {
    float32x4_t sum = vaddq_f32(load(x + 2 * i), load(y + 2 * i));
    if (divisor > 1) sum = vmulq_n_f32(sum, scale);
    sum = vbslq_f32(vceqq_f32(sum, sum), sum, nan);
    vst1_u8(o + 2 * i, vreinterpret_u8_f16(vcvt_f16_f32(sum)));
  }
  generic(type, o + 2 * i, x + 2 * i, y + 2 * i, count - i, divisor);
}
#endif

using Add = void (*)(DataType, void*, const void*, const void*, std::size_t, std::uint32_t);

#if defined(__x86_64__)
constexpr std::string_view kSets[] = {"avx512", "avx2", "generic"};

// Of the CPU alone; whether the system saves the registers, AVX2's check says, which are the same. (clang 14 can't ask
// for F16C by its name.)
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

Add find(std::string_view name) {
  if (name == "generic") return generic;
  const bool has_avx2 = __builtin_cpu_supports("avx2") && has_f16c();
  if (name == "avx2" && has_avx2) return avx2;
  if (name == "avx512" && has_avx2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return avx512;
  return nullptr;
}
#elif defined(__aarch64__)
constexpr std::string_view kSets[] = {"neon", "generic"};
Add find(std::string_view name) { return name == "neon" ? neon : name == "generic" ? generic : nullptr; }
#else
constexpr std::string_view kSets[] = {"generic"};
Add find(std::string_view name) { return name == "generic" ? generic : nullptr; }
#endif

std::string_view choose() {
  return *std::ranges::find_if(kSets, [](std::string_view name) { return find(name) != nullptr; });
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
