// The body of digest(), included by one source file for each instruction set; all give the same result.
#pragma once

// Inlined, so that each includer gets the variant of its own vector width.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "base/bytes.h"
#include "base/digest.h"
#include "base/streamed_copy.h"

namespace rejoin::digest_kernel {

constexpr std::size_t kBlock = kDigestBlock;
constexpr std::size_t kRun = kDigestRun;  // block hashes are hashed in runs of this many; part of the definition

static inline std::uint64_t combine(std::uint64_t so_far, std::uint64_t next) {
  const std::uint64_t both[2] = {so_far, next};
  return XXH3_64bits(both, sizeof both);
}

// Calls `fetch` with each block, and hashes the bytes that it returns.
template <typename Fetch>
static inline std::uint64_t run(BytesView bytes, Fetch fetch) {
  std::uint64_t result = bytes.size();
  std::array<std::uint64_t, kRun> hashes;
  for (std::size_t at = 0; at < bytes.size();) {
    std::size_t count = 0;
    for (; count < kRun && at < bytes.size(); ++count) {
      const std::size_t size = std::min(kBlock, bytes.size() - at);
      hashes[count] = XXH3_64bits(fetch(bytes.subspan(at, size)), size);
      at += size;
    }
    result = combine(result, XXH3_64bits(hashes.data(), count * sizeof hashes[0]));
  }
  return result;
}

static inline std::uint64_t run(BytesView bytes) {
  return run(bytes, [](BytesView block) { return block.data(); });
}

static inline std::uint64_t run_and_copy(std::byte* to, BytesView from) {
  alignas(64) std::array<std::byte, kBlock> taken;  // stays in the first cache
  const std::uint64_t result = run(from, [&](BytesView block) {
    std::memcpy(taken.data(), block.data(), block.size());
    // What follows reads these bytes, and not once more those that they were copied from.
    asm volatile("" ::"r"(taken.data()) : "memory");
    streamed_copy_unordered(to + (block.data() - from.data()), BytesView(taken).first(block.size()));
    return taken.data();
  });
  order_streamed();
  return result;
}

static inline std::uint64_t of_hashes(std::uint64_t bytes, std::span<const std::uint64_t> hashes) {
  std::uint64_t result = bytes;
  for (; !hashes.empty(); hashes = hashes.subspan(std::min(kRun, hashes.size())))
    result = combine(result, XXH3_64bits(hashes.data(), std::min(kRun, hashes.size()) * sizeof hashes[0]));
  return result;
}

}  // namespace rejoin::digest_kernel
