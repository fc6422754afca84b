#include "membership/digest_table.h"

#include <algorithm>

namespace rejoin::membership {

void DigestTable::take(const proto::Exchanged& exchanged, std::uint64_t limit) {
  const auto at = [](const auto& digests, int i) { return i < digests.size() ? digests.Get(i) : 0; };
  int next = 0;
  const RankSet ranks(exchanged.ranks(), std::min(limit, kMostRanks));
  for (const auto& [begin, end] : ranks.ranges())
    for (auto rank = begin; rank < end; ++rank, ++next)
      put(static_cast<std::uint32_t>(rank), {at(exchanged.reduced(), next), at(exchanged.state(), next)});
}

void DigestTable::tell(const RankSet& ranks, proto::Exchanged& exchanged) const {
  if (std::all_of(by_rank_.begin(), by_rank_.end(), [](const auto& d) { return d == RankDigests{}; })) return;
  for (const auto& [begin, end] : ranks.ranges())
    for (auto rank = begin; rank < std::min(end, kMostRanks); ++rank) {
      const RankDigests digests = of(static_cast<std::uint32_t>(rank));
      exchanged.add_reduced(digests.reduced);
      exchanged.add_state(digests.state);
    }
}

proto::Exchanged exchanged_of(const proto::RankUp& up) {
  proto::Exchanged exchanged;
  exchanged.set_replica(up.replica());
  exchanged.set_incarnation(up.incarnation());
  exchanged.set_epoch(up.exchanged_epoch());
  exchanged.set_step(up.exchanged_step());
  RankSet(up.rank()).to(exchanged.mutable_ranks());
  exchanged.add_reduced(up.exchanged_reduced());
  exchanged.add_state(up.exchanged_state());
  return exchanged;
}

}  // namespace rejoin::membership
