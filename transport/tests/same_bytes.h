// Comparisons of memory in tests, whose own code is not optimized: byte by byte these would take most of their time.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>

namespace rejoin::transport {

inline bool same_bytes(std::span<const std::byte> one, std::span<const std::byte> other) {
  return one.size() == other.size() && (one.empty() || std::memcmp(one.data(), other.data(), one.size()) == 0);
}

inline bool all_are(std::byte value, std::span<const std::byte> bytes) {
  return bytes.empty() || (bytes[0] == value && same_bytes(bytes.subspan(1), bytes.first(bytes.size() - 1)));
}

}  // namespace rejoin::transport
