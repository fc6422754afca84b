// Coded chunks, element by element: how far what is decoded is from what was coded.
#include "ftar/coding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "base/arithmetic.h"
#include "base/bytes.h"
#include "base/digest.h"

namespace rejoin::ftar::coding {
namespace {

constexpr std::string_view kSets[] = {"generic", "avx2", "avx512", "neon"};
constexpr DataType kTypes[] = {DataType::float32, DataType::bfloat16, DataType::float16};
constexpr Width kWidths[] = {Width::eight, Width::four};
const float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

float load(DataType type, const std::byte* at) {
  if (type == DataType::float32) {
    float value = 0;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, at, sizeof bits);
  return type == DataType::bfloat16 ? arithmetic::from_bfloat16(bits) : arithmetic::from_float16(bits);
}

Bytes stored(DataType type, const std::vector<float>& values) {
  Bytes bytes;
  for (const float value : values) {
    if (type == DataType::float32) put(bytes, value);
    else put(bytes, type == DataType::bfloat16 ? arithmetic::to_bfloat16(value) : arithmetic::to_float16(value));
  }
  return bytes;
}

std::vector<float> loaded(DataType type, const Bytes& bytes) {
  std::vector<float> values;
  for (std::size_t at = 0; at < bytes.size(); at += size_of(type)) values.push_back(load(type, bytes.data() + at));
  return values;
}

struct Made {
  Bytes coded, out, residual;
  Loss loss;
};

// Nothing where this CPU lacks the instructions. What lies behind what may be written stays as it was.
std::optional<Made> code(std::string_view set, Pass pass, bool mean_of_three = false) {
  const std::size_t bytes = pass.count * size_of(pass.type), coded = coded_bytes(pass.type, bytes, pass.width);
  Made made{
      Bytes(coded + 1, std::byte{0xcd}), Bytes(bytes + 1, std::byte{0xcd}), Bytes(bytes + 1, std::byte{0xcd}), {}};
  pass.coded = made.coded.data();
  pass.out = made.out.data();
  pass.residual = made.residual.data();
  pass.divisor = mean_of_three ? 3 : 0;
  if (!run_with(set, pass, made.loss)) return std::nullopt;
  for (Bytes* all : {&made.coded, &made.out, &made.residual}) {
    EXPECT_EQ(all->back(), std::byte{0xcd}) << "wrote past the end";
    all->pop_back();
  }
  return made;
}

// Values of all kinds: usual ones, of magnitudes far from each other, tiny, huge and zeros.
std::vector<std::vector<float>> kinds(std::size_t count) {
  std::mt19937_64 random(count);
  std::normal_distribution<float> normal;
  const auto made = [&](auto next) {
    std::vector<float> values(count);
    for (auto& value : values) value = next();
    return values;
  };
  return {made([&] { return normal(random); }),
          made([&] { return std::ldexp(normal(random), static_cast<int>(random() % 40) - 20); }),
          made([&] { return std::ldexp(normal(random), static_cast<int>(random() % 260) - 150); }),
          made([&] { return normal(random) * 1e-40f; }),
          made([&] { return std::bit_cast<float>((static_cast<std::uint32_t>(random()) & 0x807fffff) | 0x7f000000); }),
          made([&] { return random() % 5 == 0 ? normal(random) : 0.0f; }),
          std::vector<float>(count, 0.0f),
          std::vector<float>(count, std::numeric_limits<float>::max())};
}

// Half a scale, which is the power of two with which the block's largest fits; and never below half of 2⁻¹²⁶.
double bound(std::span<const float> block, Width width) {
  double largest = 0;
  for (const float value : block) largest = std::max(largest, std::abs(static_cast<double>(value)));
  return std::max(largest / (width == Width::eight ? 127.5 : 14.0), std::ldexp(1, -127));
}

TEST(Coding, EveryElementIsWithinTheBoundOfItsBlock) {
  for (const auto type : kTypes)
    for (const auto width : kWidths)
      for (const auto set : kSets)
        for (const std::size_t count : {1u, 7u, 16u, 31u, 32u, 33u, 1000u, 4099u})
          for (const auto& values : kinds(count)) {
            const Bytes own = stored(type, values);
            const auto given = loaded(type, own);
            if (!std::all_of(given.begin(), given.end(), [](float v) { return std::isfinite(v); })) continue;
            const auto made = code(set, {.type = type, .count = count, .own = own.data(), .width = width});
            if (!made) continue;
            Bytes decoded(own.size() + 1, std::byte{0xcd});
            ASSERT_TRUE(decode_with(set, type, width, decoded.data(), made->coded.data(), count));
            ASSERT_EQ(decoded.back(), std::byte{0xcd});
            decoded.pop_back();
            ASSERT_EQ(decoded, made->out) << "whoever codes has what the others decode";
            const auto got = loaded(type, decoded);
            const std::size_t block = kPlainBlock / size_of(type);
            for (std::size_t first = 0; first < count; first += block) {
              const std::size_t end = std::min(count, first + block);
              // The smallest of float16 lie 2⁻²⁴ apart.
              const std::span<const float> its(given.begin() + static_cast<std::ptrdiff_t>(first),
                                               given.begin() + static_cast<std::ptrdiff_t>(end));
              // What would be rounded up to an infinity becomes one.
              const double least = width == Width::eight ? std::ldexp(255.0 / 128, 127) : kInfinity;
              const auto too_large = [&](float value) { return std::abs(value) >= least; };
              if (std::ranges::any_of(its, too_large)) {
                for (std::size_t i = first; i < end; ++i)
                  ASSERT_TRUE(too_large(given[i]) ? got[i] == std::copysign(kInfinity, given[i]) : std::isnan(got[i]));
                continue;
              }
              const double most = bound(its, width) + (type == DataType::float16 ? std::ldexp(1, -25) : 0);
              for (std::size_t i = first; i < end; ++i)
                ASSERT_LE(std::abs(static_cast<double>(got[i]) - given[i]), most)
                    << to_string(type) << " " << static_cast<int>(width) << " bits, " << set << ", element " << i
                    << " of " << count << ": " << given[i];
            }
          }
}

TEST(Coding, WhatIsLostIsKeptExactlyWhereTheTypeHoldsIt) {
  for (const auto width : kWidths) {
    for (const auto& values : kinds(1001)) {
      if (std::ranges::any_of(values, [](float value) { return std::abs(value) > 1e38f; })) continue;
      const Bytes own = stored(DataType::float32, values);
      const auto made = code("generic", {.count = values.size(), .own = own.data(), .width = width});
      const auto got = loaded(DataType::float32, made->out), lost = loaded(DataType::float32, made->residual);
      for (std::size_t i = 0; i < values.size(); ++i)
        ASSERT_EQ(static_cast<double>(got[i]) + lost[i], static_cast<double>(values[i])) << i;
    }
  }
}

TEST(Coding, RoundsToTheNearestAndTiesToEven) {
  std::vector<float> values{127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f, 0.50001f};
  const Bytes own = stored(DataType::float32, values);
  const auto made = code("generic", {.count = values.size(), .own = own.data(), .width = Width::eight});
  EXPECT_EQ(loaded(DataType::float32, made->out), (std::vector<float>{127, 0, 2, 2, 0, -2, -2, 1}));
}

TEST(Coding, WhatIsFiniteInFloat16StaysSo) {
  const auto type = DataType::float16;
  const std::vector<float> values{65504, 65472, 65280, 65248, 65024, 64992, 64512, 64480, -65504, 1000, 0};
  const Bytes own = stored(type, values);
  for (const auto set : kSets)
    for (const auto width : kWidths) {
      const auto made = code(set, {.type = type, .count = values.size(), .own = own.data(), .width = width});
      if (!made) continue;
      const auto got = loaded(type, made->out), lost = loaded(type, made->residual);
      for (std::size_t i = 0; i < values.size(); ++i) {
        EXPECT_LE(std::abs(got[i] - values[i]), width == Width::eight ? 1024.0f : 65504.0f / 14) << values[i];
        EXPECT_EQ(got[i] + lost[i], values[i]);
      }
    }
  // What is none of its numbers is an infinity, as it is uncoded.
  const Bytes half = stored(type, std::vector<float>(3, 32768.0f));
  const auto made =
      code("generic", {.type = type, .count = 3, .own = half.data(), .arrived = half.data(), .width = Width::eight});
  for (const float sum : loaded(type, made->out)) EXPECT_EQ(sum, kInfinity);
}

TEST(Coding, AllInstructionSetsGiveTheSameBitsForAnyBits) {
  constexpr std::size_t count = 20011;
  std::uint64_t of_all = 0;
  std::mt19937_64 random(3);
  for (const auto type : kTypes) {
    Bytes own(count * size_of(type)), before(own.size()), arrived(own.size());
    for (Bytes* all : {&own, &before, &arrived})
      for (auto& byte : *all) byte = static_cast<std::byte>(random());
    for (const auto arrived_width : {Width::plain, Width::eight, Width::four})
      for (const auto width : kWidths)
        for (const bool mean : {false, true}) {
          const Pass pass{.type = type,
                          .count = count,
                          .own = own.data(),
                          .arrived = arrived.data(),
                          .arrived_width = arrived_width,
                          .feedback = before.data(),
                          .times = 1.5f,
                          .width = width};
          const auto expected = code("generic", pass, mean);
          of_all = combine_digests(combine_digests(of_all, digest(expected->coded)), digest(expected->out));
          for (const auto set : kSets) {
            const auto got = code(set, pass, mean);
            if (!got) continue;
            ASSERT_EQ(got->coded, expected->coded) << to_string(type) << " " << set;
            ASSERT_EQ(got->out, expected->out) << to_string(type) << " " << set;
            const auto lost = loaded(type, got->residual), expected_lost = loaded(type, expected->residual);
            for (std::size_t i = 0; i < count; ++i)  // a NaN's payload is not said
              if (!std::isnan(lost[i]) || !std::isnan(expected_lost[i])) ASSERT_EQ(lost[i], expected_lost[i]) << i;
          }
        }
  }
  EXPECT_EQ(of_all, 0x5fbacb77a0dfa0e9ull) << "other CPUs give other bits";
}

TEST(Coding, InfinitiesAndNansStayAndTheOthersOfTheirBlockBecomeNans) {
  for (const auto type : kTypes)
    for (const auto width : kWidths) {
      const std::size_t block = kPlainBlock / size_of(type), count = 3 * block;
      std::vector<float> values(count, 2.0f), before(count, 0.25f);
      values[block + 1] = kInfinity, values[block + 2] = -kInfinity, values[block + 3] = kNan;
      const Bytes own = stored(type, values), feedback = stored(type, before);
      const auto made = code(
          "generic",
          {.type = type, .count = count, .own = own.data(), .feedback = feedback.data(), .times = 2, .width = width});
      const auto got = loaded(type, made->out), lost = loaded(type, made->residual);
      for (std::size_t i = 0; i < count; ++i) {
        if (i / block != 1) {
          EXPECT_NEAR(got[i], 2.5, 2.5 / 14) << i;
          EXPECT_EQ(got[i] + lost[i], 2.5f) << i;
          continue;
        }
        if (i == block + 1) EXPECT_EQ(got[i], kInfinity);
        else if (i == block + 2) EXPECT_EQ(got[i], -kInfinity);
        else EXPECT_TRUE(std::isnan(got[i])) << i;
        EXPECT_EQ(lost[i], 0.5f) << "what was lost before is kept";
      }
      EXPECT_TRUE(std::isfinite(made->loss.lost)) << "it says nothing of what coding loses";
    }
}

TEST(Coding, WhatIsKeptIsFiniteHoweverManyTimesItCounts) {
  const auto type = DataType::float16;
  const std::size_t count = kPlainBlock / size_of(type);
  std::vector<float> values(count, 1.0f), before(count, -60000.0f);
  values[3] = kInfinity;
  const Bytes own = stored(type, values), feedback = stored(type, before);
  for (const auto width : kWidths) {
    const Pass pass{
        .type = type, .count = count, .own = own.data(), .feedback = feedback.data(), .times = 2, .width = width};
    for (const float lost : loaded(type, code("generic", pass)->residual)) EXPECT_EQ(lost, -65504.0f);
  }
}

// Not a bit of difference to ftar::add(), where nothing is coded.
TEST(Coding, APassWithoutCodingAdds) {
  std::vector<float> values(1003), more(values.size()), sum(values.size());
  std::mt19937_64 random(8);
  std::normal_distribution<float> normal;
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = normal(random), more[i] = normal(random);
  for (std::size_t i = 0; i < values.size(); ++i) sum[i] = (more[i] + values[i]) * (1.0f / 3.0f);
  const Bytes own = stored(DataType::float32, values), arrived = stored(DataType::float32, more);
  const auto made = code("generic", {.count = values.size(), .own = own.data(), .arrived = arrived.data()}, true);
  EXPECT_EQ(made->out, stored(DataType::float32, sum));
  EXPECT_EQ(made->residual, Bytes(own.size())) << "nothing is lost";
}

TEST(Coding, ASettingIsNamedOrRefused) {
  for (const auto* name : {"off", "auto", "8", "4"}) EXPECT_EQ(to_string(*coding_named(name)), name);
  const auto wrong = coding_named("16");
  ASSERT_FALSE(wrong);
  EXPECT_EQ(wrong.error().message, "coding '16' is none of off, auto, 8 and 4");
}

}  // namespace
}  // namespace rejoin::ftar::coding
