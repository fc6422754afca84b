// How the CPU gives work to a kernel that is already running: a page of pinned memory that both look at.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rejoin::device::kernels {

// out = a + b, element by element, or (a + b) / divisor as the last addition of a mean; or out = a. Addresses of the
// device's memory or of pinned memory.
struct Work {
  static constexpr std::uint32_t kCopy = 255;
  std::uint64_t out = 0, a = 0, b = 0;
  std::uint64_t count = 0;    // elements; of a copy, bytes
  std::uint32_t type = 0;     // DataType; or kCopy
  std::uint32_t divisor = 0;  // 0 or 1: a plain sum
};

// Works are numbered from 1; number n lies in works[n % kWorks]. Every block of a launch does its share of every work
// and says how far it is, so a work is done when all blocks are past it, and blocks need nothing of each other. The CPU
// overwrites a work only when it is done.
//
// A block leaves when it has done what was posted and either `leave` has reached its launch's number or nothing has
// come for too long; it says so. The next launch of the same stream goes on where each block was.
struct Mailbox {
  static constexpr std::size_t kWorks = 64;
  static constexpr std::size_t kMaxBlocks = 1024;
  struct alignas(64) Block {
    std::uint64_t done = 0;  // the block's share of all works up to this
    std::uint64_t left = 0;  // the last launch that it has left
  };
  alignas(64) std::uint64_t posted = 0;  // the CPU's
  std::uint64_t leave = 0;
  alignas(64) Work works[kWorks];
  Block blocks[kMaxBlocks];
};

struct ReduceArguments {
  Mailbox* mailbox = nullptr;
  std::uint64_t launch = 0;       // counted from 1
  std::uint64_t patience_ns = 0;  // without work
};

// Some bytes to digest: their whole blocks of 4096 bytes are number `first_block` and on of a launch.
struct DigestPiece {
  std::uint64_t data = 0;  // device address, a multiple of 16
  std::uint64_t size = 0;
  std::uint64_t first_block = 0;
};

// hashes[i] = XXH3_64 of block i. What is behind a piece's whole blocks is copied to tails[4096 × its number].
struct DigestArguments {
  std::uint64_t keys = 0;    // device address, of xxh3::Keys by lane
  std::uint64_t pieces = 0;  // likewise, of `count` pieces with growing first_block
  std::uint64_t count = 0, blocks = 0;
  std::uint64_t hashes = 0, tails = 0;  // addresses of the device's or of pinned memory
};

// The piece that a block belongs to.
constexpr inline std::uint64_t piece_of(const DigestPiece* pieces, std::uint64_t count, std::uint64_t block) {
  std::uint64_t low = 0, high = count;  // pieces[low].first_block <= block < pieces[high].first_block
  while (high - low > 1) {
    const std::uint64_t middle = (low + high) / 2;
    (pieces[middle].first_block <= block ? low : high) = middle;
  }
  return low;
}

}  // namespace rejoin::device::kernels
