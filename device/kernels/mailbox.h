// How the CPU gives work to a kernel that is already running: a page of pinned memory that both look at, and a relay in
// the device's memory by which one warp passes on to all others what it has found there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/coded_chunk.h"

namespace rejoin::device::kernels {

// out = a + b, element by element, or (a + b) / divisor as the last addition of a mean; or a copy, out = a; or the pass
// that is beside it, whose elements they are. Addresses of the device's memory, or of pinned memory. A work is done in
// tiles, which are numbered through all works ever posted.
struct alignas(64) Work {
  static constexpr std::uint32_t kCopy = 0xffff, kPass = 0xfffe;
  std::uint64_t out = 0, a = 0, b = 0;
  std::uint64_t count = 0;    // elements; of a copy: bytes
  std::uint64_t first = 0;    // its first tile
  std::uint32_t tiles = 0;    // at least one, also of nothing
  std::uint32_t tile = 0;     // bytes of the result in each: a multiple of 16, of a pass of 64
  std::uint32_t type = 0;     // DataType, kCopy or kPass
  std::uint32_t divisor = 0;  // 0 or 1: a plain sum
};
static_assert(sizeof(Work) == 64 && offsetof(Work, tiles) == offsetof(Work, first) + 8);  // in one load of 16 bytes

// Works are numbered from 1; number n lies in works[n % kWorks], and the CPU overwrites it only when it is done: when
// done[n % kWorks] is n. A launch is over when `leave` has reached its number, or nothing has come for too long, and
// what was posted is done. The next of the same stream goes on from there.
struct Mailbox {
  static constexpr std::size_t kWorks = 64;
  alignas(64) std::uint64_t posted = 0;  // the CPU's
  std::uint64_t leave = 0;
  alignas(64) Work works[kWorks];
  coding::Pass passes[kWorks];                  // of works that are
  alignas(64) std::uint64_t done[kWorks] = {};  // the kernel's
  coding::Loss losses[kWorks];                  // … of passes that are done
  alignas(64) std::uint64_t left = 0;           // the last launch that is over
};

// In the device's memory, zero at first; each launch goes on where the one before has ended. The warps that work claim
// tiles one by one, and each waits for the tile that it has claimed: so none needs another, and one that the device has
// not started yet is not waited for. The last one to leave a launch takes back what was claimed and never came.
struct Relay {
  static constexpr std::uint64_t kClosed = std::uint64_t{1} << 63;
  alignas(128) std::uint64_t claimed = 0;  // tiles
  alignas(128) std::uint64_t tiles = 0;    // passed on, with kClosed when no more come in this launch
  std::uint64_t works = 0;                 // … that they belong to
  std::uint64_t firsts[Mailbox::kWorks] = {};
  Work passed[Mailbox::kWorks] = {};
  coding::Pass passes[Mailbox::kWorks];
  alignas(128) std::uint64_t finished[Mailbox::kWorks] = {};  // tiles of each
  coding::Loss losses[Mailbox::kWorks];                       // … of theirs
  std::uint64_t left = 0;                                     // warps
};

struct ReduceArguments {
  Mailbox* mailbox = nullptr;
  Relay* relay = nullptr;
  std::uint64_t launch = 0;       // counted from 1
  std::uint64_t patience_ns = 0;  // without work
};

// Some bytes to digest, in items: their whole blocks of 4096 bytes, and what is left behind them. `first` is the number
// of its first item in a launch.
struct DigestRange {
  static constexpr std::uint64_t kBlock = 4096;
  std::uint64_t data = 0;  // device address, a multiple of 16
  std::uint64_t size = 0;
  std::uint64_t first = 0;
  constexpr std::uint64_t items() const { return (size + kBlock - 1) / kBlock; }
};

// hashes[i] = XXH3_64 of item i, if it is a whole block. Another is copied to tails[4096 × its range].
struct DigestArguments {
  static constexpr std::size_t kRanges = 128;
  std::uint64_t keys = 0;               // device address, of xxh3::Keys by lane
  std::uint64_t hashes = 0, tails = 0;  // addresses of the device's or of pinned memory
  std::uint64_t count = 0, items = 0;
  DigestRange ranges[kRanges] = {};  // none of no items
};
static_assert(sizeof(DigestArguments) <= 4096);  // what all devices take as a kernel's arguments

// The range that an item belongs to.
constexpr inline std::uint64_t range_of(const DigestArguments& arguments, std::uint64_t item) {
  std::uint64_t low = 0, high = arguments.count;  // pieces[low].first <= item < pieces[high].first
  while (high - low > 1) {
    const std::uint64_t middle = (low + high) / 2;
    (arguments.ranges[middle].first <= item ? low : high) = middle;
  }
  return low;
}

}  // namespace rejoin::device::kernels
