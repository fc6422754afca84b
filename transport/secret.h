// What the two ends of a connection know, and prove to each other before either spends anything on the other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace rejoin::transport {

struct Secret {
  std::array<std::byte, 32> bytes{};  // zeros: none, whoever comes is taken
  bool operator==(const Secret&) const = default;

  // Of two numbers that are themselves secret.
  static Secret of(const std::array<std::uint64_t, 2>& numbers) {
    Secret secret;
    std::memcpy(secret.bytes.data(), numbers.data(), sizeof numbers);
    return secret;
  }
  // A number by which those who know it tell a connection of theirs. It proves nothing to who can read the network.
  std::uint64_t token() const {
    std::uint64_t token = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i) token = token * 31 + std::to_integer<std::uint64_t>(bytes[i]);
    return token;
  }
};

}  // namespace rejoin::transport
