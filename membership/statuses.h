// How the ranks of a replica are connected, as each connection says it that they have, or had, with the coordinator. A
// connection says it once, until it changes; so what it has said is kept as long as it stands, though the ranks may be
// heard over another one meanwhile. What counts of a rank is what the connection says that it has come by last.
#pragma once

#include <vector>

#include "membership/coordinator_state.h"

namespace rejoin::membership {

class Statuses {
 public:
  // `of`: the ranks that the connection speaks of; `last`: those of them that have come by it last.
  void say(NodeId by, ConnectedRanks status, const RankSet& of, const RankSet& last);
  bool come(std::uint32_t rank, NodeId by);  // by this connection, now; returns whether what counts has changed
  void forget(NodeId lost);                  // what counts of its ranks counts until it is said again

  // What counts; no rank is in two of them.
  const std::vector<ConnectedRanks>& current() const { return current_; }

 private:
  void put(NodeId by, const RankSet& ranks, ConnectedRanks status);

  std::vector<ConnectedRanks> current_;
  std::vector<NodeId> said_by_;  // … each of those; NodeId(): by one that is lost
  std::vector<std::pair<NodeId, ConnectedRanks>> others_;
};

}  // namespace rejoin::membership
