// XXH3_64 (seed 0, default secret) of exactly 4096 bytes by 32 lanes, each of which reads 16 bytes at a time: the
// blocks of base/digest.h. The algorithm is xxHash's (github.com/Cyan4973/xxHash, doc/xxhash_spec.md, "XXH3"): eight
// accumulators take stripes of 64 bytes, are scrambled after every 16, and are folded together at the end. What is
// accumulated between two scramblings does not depend on the accumulators, so that lanes may add it up in any order:
// lane l takes the 16 bytes for accumulators 2(l % 4) and 2(l % 4) + 1 of every eighth stripe.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/kernels/xxh3_secret.h"

namespace rejoin::device::kernels::xxh3 {

constexpr unsigned kLanes = 32, kStripe = 64, kStripesPerRound = 16, kRounds = 4;
constexpr std::size_t kBytes = std::size_t{kStripe} * kStripesPerRound * kRounds;
constexpr std::uint32_t kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
constexpr std::uint64_t kPrime64_1 = 0x9E3779B185EBCA87u, kPrime64_2 = 0xC2B2AE3D27D4EB4Fu,
                        kPrime64_3 = 0x165667B19E3779F9u, kPrime64_4 = 0x85EBCA77C2B2AE63u,
                        kPrime64_5 = 0x27D4EB2F165667C5u;

// Two neighbouring accumulators: 2(lane % 4) and the one after it.
struct alignas(16) Pair {
  std::uint64_t even = 0, odd = 0;
};

constexpr inline Pair start(unsigned lane) {
  switch (lane % 4) {
    case 0: return {kPrime32_3, kPrime64_1};
    case 1: return {kPrime64_2, kPrime64_3};
    case 2: return {kPrime64_4, kPrime32_2};
    default: return {kPrime64_5, kPrime32_1};
  }
}

// A lane's part of the secret; a table of them, by lane, is made once for many blocks, by the CPU. A round has two
// turns: in turn t lane l takes stripe 8 t + l / 4. The last stripe of all is taken with a secret of its own, after all
// that comes before it.
constexpr unsigned kTurns = 2;
struct Keys {
  Pair turn[kTurns], last, scramble, merge;
};
constexpr inline Keys keys_of(unsigned lane) {
  constexpr unsigned size = 192;
  const unsigned column = lane % 4 * 16;
  const auto pair = [&](unsigned at) { return Pair{secret(at + column), secret(at + column + 8)}; };
  return {{pair(lane / 4 * 8), pair(64 + lane / 4 * 8)}, pair(size - kStripe - 7), pair(size - kStripe), pair(11)};
}
constexpr inline const Pair& key_of(const Keys& keys, unsigned lane, unsigned round, unsigned turn) {
  return round == kRounds - 1 && turn == kTurns - 1 && lane / 4 == 7 ? keys.last : keys.turn[turn];
}

// Where in the block the lane's 16 bytes of this turn lie.
constexpr inline unsigned offset_of(unsigned lane, unsigned round, unsigned turn) {
  return (round * kStripesPerRound + turn * 8 + lane / 4) * kStripe + lane % 4 * 16;
}

// What 16 bytes of a stripe, `data`, add to their two accumulators.
constexpr inline void accumulate(Pair& into, Pair data, Pair key) {
  const std::uint64_t even = data.even ^ key.even, odd = data.odd ^ key.odd;
  into.even += data.odd + (even & 0xffffffff) * (even >> 32);
  into.odd += data.even + (odd & 0xffffffff) * (odd >> 32);
}

constexpr inline std::uint64_t scrambled(std::uint64_t accumulator, std::uint64_t key) {
  return ((accumulator ^ (accumulator >> 47)) ^ key) * kPrime32_1;
}
constexpr inline Pair scrambled(Pair pair, Pair key) {
  return {scrambled(pair.even, key.even), scrambled(pair.odd, key.odd)};
}

constexpr inline std::uint64_t folded_product(std::uint64_t a, std::uint64_t b) {
  const std::uint64_t low = (a & 0xffffffff) * (b & 0xffffffff), middle_a = (a >> 32) * (b & 0xffffffff),
                      middle_b = (a & 0xffffffff) * (b >> 32), high = (a >> 32) * (b >> 32);
  const std::uint64_t cross = (low >> 32) + (middle_a & 0xffffffff) + middle_b;
  const std::uint64_t upper = (middle_a >> 32) + (cross >> 32) + high, lower = (cross << 32) | (low & 0xffffffff);
  return upper ^ lower;
}

// What lanes 0 to 3 put into the sum that finish() takes.
constexpr inline std::uint64_t share(Pair pair, Pair key) {
  return folded_product(pair.even ^ key.even, pair.odd ^ key.odd);
}

constexpr inline std::uint64_t finish(std::uint64_t shares) {
  std::uint64_t hash = shares + kBytes * kPrime64_1;
  hash ^= hash >> 37;
  hash *= 0x165667919E3779F9u;
  return hash ^ (hash >> 32);
}

// The same by one thread, lane after lane. `read` gives the 16 bytes at an offset of the block; `keys` are the lanes'.
template <typename Read>
constexpr inline std::uint64_t hash(Read read, const Keys* keys) {
  Pair sums[4];
  for (unsigned column = 0; column < 4; ++column) sums[column] = start(column);
  for (unsigned round = 0; round < kRounds; ++round) {
    for (unsigned lane = 0; lane < kLanes; ++lane)
      for (unsigned turn = 0; turn < kTurns; ++turn)
        accumulate(sums[lane % 4], read(offset_of(lane, round, turn)), key_of(keys[lane], lane, round, turn));
    for (unsigned column = 0; column < 4 && round + 1 < kRounds; ++column)
      sums[column] = scrambled(sums[column], keys[column].scramble);
  }
  std::uint64_t shares = 0;
  for (unsigned column = 0; column < 4; ++column) shares += share(sums[column], keys[column].merge);
  return finish(shares);
}

}  // namespace rejoin::device::kernels::xxh3
