#include "collectives/combine.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/arithmetic.h"
#include "ftar/reduce.h"

namespace rejoin::collectives {

namespace {

template <typename T>
T combined(Combine how, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (how == Combine::maximum) return std::isnan(a) || a > b ? a : b;
    if (how == Combine::minimum) return std::isnan(a) || a < b ? a : b;
    return arithmetic::one_nan(a * b);
  } else {
    using Unsigned = std::make_unsigned_t<T>;  // wraps
    if (how == Combine::maximum) return a > b ? a : b;
    if (how == Combine::minimum) return a < b ? a : b;
    if (how == Combine::bitwise_and) return a & b;
    if (how == Combine::bitwise_or) return a | b;
    if (how == Combine::bitwise_xor) return a ^ b;
    return static_cast<T>(static_cast<Unsigned>(a) * static_cast<Unsigned>(b));
  }
}

template <typename Type>
void loop(Combine how, std::byte* out, const std::byte* first, const std::byte* second, std::size_t count) {
  using Stored = typename Type::Storage;
  for (std::size_t i = 0; i < count; ++i) {
    Stored a, b;
    std::memcpy(&a, first + i * sizeof a, sizeof a);
    std::memcpy(&b, second + i * sizeof b, sizeof b);
    const Stored result = Type::store(combined(how, Type::load(a), Type::load(b)));
    std::memcpy(out + i * sizeof result, &result, sizeof result);
  }
}

// A true division, as torch's own: a product with 1 / members is another number where that is rounded.
template <typename Type>
void divide(std::byte* out, std::size_t count, std::uint32_t members) {
  using Stored = typename Type::Storage;
  const auto by = static_cast<typename Type::Value>(members);
  for (std::size_t i = 0; i < count; ++i) {
    Stored sum;
    std::memcpy(&sum, out + i * sizeof sum, sizeof sum);
    const Stored mean = Type::store(Type::load(sum) / by);
    std::memcpy(out + i * sizeof mean, &mean, sizeof mean);
  }
}

// In pieces that stay in the cache. A sum of 16 bits is rounded before it is divided.
void mean(DataType type, std::byte* out, const std::byte* first, const std::byte* second, std::size_t count,
          std::uint32_t members) {
  constexpr std::size_t kPiece = 2048;
  for (std::size_t at = 0; at < count; at += kPiece) {
    const std::size_t piece = std::min(kPiece, count - at), offset = at * size_of(type);
    ftar::add(type, out + offset, first + offset, second + offset, piece, 0);
    arithmetic::dispatch(type, [&](auto element) { divide<decltype(element)>(out + offset, piece, members); });
  }
}

}  // namespace

void combine(Combine how, DataType type, std::byte* out, const std::byte* first, const std::byte* second,
             std::size_t count, bool last, std::uint32_t members) {
  if (how == Combine::mean && last) return mean(type, out, first, second, count, members);
  if (how == Combine::sum || how == Combine::mean) return ftar::add(type, out, first, second, count, 0);
  switch (type) {
    case DataType::float32: return loop<arithmetic::Plain<float>>(how, out, first, second, count);
    case DataType::float64: return loop<arithmetic::Plain<double>>(how, out, first, second, count);
    case DataType::int32: return loop<arithmetic::Plain<std::int32_t>>(how, out, first, second, count);
    case DataType::int64: return loop<arithmetic::Plain<std::int64_t>>(how, out, first, second, count);
    case DataType::bfloat16: return loop<arithmetic::Bfloat16>(how, out, first, second, count);
    case DataType::float16: return loop<arithmetic::Float16>(how, out, first, second, count);
  }
}

}  // namespace rejoin::collectives
