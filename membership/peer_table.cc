#include "membership/peer_table.h"

#include <algorithm>

namespace rejoin::membership {

RankSet PeerTable::apply(const proto::Peers& message) {
  RankSet touched;
  constexpr std::uint64_t no_limit = ~std::uint64_t{0};
  const RankSet complete(message.complete(), no_limit);
  touched.add(complete);
  std::erase_if(by_rank_, [&](const auto& entry) { return complete.contains(entry.first); });
  if (!message.gone().empty())
    for (auto& [rank, peers] : by_rank_) {
      const auto left = std::erase_if(peers, [&](const auto& peer) {
        return std::find(message.gone().begin(), message.gone().end(), peer.incarnation()) != message.gone().end();
      });
      if (left > 0) touched.add(rank, std::uint64_t{rank} + 1);
    }
  for (const auto& peer : message.peers()) {
    auto& peers = by_rank_[peer.rank()];
    auto place = std::lower_bound(peers.begin(), peers.end(), peer.replica(),
                                  [](const auto& known, std::uint32_t replica) { return known.replica() < replica; });
    if (place != peers.end() && place->replica() == peer.replica()) *place = peer;
    else peers.insert(place, peer);
    touched.add(peer.rank(), std::uint64_t{peer.rank()} + 1);
  }
  return touched;
}

const std::vector<proto::Peer>& PeerTable::of(std::uint32_t rank) const {
  static const std::vector<proto::Peer> nobody;
  auto found = by_rank_.find(rank);
  return found == by_rank_.end() ? nobody : found->second;
}

Incarnations PeerTable::incarnations(std::uint32_t rank) const {
  Incarnations all;
  for (const auto& peer : of(rank)) all.insert(peer.incarnation());
  return all;
}

proto::Peers PeerTable::complete(const RankSet& ranks) const {
  proto::Peers message;
  ranks.to(message.mutable_complete());
  for (const auto& [begin, end] : ranks.ranges())
    for (auto at = by_rank_.lower_bound(static_cast<std::uint32_t>(begin)); at != by_rank_.end() && at->first < end;
         ++at)
      for (const auto& peer : at->second) *message.add_peers() = peer;
  return message;
}

}  // namespace rejoin::membership
