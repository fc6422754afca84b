// Chunks coded as block floating point (base/block_float.h): how they are laid out, and what is done with one at a hop.
// See "Coded gradients" in docs/design-notes.md.
//
// A coded chunk is the scales of its blocks, of 8 bits a byte each, of 4 bits two, then their numbers: of 8 bits in
// order, of 4 bits the block's first half in the low halves of its bytes, the second half in the high ones. The last
// block is filled up with zeros.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace rejoin::coding {

enum class Width : std::uint8_t { plain = 0, four = 4, eight = 8 };

constexpr bool codes(DataType type) {
  return type == DataType::float32 || type == DataType::bfloat16 || type == DataType::float16;
}
constexpr std::size_t kPlainBlock = 64;  // bytes
constexpr std::size_t bytes_of_scale(Width width) { return width == Width::eight ? 1 : 2; }
constexpr std::size_t bytes_of_block(DataType type, Width width) {
  return bytes_of_scale(width) + kPlainBlock / size_of(type) * static_cast<std::size_t>(width) / 8;
}
constexpr std::size_t blocks_of(std::size_t bytes) { return (bytes + kPlainBlock - 1) / kPlainBlock; }
// Of so many bytes of elements. Never more than the next multiple of a block's bytes.
constexpr std::size_t coded_bytes(DataType type, std::size_t bytes, Width width) {
  return width == Width::plain ? bytes : blocks_of(bytes) * bytes_of_block(type, width);
}

// What coding has lost: the sums of the squares of the differences, and of the elements. Of use for a choice only: its
// low bits are not the same on all CPUs and GPUs.
struct alignas(16) Loss {
  double lost = 0, of = 0;
  constexpr Loss& operator+=(const Loss& more) {
    lost += more.lost, of += more.of;
    return *this;
  }
};

// One pass over a chunk: out = (arrived + own + feedback × times) / divisor, coded where it is to be. Pointers need the
// alignment of an element, those to coded chunks none.
struct alignas(16) Pass {
  DataType type = DataType::float32;
  std::size_t count = 0;               // elements
  const std::byte* own = nullptr;      // none: nothing; elements
  const std::byte* arrived = nullptr;  // none: nothing; elements, or coded
  Width arrived_width = Width::plain;
  const std::byte* feedback = nullptr;  // none: nothing; what was lost before
  float times = 1;
  std::byte* residual = nullptr;  // none: not wanted; gets what is lost now, times the divisor. In a block that is not
                                  // finite it gets the feedback
  std::uint32_t divisor = 0;      // up to 1: no mean
  Width width = Width::plain;
  std::byte* coded = nullptr;  // unless the width is `plain`; may be nothing that is read
  std::byte* out = nullptr;  // none: not wanted; elements as whoever decodes them has them. May be what arrived, plain
};

}  // namespace rejoin::coding
