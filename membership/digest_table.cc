#include "membership/digest_table.h"

#include <algorithm>

namespace rejoin::membership {

void DigestTable::take(const proto::Reduced& reduced, std::uint64_t limit) {
  const auto at = [](const auto& digests, int i) { return i < digests.size() ? digests.Get(i) : 0; };
  int next = 0;
  const RankSet ranks(reduced.ranks(), std::min(limit, kMostRanks));
  for (const auto& [begin, end] : ranks.ranges())
    for (auto rank = begin; rank < end; ++rank, ++next)
      put(static_cast<std::uint32_t>(rank), {at(reduced.results(), next), at(reduced.state(), next)});
}

void DigestTable::write_to(const RankSet& ranks, proto::Reduced& reduced) const {
  if (std::all_of(by_rank_.begin(), by_rank_.end(), [](const auto& d) { return d == RankDigests{}; })) return;
  for (const auto& [begin, end] : ranks.ranges())
    for (auto rank = begin; rank < std::min(end, kMostRanks); ++rank) {
      const RankDigests digests = of(static_cast<std::uint32_t>(rank));
      reduced.add_results(digests.reduced);
      reduced.add_state(digests.state);
    }
}

proto::Reduced reduced_of(const proto::RankUp& up) {
  proto::Reduced reduced;
  reduced.set_replica(up.replica());
  reduced.set_incarnation(up.incarnation());
  reduced.set_epoch(up.reduced_epoch());
  reduced.set_step(up.reduced_step());
  RankSet(up.rank()).to(reduced.mutable_ranks());
  reduced.add_results(up.results_digest());
  reduced.add_state(up.state_digest());
  return reduced;
}

}  // namespace rejoin::membership
