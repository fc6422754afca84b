// Passes over awkward data, for whatever runs them: all must make the same of it.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>

#include "base/arithmetic.h"
#include "base/bytes.h"
#include "ftar/coding.h"

namespace rejoin::ftar::coding {

// Where a pass' bytes are, `shift` elements behind a multiple of 16 bytes. Coded bytes lie anywhere.
struct PassData {
  Pass pass;  // its pointers: null where nothing is given or wanted, otherwise not valid
  Bytes own, arrived, feedback;
  std::size_t shift = 0;
  bool any_bits = false;  // what has arrived was coded by nobody
  std::size_t bytes() const { return pass.count * size_of(pass.type); }
};
struct PassResult {
  Bytes coded, out, residual;  // empty: not wanted
  Loss loss;
};

namespace passes {

inline void put_value(Bytes& bytes, DataType type, float value) {
  if (type == DataType::float32) put(bytes, value);
  else put(bytes, type == DataType::bfloat16 ? arithmetic::to_bfloat16(value) : arithmetic::to_float16(value));
}

// Each block of another kind: usual values, of magnitudes far from each other, tiny, huge, zeros of both signs, a few
// of them no numbers, any bits.
inline Bytes values(DataType type, std::size_t count, std::mt19937_64& random) {
  Bytes bytes;
  std::normal_distribution<float> normal;
  const std::size_t block = kPlainBlock / size_of(type);
  std::uint64_t kind = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (i % block == 0) kind = random() % 9;
    const float usual = normal(random);
    switch (kind) {
      case 0: put_value(bytes, type, std::ldexp(usual, static_cast<int>(random() % 260) - 150)); break;
      case 1: put_value(bytes, type, usual * 1e-40f); break;
      case 2: put_value(bytes, type, std::ldexp(usual, type == DataType::float16 ? 14 : 126)); break;
      case 3: put_value(bytes, type, random() % 2 == 0 ? 0.0f : -0.0f); break;
      case 4: put_value(bytes, type, i % 7 == 3 ? std::copysign(INFINITY, usual) : usual); break;
      case 5: put_value(bytes, type, i % 11 == 5 ? std::copysign(NAN, usual) : usual); break;
      case 6:
        for (std::size_t b = 0; b < size_of(type); ++b) bytes.push_back(static_cast<std::byte>(random()));
        break;
      default: put_value(bytes, type, usual); break;
    }
  }
  return bytes;
}

inline PassResult room_for(const PassData& data) {
  const Pass& pass = data.pass;
  constexpr std::byte untouched{0xcd};
  return {pass.coded == nullptr ? Bytes() : Bytes(coded_bytes(pass.type, data.bytes(), pass.width), untouched),
          pass.out == nullptr ? Bytes() : Bytes(data.bytes(), untouched),
          pass.residual == nullptr ? Bytes() : Bytes(data.bytes(), untouched),
          {}};
}

inline PassResult on_cpu(const PassData& data) {
  PassResult made = room_for(data);
  Pass pass = data.pass;
  const auto place = [](auto& pointer, auto& bytes) {
    if (pointer != nullptr) pointer = bytes.data();
  };
  place(pass.own, data.own);
  place(pass.arrived, data.arrived);
  place(pass.feedback, data.feedback);
  place(pass.residual, made.residual);
  place(pass.coded, made.coded);
  place(pass.out, made.out);
  made.loss = run(pass);
  return made;
}

inline bool is_nan(DataType type, const std::byte* at) {
  float value = 0;
  std::uint16_t half = 0;
  if (type == DataType::float32) std::memcpy(&value, at, sizeof value);
  else std::memcpy(&half, at, sizeof half);
  if (type == DataType::bfloat16) value = arithmetic::from_bfloat16(half);
  if (type == DataType::float16) value = arithmetic::from_float16(half);
  return std::isnan(value);
}

// Of elements; of `sums` NaNs may have other bits: nothing says which.
inline void expect_same(const Bytes& got, const Bytes& expected, DataType type, bool sums, const char* what) {
  ASSERT_EQ(got.size(), expected.size());
  const std::size_t size = size_of(type);
  for (std::size_t i = 0; i < got.size() / size; ++i) {
    const std::byte *its = got.data() + i * size, *should = expected.data() + i * size;
    if (std::memcmp(its, should, size) == 0 || (sums && is_nan(type, its) && is_nan(type, should))) continue;
    FAIL() << what << ": element " << i << " of " << got.size() / size << " differs";
  }
}

}  // namespace passes

// Calls `runs` (PassData → PassResult) with each, or with one in `of` (odd, since the cases repeat after eight), and
// compares with what the CPU makes of it.
template <typename Runs>
void expect_the_cpus_bits(const std::vector<std::size_t>& counts, Runs runs, unsigned of = 1) {
  unsigned turn = 0;
  std::mt19937_64 random(11);
  std::byte some{};
  const auto perhaps = [&](bool is) { return is ? &some : nullptr; };
  for (const auto type : {DataType::float32, DataType::bfloat16, DataType::float16})
    for (const auto arrived_width : {Width::plain, Width::eight, Width::four})
      for (const auto width : {Width::plain, Width::eight, Width::four})
        for (const std::size_t count : counts)
          for (unsigned which = 0; which < 8; ++which) {
            if (turn++ % of != 0) continue;
            PassData data{.pass = {.type = type,
                                   .count = count,
                                   .own = perhaps(which != 3),  // only decodes, or adds nothing
                                   .arrived = perhaps(which != 0),
                                   .arrived_width = arrived_width,
                                   .feedback = perhaps(which % 4 == 1),
                                   .times = which < 4 ? 1.0f : 1.5f,
                                   .residual = perhaps(which != 2),
                                   .divisor = which % 3 == 1 ? 3 + which * 1000u : which % 3,
                                   .width = width,
                                   .coded = perhaps(width != Width::plain),
                                   .out = perhaps(width == Width::plain || which % 2 == 1)},
                          .own = passes::values(type, count, random),
                          .arrived = passes::values(type, count, random),
                          .feedback = passes::values(type, count, random),
                          .shift = which == 5 ? 1u : 0u,
                          .any_bits = which == 6};
            if (arrived_width != Width::plain) {
              Bytes coded(coded_bytes(type, data.bytes(), arrived_width));
              if (data.any_bits)
                for (auto& byte : coded) byte = static_cast<std::byte>(random());
              else
                run({.type = type,
                     .count = count,
                     .own = data.arrived.data(),
                     .width = arrived_width,
                     .coded = coded.data()});
              data.arrived = coded;
            }
            SCOPED_TRACE(testing::Message()
                         << to_string(type) << ", " << static_cast<int>(arrived_width) << " to "
                         << static_cast<int>(width) << " bits, " << count << " elements, case " << which);
            const PassResult got = runs(data), expected = passes::on_cpu(data);
            ASSERT_EQ(got.coded, expected.coded);
            const bool decodes = data.pass.own == nullptr && data.pass.feedback == nullptr && !data.any_bits;
            const bool sums =
                width == Width::plain && (!decodes || arrived_width == Width::plain || data.pass.divisor > 1);
            passes::expect_same(got.out, expected.out, type, sums, "the result");
            passes::expect_same(got.residual, expected.residual, type, true, "what is lost");
            const auto near = [](double one, double other) {  // sums of floats: too much is an infinity, somewhere
              return std::abs(one - other) <= 1e-3 * std::abs(other) || !(other < 1e36);
            };
            EXPECT_TRUE(near(got.loss.lost, expected.loss.lost)) << got.loss.lost << " " << expected.loss.lost;
            EXPECT_TRUE(near(got.loss.of, expected.loss.of)) << got.loss.of << " " << expected.loss.of;
            if (testing::Test::HasFatalFailure() || testing::Test::HasNonfatalFailure()) return;
          }
}

}  // namespace rejoin::ftar::coding
