// 16 bytes, which a lane loads and stores at once.
#pragma once

#include <cstdint>

namespace rejoin::device::kernels {

struct alignas(16) Vector {
  std::uint32_t words[4];
};

template <typename Storage>
struct Lanes {
  static constexpr unsigned kCount = 16 / sizeof(Storage);
  Storage of[kCount];
};

template <typename Of>
constexpr inline std::uint64_t address_of(const Of& of) {
  return reinterpret_cast<std::uint64_t>(&of);
}

}  // namespace rejoin::device::kernels
