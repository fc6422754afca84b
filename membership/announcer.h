// Who is told of whom. Each rank hears of all of its peers, the ranks of the same number in the other replicas, and of
// each that comes later. What nodes have yet to hear is gathered, so that many that come at about the same time are
// told together. It decides nothing, and sends nothing itself: it says what goes to which nodes.
#pragma once

#include <map>
#include <set>
#include <utility>
#include <vector>

#include "membership/replica_state.h"

namespace rejoin::membership {

class Announcer {
 public:
  Announcer(std::uint32_t replicas, std::uint32_t ranks, Duration silence)
      : ranks_(ranks), few_(std::uint64_t{replicas} * ranks <= kFew), silence_(silence) {}

  using Nodes = std::map<NodeId, ConnectedNode>;
  using Messages = std::vector<std::pair<std::vector<NodeId>, proto::ToNode>>;

  // What nodes have yet to hear, until their connections are lost.
  void add_pending(NodeId node, const RankSet& ranks, TimePoint now);  // of all of these ranks' peers
  void add_pending_plan(NodeId node, TimePoint now);
  void forget(NodeId lost) { pending_.erase(lost); }

  // Of many that come at about the same time the first are told so, and the others together, with a tick. So what goes
  // to a relay that comes back, and to each daemon behind it, does not grow with the number of those daemons.
  bool flushes_at_once(TimePoint now) const;                        // as something comes to be pending
  bool flushes_with_tick(TimePoint now, bool more_may_come) const;  // `more_may_come`: for all else that is known
  struct Pending {
    std::map<RankSet, std::vector<NodeId>> of_ranks;  // nodes that are to hear of these ranks' peers
    std::vector<NodeId> of_plan;
  };
  Pending take_pending(TimePoint now);

  // All peers of all ranks, to everybody: nothing of that is pending any more.
  Messages all(const Nodes& nodes, const Replicas& replicas);
  // All peers of these ranks.
  Messages all_peers(const std::vector<NodeId>& nodes, const RankSet& ranks, const Replicas& replicas) const;
  // These ranks of a replica are there now: to all nodes that host peers of them, but those in `left_out`.
  Messages news(ReplicaId id, const ReplicaState& replica, const RankSet& ranks, const Nodes& nodes,
                const std::set<NodeId>& left_out) const;

 private:
  static constexpr std::uint64_t kFew = 256;  // ranks: what all of them are told is little

  enum class Named : bool { some, all };  // of the peers of those whom the message is to
  void put(Messages& messages, const std::vector<NodeId>& nodes, const RankSet& ranks,
           const std::map<ReplicaId, const ReplicaState*>& replicas, Named named) const;

  struct OfNode {
    RankSet ranks;  // that have yet to hear of all of their peers
    bool plan = false;
  };
  std::uint32_t ranks_;
  bool few_;
  Duration silence_;
  std::map<NodeId, OfNode> pending_;
  TimePoint added_at_{}, flushed_at_{};  // when something came to be pending last, and when all that was last taken
};

}  // namespace rejoin::membership
