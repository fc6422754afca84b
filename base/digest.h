// Digest of bytes, in two levels so that it can be computed in parallel (and by a GPU) with the same result: XXH3_64 of
// the little-endian array of the XXH3_64 of each 4 KiB block.
#pragma once

#include <cstdint>

#include "base/bytes.h"

namespace rejoin {

std::uint64_t digest(BytesView bytes);
// Copies past the caches (base/streamed_copy.h), and returns the digest of the very bytes that it has written, also
// where somebody changes `from` meanwhile. Memory is read once. The two ranges do not overlap.
std::uint64_t digest_and_copy(std::byte* to, BytesView from);
// The same two without vector instructions beyond the baseline, for tests.
std::uint64_t digest_plain(BytesView bytes);
std::uint64_t digest_and_copy_plain(std::byte* to, BytesView from);

// Its two levels, for whoever has the hashes of the whole blocks from elsewhere: of one block, and of all together.
constexpr std::size_t kDigestBlock = 4 * KiB;  // the last one may be shorter
std::uint64_t digest_of_block(BytesView block);
// In parts, too: each but the last has a multiple of kDigestRun hashes, and in place of the bytes those that follow
// take what the part before has given.
constexpr std::size_t kDigestRun = 1024;
std::uint64_t digest_of_hashes(std::uint64_t bytes, std::span<const std::uint64_t> hashes);

// The digest of several ranges, each digested by itself, order mattering.
std::uint64_t combine_digests(std::uint64_t so_far, std::uint64_t next);

}  // namespace rejoin
