// Who and what this process has refused, by why, for the metrics (rejoin_refused_total in docs/operations.md). Any
// thread; counted once, where it is refused.
#pragma once

#include <array>
#include <cstdint>

namespace rejoin::refusals {

enum class Why : std::uint8_t {
  key,            // another job key, or none
  certificate,    // none, or one that is not taken
  no_proof,       // it has not proven itself in time
  too_many,       // so many come at once that have not
  protocol,       // it speaks something else
  version,        // … or this in another version
  user,           // a local process of another user
  job,            // it is of another job, or no part of this one
  declaration,    // it declares another state, other buckets or other settings
  place,          // another process has its place
  absent,         // it wants one that is not here (any more)
  offer,          // a trainer's state can't be taken
  memory_key,     // an operation on memory that is withdrawn, or was never there
  memory_access,  // … outside of a region, or against its rights
};
constexpr std::size_t kWhys = static_cast<std::size_t>(Why::memory_access) + 1;

const char* name_of(Why why);
void count(Why why);
std::array<std::uint64_t, kWhys> counted();

}  // namespace rejoin::refusals
