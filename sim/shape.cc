#include "sim/shape.h"

#include <fmt/format.h>

#include <array>

#include "sim/random.h"

namespace rejoin::sim {

namespace {

using namespace std::chrono_literals;

constexpr std::array<Duration, 4> kSlowest{20us, 50us, 200us, 2ms};
constexpr std::array<Duration, 3> kDetection{100us, 1ms, 20ms};

template <std::size_t N>
Duration one_of(const std::array<Duration, N>& values, std::uint64_t seed, std::string_view dimension) {
  return values[Random(seed, dimension).pick(N)];
}

}  // namespace

Shape Shape::of(std::uint64_t seed) {
  const auto often = [&](std::string_view dimension, std::uint64_t one_in) {
    return Random(seed, dimension).one_in(one_in);
  };
  return {.slowest = one_of(kSlowest, seed, "network"),
          .detection = one_of(kDetection, seed, "detection"),
          .late_writes = often("late writes", 2),
          .lands_stopped = often("lands while stopped", 2),
          .rails = often("rails", 3) ? 2u : 1u,
          .direct = often("direct", 2)};
}

std::map<std::string, std::string> Shape::values() const {
  return {{"network", fmt::format("{}", slowest / 1us)},
          {"detection", fmt::format("{}", detection / 1us)},
          {"late", late_writes ? "y" : "n"},
          {"lands", lands_stopped ? "y" : "n"},
          {"rails", fmt::format("{}", rails)},
          {"direct", direct ? "y" : "n"}};
}

std::size_t pairs_of_values() {
  constexpr std::array<std::size_t, 6> sizes{kSlowest.size(), kDetection.size(), 2, 2, 2, 2};
  std::size_t pairs = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i)
    for (std::size_t j = 0; j < i; ++j) pairs += sizes[i] * sizes[j];
  return pairs;
}

}  // namespace rejoin::sim
