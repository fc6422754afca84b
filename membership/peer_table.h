// Who and where the ranks of the other replicas are, as the coordinator has said it.
#pragma once

#include <map>
#include <vector>

#include "membership/rank_set.h"

namespace rejoin::membership {

class PeerTable {
 public:
  // The ranks that have other peers now, or whose peers were said to be complete.
  RankSet apply(const proto::Peers& message);
  const std::vector<proto::Peer>& of(std::uint32_t rank) const;
  // As a message that says all of these ranks, complete.
  proto::Peers complete(const RankSet& ranks) const;

 private:
  std::map<std::uint32_t, std::vector<proto::Peer>> by_rank_;  // by replica, ascending
};

}  // namespace rejoin::membership
