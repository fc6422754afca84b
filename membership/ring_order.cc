#include "membership/ring_order.h"

#include <algorithm>

#include "base/location.h"

namespace rejoin::membership {

bool stands_before(const Located& one, const Located& other) {
  const std::size_t ranks = std::min(one.ranks.size(), other.ranks.size());
  for (std::size_t level = 0; level < Location::kMostLevels; ++level)
    for (std::size_t rank = 0; rank < ranks; ++rank)
      if (const auto order = name_at(one.ranks[rank], level) <=> name_at(other.ranks[rank], level); order != 0)
        return order < 0;
  return one.replica < other.replica;
}

std::uint32_t crossings(const std::vector<Located>& ring, std::uint32_t rank, std::size_t level) {
  std::uint32_t count = 0;
  for (std::size_t i = 0; i < ring.size(); ++i) {
    const std::string_view from = ring[i].ranks[rank], to = ring[(i + 1) % ring.size()].ranks[rank];
    for (std::size_t above = 0; above <= level; ++above)
      if (name_at(from, above) != name_at(to, above)) {
        ++count;
        break;
      }
  }
  return count;
}

}  // namespace rejoin::membership
