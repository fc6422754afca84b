// Chunks coded with a bounded error, for links that are slower than the coder: block floating point
// (base/block_float.h) of 8 or 4 bits. See "Coded gradients" in docs/design-notes.md.
//
// A coded chunk is the scales of its blocks, of 8 bits a byte each, of 4 bits two, then their numbers: of 8 bits in
// order, of 4 bits the block's first half in the low halves of its bytes, the second half in the high ones. The last
// block is filled up with zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/result.h"
#include "base/types.h"

namespace rejoin::ftar {

// What is sent to a neighbour: as it is; by how fast the link to it has been and by how much coding loses; or always
// coded in so many bits.
enum class Coding : std::uint8_t { off, automatic, eight, four };
Result<Coding> coding_named(std::string_view name);  // "off", "auto", "8", "4"
std::string_view to_string(Coding coding);

namespace coding {

enum class Width : std::uint8_t { plain = 0, four = 4, eight = 8 };

constexpr bool codes(DataType type) {
  return type == DataType::float32 || type == DataType::bfloat16 || type == DataType::float16;
}
constexpr std::size_t kPlainBlock = 64;  // bytes
constexpr std::size_t bytes_of_scale(Width width) { return width == Width::eight ? 1 : 2; }
constexpr std::size_t bytes_of_block(DataType type, Width width) {
  return bytes_of_scale(width) + kPlainBlock / size_of(type) * static_cast<std::size_t>(width) / 8;
}
// Of so many bytes of elements. Never more than the next multiple of a block's bytes.
constexpr std::size_t coded_bytes(DataType type, std::size_t bytes, Width width) {
  return width == Width::plain ? bytes : (bytes + kPlainBlock - 1) / kPlainBlock * bytes_of_block(type, width);
}

// What coding has lost: the sums of the squares of the differences, and of the elements. Of use for a choice only: its
// low bits are not the same on all CPUs.
struct Loss {
  double lost = 0, of = 0;
  Loss& operator+=(const Loss& more) {
    lost += more.lost, of += more.of;
    return *this;
  }
};

// One pass over a chunk: out = (arrived + own + feedback × times) / divisor, coded where it is to be.
struct Pass {
  DataType type = DataType::float32;
  std::size_t count = 0;               // elements
  const std::byte* own = nullptr;      // elements
  const std::byte* arrived = nullptr;  // none: nothing; elements, or coded
  Width arrived_width = Width::plain;
  const std::byte* feedback = nullptr;  // none: zeros; what was lost before
  float times = 1;
  std::byte* residual = nullptr;  // none: not wanted; gets what is lost now, times the divisor. In a block that is not
                                  // finite it gets the feedback
  std::uint32_t divisor = 0;      // up to 1: no mean
  Width width = Width::plain;
  std::byte* coded = nullptr;  // unless the width is `plain`; may be nothing that is read
  std::byte* out = nullptr;  // none: not wanted; elements as whoever decodes them has them. May be what arrived, plain
};
Loss run(const Pass& pass);
void decode(DataType type, Width width, std::byte* out, const std::byte* coded, std::size_t count);

// The same compiled for a set of instructions by its name (ftar/reduce.h), for tests; false: this CPU lacks it.
bool run_with(std::string_view set, const Pass& pass, Loss& loss);
bool decode_with(std::string_view set, DataType type, Width width, std::byte* out, const std::byte* coded,
                 std::size_t count);

// Bytes of elements a second that this CPU codes and decodes, as a hop does: measured by the first call (some ms).
double rate();

}  // namespace coding
}  // namespace rejoin::ftar
