#include "base/digest.h"

// Inlined, so that it is compiled for wider vectors than the distribution's library.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <array>

namespace rejoin {

namespace {

constexpr std::size_t kBlock = 4 * KiB;

// Block hashes are hashed in runs of this many, which bounds the memory; part of the definition.
constexpr std::size_t kRun = 1024;

}  // namespace

std::uint64_t digest(BytesView bytes) {
  std::uint64_t result = bytes.size();
  std::array<std::uint64_t, kRun> hashes;
  for (std::size_t at = 0; at < bytes.size();) {
    std::size_t count = 0;
    for (; count < kRun && at < bytes.size(); ++count) {
      const std::size_t size = std::min(kBlock, bytes.size() - at);
      hashes[count] = XXH3_64bits(bytes.data() + at, size);
      at += size;
    }
    result = combine_digests(result, XXH3_64bits(hashes.data(), count * sizeof hashes[0]));
  }
  return result;
}

std::uint64_t combine_digests(std::uint64_t so_far, std::uint64_t next) {
  const std::uint64_t both[2] = {so_far, next};
  return XXH3_64bits(both, sizeof both);
}

}  // namespace rejoin
