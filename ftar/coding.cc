#include "ftar/coding.h"

#include <algorithm>
#include <cstring>

#include "base/block_float.h"
#include "ftar/reduce.h"

namespace rejoin::ftar {

namespace coding {
namespace {

static_assert(kPlainBlock == block_float::kBlock);

template <typename Element>
constexpr std::size_t kElements = kPlainBlock / sizeof(typename Element::Storage);
template <typename Element>
REJOIN_INLINE void load(float* values, const std::byte* from) {
  typename Element::Storage stored[kElements<Element>];
  std::memcpy(stored, from, sizeof stored);
  for (std::size_t i = 0; i < kElements<Element>; ++i) values[i] = Element::load(stored[i]);
}

template <typename Element>
REJOIN_INLINE void store(std::byte* to, const float* values) {
  typename Element::Storage stored[kElements<Element>];
  for (std::size_t i = 0; i < kElements<Element>; ++i) stored[i] = Element::store(values[i]);
  std::memcpy(to, stored, sizeof stored);
}

constexpr unsigned bits_of(Width width) { return static_cast<unsigned>(width); }

template <typename Element, Width kWidth>
REJOIN_INLINE void numbers_of(int* codes, const std::byte* from) {
  constexpr std::size_t n = kElements<Element>;
  if constexpr (kWidth == Width::eight) {
    std::int8_t bytes[n];
    std::memcpy(bytes, from, n);
    for (std::size_t i = 0; i < n; ++i) codes[i] = bytes[i];
  } else {
    std::uint8_t bytes[n / 2];
    std::memcpy(bytes, from, n / 2);
    for (std::size_t i = 0; i < n / 2; ++i) {
      codes[i] = static_cast<int>(static_cast<std::uint32_t>(bytes[i]) << 28) >> 28;
      codes[i + n / 2] = static_cast<int>(static_cast<std::uint32_t>(bytes[i]) << 24) >> 28;
    }
  }
}

template <typename Element, Width kWidth>
REJOIN_INLINE void put_numbers(std::byte* to, const int* codes) {
  constexpr std::size_t n = kElements<Element>, size = kWidth == Width::eight ? n : n / 2;
  std::uint8_t bytes[size];
  if constexpr (kWidth == Width::eight)
    for (std::size_t i = 0; i < n; ++i) bytes[i] = static_cast<std::uint8_t>(codes[i]);
  else
    for (std::size_t i = 0; i < n / 2; ++i)
      bytes[i] = static_cast<std::uint8_t>((codes[i] & 15) | (codes[i + n / 2] << 4));
  std::memcpy(to, bytes, size);
}

template <typename Element, Width kWidth>
REJOIN_INLINE void decode_block(float* values, const std::byte* scale_at, const std::byte* numbers) {
  constexpr unsigned bits = bits_of(kWidth);
  int codes[kElements<Element>];
  numbers_of<Element, kWidth>(codes, numbers);
  std::uint16_t word = 0;
  std::memcpy(&word, scale_at, bytes_of_scale(kWidth));
  if (word == block_float::kNotFinite<bits>) [[unlikely]] {
    for (std::size_t i = 0; i < kElements<Element>; ++i) values[i] = block_float::decoded_not_finite(codes[i]);
    return;
  }
  const float scale = block_float::scale<bits>(word);
  for (std::size_t i = 0; i < kElements<Element>; ++i) values[i] = static_cast<float>(codes[i]) * scale;
}

// As many as are in a block of float32: compilers do not see by themselves that a block's loops are a few instructions.
constexpr std::size_t kLanes = 16;
using Floats [[gnu::vector_size(64)]] = float;
template <std::size_t kCount>
struct Integers {
  using Type [[gnu::vector_size(4 * kCount)]] = std::int32_t;
};

// The upper half against the lower one.
template <std::size_t kCount>
REJOIN_INLINE void halve(std::int32_t* values) {
  typename Integers<kCount>::Type low, high;
  std::memcpy(&low, values, sizeof low);
  std::memcpy(&high, values + kCount, sizeof high);
  low = low > high ? low : high;
  std::memcpy(values, &low, sizeof low);
}

// The bits of the largest magnitude.
template <typename Element>
REJOIN_INLINE std::int32_t largest_magnitude(const float* values) {
  std::int32_t magnitudes[kElements<Element>];
  for (std::size_t i = 0; i < kElements<Element>; i += kLanes) {
    typename Integers<kLanes>::Type bits;
    std::memcpy(&bits, values + i, sizeof bits);
    bits &= 0x7fffffff;
    std::memcpy(magnitudes + i, &bits, sizeof bits);
  }
  if constexpr (kElements<Element> == 32) halve<16>(magnitudes);
  halve<8>(magnitudes);
  halve<4>(magnitudes);
  return std::max(std::max(magnitudes[0], magnitudes[1]), std::max(magnitudes[2], magnitudes[3]));
}

// Codes `values`, which become what is decoded of them; `codes` their numbers. Returns the scale as it is stored.
template <typename Element, Width kWidth>
REJOIN_INLINE std::uint32_t code_block(float* values, int* codes) {
  constexpr unsigned bits = bits_of(kWidth);
  const std::int32_t largest = largest_magnitude<Element>(values);
  const std::uint32_t word = block_float::scale_word<bits>(static_cast<std::uint32_t>(largest));
  if (word == block_float::kNotFinite<bits>) [[unlikely]] {
    for (std::size_t i = 0; i < kElements<Element>; ++i) {
      codes[i] = block_float::coded_not_finite<bits>(values[i]);
      values[i] = block_float::decoded_not_finite(codes[i]);
    }
    return word;
  }
  if constexpr (block_float::kTopIsRoundedUp<Element, bits>)
    if (static_cast<std::uint32_t>(largest) >= block_float::kTop) [[unlikely]]
      for (std::size_t i = 0; i < kElements<Element>; ++i) values[i] = block_float::below_top(values[i]);
  const float scale = block_float::scale<bits>(word), inverse = block_float::inverse<bits>(word);
  for (std::size_t i = 0; i < kElements<Element>; i += kLanes) {
    Floats lanes;
    std::memcpy(&lanes, values + i, sizeof lanes);
    block_float::code(lanes, inverse);
    std::memcpy(codes + i, &lanes, sizeof lanes);  // their low bits are those of the numbers
    block_float::decode(lanes, scale);
    std::memcpy(values + i, &lanes, sizeof lanes);
  }
  return word;
}

struct Sums {
  Floats lost[2] = {}, of[2] = {};
  REJOIN_INLINE Loss all() const {
    Loss loss;
    for (std::size_t i = 0; i < 2 * kLanes; ++i) loss += {lost[i / kLanes][i % kLanes], of[i / kLanes][i % kLanes]};
    return loss;
  }
};

// What a pass points to at one of its blocks, from where there are as many blocks as are asked for.
struct Places {
  const std::byte *own, *arrived, *arrived_scale, *feedback;
  std::byte *residual, *coded, *scale, *out;
};

// Finite, also where a sum's or a mean times its divisor is more than the type holds.
template <typename Element>
REJOIN_INLINE void keep(std::byte* residual, float* lost) {
  for (std::size_t i = 0; i < kElements<Element>; ++i) lost[i] = std::clamp(lost[i], -Element::kMost, Element::kMost);
  store<Element>(residual, lost);
}

template <typename Element, Width kArrived, Width kWidth>
REJOIN_INLINE void block(const Pass& pass, const Places& at, float reciprocal, Sums& sums) {
  constexpr std::size_t n = kElements<Element>;
  float values[n] = {}, before[n] = {};
  if (at.own != nullptr) load<Element>(values, at.own);
  if (at.arrived != nullptr) {
    float arrived[n];
    if constexpr (kArrived == Width::plain) load<Element>(arrived, at.arrived);
    else decode_block<Element, kArrived>(arrived, at.arrived_scale, at.arrived);
    for (std::size_t i = 0; i < n; ++i) values[i] = at.own == nullptr ? arrived[i] : arrived[i] + values[i];
  }
  if (at.feedback != nullptr) {
    load<Element>(before, at.feedback);
    for (std::size_t i = 0; i < n; ++i) before[i] *= pass.times;
    for (std::size_t i = 0; i < n; ++i) values[i] += before[i];
  }
  if (pass.divisor > 1)
    for (std::size_t i = 0; i < n; ++i) values[i] *= reciprocal;
  if constexpr (kWidth == Width::plain) {
    if (at.out != nullptr) store<Element>(at.out, values);
    if (at.residual != nullptr) std::memset(at.residual, 0, kPlainBlock);
  } else {
    float lost[n];
    int codes[n];
    for (std::size_t i = 0; i < n; ++i) lost[i] = values[i];
    const auto word = static_cast<std::uint16_t>(code_block<Element, kWidth>(values, codes));
    std::memcpy(at.scale, &word, bytes_of_scale(kWidth));
    put_numbers<Element, kWidth>(at.coded, codes);
    if (at.out != nullptr) store<Element>(at.out, values);
    if (word == block_float::kNotFinite<bits_of(kWidth)>) [[unlikely]] {  // nothing of it can be added later
      if (at.residual != nullptr) keep<Element>(at.residual, before);
      return;
    }
    for (std::size_t i = 0; i < n; i += kLanes) {
      Floats given, got;
      std::memcpy(&given, lost + i, sizeof given);
      std::memcpy(&got, values + i, sizeof got);
      sums.of[i / kLanes] += given * given;
      given -= got;
      sums.lost[i / kLanes] += given * given;
      if (pass.divisor > 1) given *= static_cast<float>(pass.divisor);
      std::memcpy(lost + i, &given, sizeof given);
    }
    if (at.residual != nullptr) keep<Element>(at.residual, lost);
  }
}

// A part of a block, in memory of its own that is filled up with zeros.
struct Last {
  std::byte own[kPlainBlock] = {}, arrived[kPlainBlock] = {}, feedback[kPlainBlock] = {}, residual[kPlainBlock],
            out[kPlainBlock];

  Places instead_of(const Places& at, bool arrived_plain, std::size_t bytes) {
    Places here = at;
    const auto copied = [&](std::byte* to, const std::byte*& from) {
      if (from != nullptr) from = static_cast<const std::byte*>(std::memcpy(to, from, bytes));
    };
    copied(own, here.own);
    if (arrived_plain) copied(arrived, here.arrived);
    copied(feedback, here.feedback);
    if (at.residual != nullptr) here.residual = residual;
    if (at.out != nullptr) here.out = out;
    return here;
  }
  void copy(const Places& to, std::size_t bytes) const {
    if (to.residual != nullptr) std::memcpy(to.residual, residual, bytes);
    if (to.out != nullptr) std::memcpy(to.out, out, bytes);
  }
};

template <typename Element, Width kWidth>
constexpr std::size_t kNumbers = kWidth == Width::eight  ? kElements<Element>
                                 : kWidth == Width::four ? kElements<Element> / 2
                                                         : kPlainBlock;

template <typename Element, Width kArrived, Width kWidth>
REJOIN_INLINE Loss whole(const Pass& pass) {
  const std::size_t bytes = pass.count * sizeof(typename Element::Storage);
  const std::size_t full = bytes / kPlainBlock, rest = bytes % kPlainBlock, all = blocks_of(bytes);
  const float reciprocal = pass.divisor > 1 ? 1.0f / static_cast<float>(pass.divisor) : 1.0f;
  const std::byte* arrived = pass.arrived;
  if (arrived != nullptr && kArrived != Width::plain) arrived += all * bytes_of_scale(kArrived);
  std::byte* coded = kWidth == Width::plain ? nullptr : pass.coded + all * bytes_of_scale(kWidth);
  const auto places = [&](std::size_t i) __attribute__((always_inline)) {
    const std::size_t at = i * kPlainBlock;
    return Places{.own = pass.own == nullptr ? nullptr : pass.own + at,
                  .arrived = arrived == nullptr ? nullptr : arrived + i * kNumbers<Element, kArrived>,
                  .arrived_scale = pass.arrived == nullptr ? nullptr : pass.arrived + i * bytes_of_scale(kArrived),
                  .feedback = pass.feedback == nullptr ? nullptr : pass.feedback + at,
                  .residual = pass.residual == nullptr ? nullptr : pass.residual + at,
                  .coded = coded == nullptr ? nullptr : coded + i * kNumbers<Element, kWidth>,
                  .scale = pass.coded == nullptr ? nullptr : pass.coded + i * bytes_of_scale(kWidth),
                  .out = pass.out == nullptr ? nullptr : pass.out + at};
  };
  Sums sums;
  Last last;
  for (std::size_t i = 0; i < all; ++i) {  // one call of block(), of which there are 27 for each set of instructions
    Places at = places(i);
    if (i == full) [[unlikely]]
      at = last.instead_of(at, kArrived == Width::plain, rest);
    block<Element, kArrived, kWidth>(pass, at, reciprocal, sums);
  }
  if (full < all) last.copy(places(full), rest);
  return sums.all();
}

template <typename Element, Width kArrived>
REJOIN_INLINE Loss by_width(const Pass& pass) {
  switch (pass.width) {
    case Width::plain: return whole<Element, kArrived, Width::plain>(pass);
    case Width::four: return whole<Element, kArrived, Width::four>(pass);
    case Width::eight: return whole<Element, kArrived, Width::eight>(pass);
  }
  return {};
}

template <typename Element>
REJOIN_INLINE Loss by_arrived(const Pass& pass) {
  switch (pass.arrived_width) {
    case Width::plain: return by_width<Element, Width::plain>(pass);
    case Width::four: return by_width<Element, Width::four>(pass);
    case Width::eight: return by_width<Element, Width::eight>(pass);
  }
  return {};
}

template <typename Element, Width kWidth>
REJOIN_INLINE void decode_whole(std::byte* out, const std::byte* coded, std::size_t count) {
  const std::size_t bytes = count * sizeof(typename Element::Storage);
  const std::size_t full = bytes / kPlainBlock, all = blocks_of(bytes);
  constexpr std::size_t of_scale = bytes_of_scale(kWidth);
  const std::byte* numbers = coded + all * of_scale;
  float values[kElements<Element>];
  for (std::size_t i = 0; i < full; ++i) {
    decode_block<Element, kWidth>(values, coded + i * of_scale, numbers + i * kNumbers<Element, kWidth>);
    store<Element>(out + i * kPlainBlock, values);
  }
  if (full == all) return;
  std::byte last[kPlainBlock];
  decode_block<Element, kWidth>(values, coded + full * of_scale, numbers + full * kNumbers<Element, kWidth>);
  store<Element>(last, values);
  std::memcpy(out + full * kPlainBlock, last, bytes - full * kPlainBlock);
}

template <typename Element>
REJOIN_INLINE void decode_by_width(Width width, std::byte* out, const std::byte* coded, std::size_t count) {
  if (width == Width::eight) decode_whole<Element, Width::eight>(out, coded, count);
  else decode_whole<Element, Width::four>(out, coded, count);
}

REJOIN_INLINE Loss run_all(const Pass& pass) {
  if (pass.type == DataType::float32) return by_arrived<arithmetic::Plain<float>>(pass);
  if (pass.type == DataType::bfloat16) return by_arrived<arithmetic::Bfloat16>(pass);
  return by_arrived<arithmetic::Float16>(pass);
}

REJOIN_INLINE void decode_all(DataType type, Width width, std::byte* out, const std::byte* coded, std::size_t count) {
  if (type == DataType::float32) decode_by_width<arithmetic::Plain<float>>(width, out, coded, count);
  else if (type == DataType::bfloat16) decode_by_width<arithmetic::Bfloat16>(width, out, coded, count);
  else decode_by_width<arithmetic::Float16>(width, out, coded, count);
}

struct Set {
  Loss (*run)(const Pass&);
  void (*decode)(DataType, Width, std::byte*, const std::byte*, std::size_t);
};

// Of arm64 every CPU has the vectors that the generic ones are compiled for.
Loss run_generic(const Pass& pass) { return run_all(pass); }
void decode_generic(DataType type, Width width, std::byte* out, const std::byte* coded, std::size_t count) {
  decode_all(type, width, out, coded, count);
}

#if defined(__x86_64__)
#define REJOIN_AVX2 "avx2,f16c"
#define REJOIN_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,prefer-vector-width=512"
[[gnu::target(REJOIN_AVX2)]] Loss run_avx2(const Pass& pass) { return run_all(pass); }
[[gnu::target(REJOIN_AVX2)]] void decode_avx2(DataType type, Width width, std::byte* out, const std::byte* coded,
                                              std::size_t count) {
  decode_all(type, width, out, coded, count);
}
[[gnu::target(REJOIN_AVX512)]] Loss run_avx512(const Pass& pass) { return run_all(pass); }
[[gnu::target(REJOIN_AVX512)]] void decode_avx512(DataType type, Width width, std::byte* out, const std::byte* coded,
                                                  std::size_t count) {
  decode_all(type, width, out, coded, count);
}
#endif

Set find(std::string_view name) {
  if (!add_with(name, DataType::float32, nullptr, nullptr, nullptr, 0, 0)) return {};
#if defined(__x86_64__)
  if (name == "avx512") return {run_avx512, decode_avx512};
  if (name == "avx2") return {run_avx2, decode_avx2};
#endif
  return {run_generic, decode_generic};
}

const Set& chosen() {
  static const Set set = find(instruction_set());
  return set;
}

}  // namespace

Loss run(const Pass& pass) { return chosen().run(pass); }
void decode(DataType type, Width width, std::byte* out, const std::byte* coded, std::size_t count) {
  chosen().decode(type, width, out, coded, count);
}

bool run_with(std::string_view name, const Pass& pass, Loss& loss) {
  const Set set = find(name);
  if (set.run == nullptr) return false;
  loss = set.run(pass);
  return true;
}

bool decode_with(std::string_view name, DataType type, Width width, std::byte* out, const std::byte* coded,
                 std::size_t count) {
  const Set set = find(name);
  if (set.decode == nullptr) return false;
  set.decode(type, width, out, coded, count);
  return true;
}

}  // namespace coding
}  // namespace rejoin::ftar
