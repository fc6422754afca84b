// The secret that the two ends of a connection know, and prove to each other before either spends anything on the
// other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#pragma GCC visibility push(default)
namespace rejoin::transport {

struct Secret {
  std::array<std::byte, 32> bytes{};  // all zero: there is none, and whoever comes is taken
  bool operator==(const Secret&) const = default;

  // Makes a secret of two numbers that are themselves secret.
  static Secret of(const std::array<std::uint64_t, 2>& numbers) {
    Secret secret;
    std::memcpy(secret.bytes.data(), numbers.data(), sizeof numbers);
    return secret;
  }
};

// A listener takes who proves its own secret or, while a job's key is being changed, the other one.
struct Secrets {
  Secret own{};
  std::optional<Secret> other{};
};

}  // namespace rejoin::transport

#pragma GCC visibility pop
