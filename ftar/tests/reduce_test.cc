#include "ftar/reduce.h"

#include <gtest/gtest.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "base/digest.h"
#include "base/start_thread.h"

namespace rejoin::ftar {
namespace {

constexpr std::string_view kSets[] = {"generic", "avx2", "avx512", "neon"};

// Decodes by definition (sign, exponent, mantissa), not by the code under test.
double decode(DataType type, const std::byte* at) {
  const auto as = [&]<typename T>(T value) {
    std::memcpy(&value, at, sizeof value);
    return value;
  };
  const auto small = [&](int exponent_bits, int mantissa_bits) {
    const auto bits = as(std::uint16_t{});
    const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const double sign = (bits & 0x8000) ? -1.0 : 1.0;
    if (exponent == (1 << exponent_bits) - 1)
      return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
  };
  switch (type) {
    case DataType::float32: return as(float{});
    case DataType::float64: return as(double{});
    case DataType::bfloat16: return small(8, 7);
    case DataType::float16: return small(5, 10);
    case DataType::int32: return as(std::int32_t{});
    case DataType::int64: return static_cast<double>(as(std::int64_t{}));
  }
  return 0;
}

std::vector<std::byte> noise(DataType type, std::size_t count, std::uint64_t seed, bool any_bits) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(count * size_of(type) + 1);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t bits = random();
    if (!any_bits && type == DataType::float32) {
      const auto value = static_cast<float>(static_cast<double>(static_cast<std::int64_t>(bits)) * 1e-18);
      std::memcpy(&bits, &value, sizeof value);
    }
    if (!any_bits && type == DataType::float64) {
      const double value = static_cast<double>(static_cast<std::int64_t>(bits)) * 1e-18;
      std::memcpy(&bits, &value, sizeof value);
    }
    if (!any_bits && type == DataType::bfloat16) bits = (bits & 0x80ff) | 0x3f00;
    if (!any_bits && type == DataType::float16) bits = (bits & 0x83ff) | 0x3800;
    if (!any_bits && type == DataType::int64) bits &= 0xffffffffff;
    if (!any_bits && type == DataType::int32) bits &= 0x1fffffff;
    std::memcpy(bytes.data() + i * size_of(type), &bits, size_of(type));
  }
  return bytes;
}

// The nearest value of the type to `exact`, as a distance bound: half a unit in the last place.
double tolerance(DataType type, double exact) {
  switch (type) {
    case DataType::float32: return std::abs(exact) * std::ldexp(1, -23) + 1e-45;
    case DataType::float64: return std::abs(exact) * std::ldexp(1, -52);
    case DataType::bfloat16: return std::abs(exact) * std::ldexp(1.01, -8) + 1e-40;
    case DataType::float16: return std::abs(exact) * std::ldexp(1.01, -11) + std::ldexp(1, -25);
    default: return 1;  // integer division towards zero
  }
}

TEST(Reduce, AddsEveryTypeAtEveryLengthAndAlignment) {
  for (auto type : kDataTypes)
    for (auto set : kSets)
      for (std::uint32_t divisor : {0u, 3u})
        for (std::size_t count : {0, 1, 3, 7, 8, 15, 16, 31, 33, 64, 1000}) {
          auto a = noise(type, count, count * 7 + divisor, false), b = noise(type, count, count * 13 + 1, false);
          std::vector<std::byte> shifted(a.size() + 1), out(a.size() + 3, std::byte{0xcd});
          std::memcpy(shifted.data() + 1, a.data(), a.size());
          if (!add_with(set, type, out.data() + 1, shifted.data() + 1, b.data(), count, divisor)) continue;
          for (std::size_t i = 0; i < count; ++i) {
            const auto at = i * size_of(type);
            const double sum = decode(type, a.data() + at) + decode(type, b.data() + at);
            const double exact = divisor ? sum / divisor : sum;
            ASSERT_NEAR(decode(type, out.data() + 1 + at), exact, tolerance(type, exact))
                << to_string(type) << " " << set << " element " << i << " of " << count;
          }
          ASSERT_EQ(out[0], std::byte{0xcd});
          ASSERT_EQ(out[1 + count * size_of(type)], std::byte{0xcd}) << "wrote past the end";
        }
}

TEST(Reduce, AllInstructionSetsGiveTheSameBitsForAnyBits) {
  std::uint64_t of_all = 0;
  for (auto type : kDataTypes)
    for (std::uint32_t divisor : {0u, 2u, 3u}) {
      constexpr std::size_t count = 20011;
      auto a = noise(type, count, 5, true), b = noise(type, count, 6, true);
      for (std::size_t i = 0; i < count; i += 1 + i % 7) {  // of floating types two NaNs, of which one is negative
        const std::size_t at = i * size_of(type);
        std::fill_n((i % 2 == 0 ? a : b).begin() + static_cast<std::ptrdiff_t>(at), size_of(type), std::byte{0xff});
        std::fill_n((i % 2 == 0 ? b : a).begin() + static_cast<std::ptrdiff_t>(at), size_of(type), std::byte{0x7f});
      }
      std::vector<std::byte> expected(a.size()), got(a.size());
      ASSERT_TRUE(add_with("generic", type, expected.data(), a.data(), b.data(), count, divisor));
      of_all = combine_digests(of_all, digest(expected));
      for (auto set : kSets) {
        if (!add_with(set, type, got.data(), a.data(), b.data(), count, divisor)) continue;
        for (std::size_t i = 0; i < count; ++i) {
          const auto at = i * size_of(type);
          ASSERT_EQ(std::memcmp(got.data() + at, expected.data() + at, size_of(type)), 0)
              << to_string(type) << " " << set << " element " << i << ": " << decode(type, got.data() + at);
        }
      }
    }
  EXPECT_EQ(of_all, 0x5f0d80f20cfcc6ceull) << "other CPUs give other bits";
}

// As -ffast-math has it of programs that are linked with it.
void flush_subnormals() {
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);
#elif defined(__aarch64__)
  std::uint64_t control = 0;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  asm volatile("msr fpcr, %0" ::"r"(control | (1u << 24)));
#endif
}

// A trainer, or a library that it loads, may have been told to flush what is subnormal to zero; other replicas' not.
TEST(Reduce, ThreadsOfTheLibraryRoundTheSameWhateverTheirStarterDoes) {
  constexpr float subnormal = 0x1p-140f;
  float sum = 0;
  std::fenv_t former;
  ASSERT_EQ(std::fegetenv(&former), 0);
  std::fesetround(FE_TOWARDZERO);
  flush_subnormals();
  std::thread thread;
  const auto started = start_thread(thread, [&] { add(DataType::float32, &sum, &subnormal, &subnormal, 1); });
  std::fesetenv(&former);
  ASSERT_TRUE(started);
  thread.join();
  EXPECT_EQ(sum, 0x1p-139f);
}

TEST(Reduce, SixteenBitTypesRoundToNearestEven) {
  const auto bf16 = [](std::uint16_t a, std::uint16_t b) {
    std::uint16_t out = 0;
    add(DataType::bfloat16, &out, &a, &b, 1);
    return out;
  };
  EXPECT_EQ(bf16(0x3f80, 0x3b80), 0x3f80);  // 1 + 2^-8: a tie, to even
  EXPECT_EQ(bf16(0x3f81, 0x3b80), 0x3f82);  // the tie above an odd one goes up
  EXPECT_EQ(bf16(0x7f7f, 0x7f7f), 0x7f80);  // overflow is infinity
  const auto f16 = [](std::uint16_t a, std::uint16_t b) {
    std::uint16_t out = 0;
    add(DataType::float16, &out, &a, &b, 1);
    return out;
  };
  EXPECT_EQ(f16(0x3c00, 0x1000), 0x3c00);  // 1 + 2^-11
  EXPECT_EQ(f16(0x0001, 0x0001), 0x0002);  // subnormals
  EXPECT_EQ(f16(0x7bff, 0x7bff), 0x7c00);
}

TEST(Reduce, IntegersWrapAndDivideTowardsZero) {
  const std::int32_t a[] = {std::numeric_limits<std::int32_t>::max(), -5}, b[] = {1, -2};
  std::int32_t out[2];
  add(DataType::int32, out, a, b, 2);
  EXPECT_EQ(out[0], std::numeric_limits<std::int32_t>::min());
  add(DataType::int32, out, a, b, 2, 2);
  EXPECT_EQ(out[1], -3);
}

}  // namespace
}  // namespace rejoin::ftar
