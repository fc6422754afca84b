// Who sends what to whom, in which order: the ring algorithm as plain data, the same on every member.
//
// The members of an epoch stand in a ring: the n contributors first, then those catching up. The buffer is cut into n
// segments, each segment into chunks.
//
// Reduce-scatter runs among the contributors. In round k (0 … n−2) contributor p sends segment p−1−k to p+1 and adds
// what it receives, segment p−2−k, to its own; after the last round it holds segment p summed over all. A segment is
// thus always summed in the same order, whatever the timing.
//
// All-gather runs among all members. Segment s starts at member s and travels `forward` hops to the right and
// `backward` hops to the left, forward + backward = members − 1: one direction only, or both at once in half the steps.
// (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.)
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/bytes.h"

namespace rejoin::ftar {

constexpr std::uint32_t kMaxMembers = 1024;

struct Shape {
  std::size_t bytes = 0;    // of the whole buffer
  std::size_t element = 4;  // bytes
  std::uint32_t contributors = 1;
  std::uint32_t members = 1;    // contributors and those catching up
  std::size_t chunk_bytes = 0;  // at most this much a chunk
  bool both_ways = true;        // all-gather in both directions
};

struct Range {
  std::size_t offset = 0, length = 0;  // bytes
};

class Schedule {
 public:
  explicit Schedule(const Shape& shape);

  std::uint32_t segments() const { return shape_.contributors; }
  Range segment(std::uint32_t s) const;
  std::uint32_t chunks_of(std::uint32_t s) const;
  // Chunks are numbered through: segment s has the numbers [s × stride, s × stride + chunks_of(s)).
  std::uint32_t stride() const { return stride_; }
  std::uint32_t chunk_id(std::uint32_t s, std::uint32_t i) const { return s * stride_ + i; }
  std::uint32_t segment_of(std::uint32_t chunk) const { return chunk / stride_; }
  bool valid(std::uint32_t chunk) const;
  Range chunk(std::uint32_t id) const;
  std::uint32_t all_chunks() const;  // how many exist

  // Reduce-scatter, for contributor p: the chunks it sends, in order; the first `chunks_of` of them come from its own
  // input, the others from what it received.
  std::vector<std::uint32_t> reduce_scatter_sends(std::uint32_t p) const;
  // The round in which contributor p receives this segment; the last (n−2) is the one that completes it.
  std::uint32_t receive_round(std::uint32_t p, std::uint32_t s) const;

  // All-gather, for member p: the chunks it sends to its right or left neighbour, in order.
  enum class Direction { right, left };
  std::vector<std::uint32_t> all_gather_sends(std::uint32_t p, Direction direction) const;
  bool all_gather_receives(std::uint32_t p, std::uint32_t s, Direction direction) const;
  std::uint32_t hops(Direction direction) const;

 private:
  Shape shape_;
  std::size_t segment_bytes_ = 0;
  std::size_t chunk_bytes_ = 0;
  std::uint32_t stride_ = 1;
};

// Recursive doubling, for buffers so small that rounds cost more than bytes: log2(n) of them instead of a ring's
// 2(n−1). The core is the greatest power of two of contributors. Who contributes beyond it is folded in first, by the
// member of the core that has its position less the core's size. In round r (1 …) the core's member p and p XOR 2^(r−1)
// send each other the sums that they have; both add them in the same order, so that after the last round the whole core
// has the same bits. Members beyond the core are then sent the result by who has their position without its highest
// bit: by the core those up to twice its size, by these the next. So two that send each other anything differ in one
// bit of their positions, however many of them contribute. (Thakur, Rabenseifner and Gropp, "Optimization
// of collective communication operations in MPICH", 2005, section 4.5.)
class Doubling {
 public:
  Doubling(std::uint32_t contributors, std::uint32_t members, std::uint32_t position);

  // What a member receives has a place each: 0 what it folds in, then one for each round, then the result.
  std::uint32_t rounds() const { return rounds_; }
  std::uint32_t result() const { return rounds_ + 1; }
  bool in_core() const { return position_ < core_; }
  // Whose bytes come to this place; with whom sums are exchanged in a round. Nothing: nobody's.
  std::optional<std::uint32_t> sender(std::uint64_t place) const;
  // Of a member beyond the core: who folds it in, if it contributes, and sends it the result.
  std::uint32_t proxy() const { return position_ - std::bit_floor(position_); }
  std::vector<std::uint32_t> beyond() const;  // to whom this member sends the result

  // All sums that travel have a number each, the same for all members: first the inputs by position, then for each
  // round those of its blocks of positions, then the result.
  std::uint32_t sums() const { return number(result(), 0) + 1; }
  std::uint32_t number(std::uint32_t place, std::uint32_t of) const;  // what member `of` sends to this place

 private:
  std::uint32_t contributors_, members_, position_, core_, rounds_;
};

constexpr std::size_t kMostOfHost = 512 * KiB;  // of a chunk, to be in a core's cache with what is added to it

// The chunk size for a buffer: large enough to be efficient, small enough that the rounds overlap; a multiple of 1 KiB,
// but never above `limit`.
std::size_t tuned_chunk(std::size_t bytes, std::uint32_t contributors, std::size_t limit);
// The same for a buffer in the host's memory, where each chunk costs its sender and its receiver processor time: fewer
// and even ones, and no larger than what stays in a core's cache.
std::size_t tuned_host_chunk(std::size_t bytes, std::uint32_t contributors, std::size_t limit);
// No chunk of it has a larger number, whatever the ring: each segment has a chunk that is not full, or a few small
// ones.
constexpr std::uint64_t most_chunks(std::uint64_t bytes, std::uint64_t limit) {
  return bytes / limit + 6 * std::uint64_t{kMaxMembers};
}

}  // namespace rejoin::ftar
