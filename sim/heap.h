// What this process has allocated.
#pragma once

#include <malloc.h>

#include <cstdint>

namespace rejoin::sim {

inline std::uint64_t heap_bytes() {
  const auto info = ::mallinfo2();
  return info.uordblks + info.hblkhd;
}

}  // namespace rejoin::sim
