// Who and where the ranks of the other replicas are, as the coordinator has announced it.
#pragma once

#include <map>
#include <vector>

#include "control.pb.h"
#include "membership/rank_set.h"

namespace rejoin::membership {

class PeerTable {
 public:
  // Takes a message in. Returns the ranks that have other peers now, or whose list the message says is complete.
  RankSet apply(const proto::Peers& message);
  const std::vector<proto::Peer>& of(std::uint32_t rank) const;
  Incarnations incarnations(std::uint32_t rank) const;  // of its peers
  // Returns a message with everything known of the peers of these ranks, marked complete.
  proto::Peers complete(const RankSet& ranks) const;

 private:
  std::map<std::uint32_t, std::vector<proto::Peer>> by_rank_;  // by replica, ascending
};

}  // namespace rejoin::membership
