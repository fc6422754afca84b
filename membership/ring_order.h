// In which order members stand in a ring, where it is known where they are: so that what is slow between them is
// crossed as few times as there can be. A room that has several members is entered once and left once; so is each rack
// in it, and each host.
//
// Those that are in the same at one level stand side by side, and among them those that are at the next one. Whoever
// has several ranks is where all of them are, the first one's place first: replicas whose ranks stand alike are next to
// each other in all rings. Replica numbers decide what is left. So the order is a function of who is there and where;
// when members are lost the others keep theirs.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/ids.h"

namespace rejoin::membership {

struct Located {
  ReplicaId replica;
  std::vector<std::string_view> ranks;  // by number: locations, which have been looked at
};

// Whether the first one stands before the other.
bool stands_before(const Located& one, const Located& other);

// How many hops of this rank's ring, which is closed, lead from one to another of what is at this level or above.
std::uint32_t crossings(const std::vector<Located>& ring, std::uint32_t rank, std::size_t level);

}  // namespace rejoin::membership
