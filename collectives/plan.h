// What one member of a group sends, receives and adds up in a collective operation, and what must wait for what: plain
// data, made from the number of members and the sizes alone, so that all members make plans that fit together.
//
// Ring reduce-scatter and all-gather: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", 2009. Barrier: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace rejoin::collectives {

// Where bytes are: in which of the operation's memories, in the order of its builder below. The one after these is the
// operation's scratch memory.
struct Operand {
  std::uint32_t memory = 0;
  std::uint64_t offset = 0;  // bytes
};

struct Task {
  enum class Kind : std::uint8_t { send, receive, combine, copy };
  Kind kind{};
  std::uint32_t peer = 0;    // send, receive: the other member's rank
  Operand at;                // what is sent; where the rest puts its bytes
  Operand first, second;     // combine: the operands, either of which may be `at`; copy: from `first`
  std::uint64_t length = 0;  // bytes
  bool last = false;         // combine: nothing is added to these elements any more
  std::uint32_t blockers = 0;
  std::vector<std::uint32_t> unblocks;  // numbers of tasks that wait for this one
};

// The k-th task that sends from one member to another is received by the k-th task that receives from it there.
struct Plan {
  std::vector<Task> tasks;
  std::uint64_t scratch = 0;  // bytes
};

struct Shape {
  std::uint32_t members = 1;
  std::uint32_t rank = 0;
  std::uint32_t root = 0;         // of those that have one
  std::uint64_t bytes = 0;        // as the builder says
  std::uint32_t element = 1;      // bytes; nothing is cut within one
  std::uint64_t chunk = 1 << 20;  // bytes; no transfer of a ring is longer
};

// Memory 0, of `bytes`, is replaced by the sum.
Plan all_reduce(const Shape& shape);
// Memory 0, of `bytes`, is replaced by the sum at the root; that of the others stays as it is.
Plan reduce(const Shape& shape);
// Memory 0, of `bytes`: the root's goes to all.
Plan broadcast(const Shape& shape);
// Memory 0 goes into memory 1 + rank of every member; `sizes` are these memories', in bytes.
Plan all_gather(const Shape& shape, std::span<const std::uint64_t> sizes);
// Memories 0 … members − 1, of `bytes` each, are summed across members; that of this rank goes to memory `members`.
Plan reduce_scatter(const Shape& shape);
// Memory 0, of `bytes`, goes into memory 1 + rank of the root, which alone has these.
Plan gather(const Shape& shape);
// The root's memory 0 … members − 1, of `bytes` each, go to their ranks' memory `members`, which is the others' 0.
Plan scatter(const Shape& shape);
// Memory i goes to rank i; what comes from there goes to memory members + i. Both lists are of bytes, and may have
// zeros.
Plan all_to_all(const Shape& shape, std::span<const std::uint64_t> sends, std::span<const std::uint64_t> receives);
Plan barrier(const Shape& shape);
// Memory 0, of `bytes`, to or from `root`.
Plan send(const Shape& shape);
Plan receive(const Shape& shape);

}  // namespace rejoin::collectives
