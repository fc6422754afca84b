// A collective operation as its caller asks for it, checked and made into a group's.
#pragma once

#include <span>
#include <vector>

#include "base/result.h"
#include "base/types.h"
#include "collectives/group.h"

namespace rejoin::collectives {

// `inputs` are read and `outputs` written, but these are in place, in the one input: all_reduce, reduce (the root's),
// broadcast, receive.
struct Call {
  Collective kind{};
  DataType type{};         // all_reduce, reduce, reduce_scatter: of the elements
  Combine combine{};       // …
  std::uint32_t root = 0;  // reduce, broadcast, gather, scatter; of send and receive, the other rank
  std::uint32_t tag = 0;   // send, receive
  std::vector<std::span<std::byte>> inputs, outputs;
  transport::MemoryKind memory{};  // what they are in
};

// Errors: `invalid_argument`: a rank that is none, buffers that are too many, too few or of other sizes than the
// operation's, or what is not done in a GPU's memory.
Result<Operation> prepare(const Call& call, std::uint32_t rank, std::uint32_t members);

}  // namespace rejoin::collectives
