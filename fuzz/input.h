// What a fuzz target makes its choices from: the input's bytes, then zeros.
#pragma once

#include <algorithm>

#include "base/bytes.h"

namespace rejoin::fuzz {

struct Input {
  const std::uint8_t* data;
  std::size_t size;
  std::uint8_t next() { return size == 0 ? std::uint8_t{0} : (--size, *data++); }
  BytesView take(std::size_t most) {
    const std::size_t taken = std::min(most, size);
    const BytesView bytes{reinterpret_cast<const std::byte*>(data), taken};
    data += taken, size -= taken;
    return bytes;
  }
  // A few bytes at places within the first `reach` bytes, which are there.
  void scribble(void* over, std::size_t reach) {
    for (int count = next() % 8; count > 0; --count) {
      const std::size_t at = (next() << 8 | next()) % reach;
      static_cast<std::uint8_t*>(over)[at] = next();
    }
  }
};

}  // namespace rejoin::fuzz
