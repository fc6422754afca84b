// Who are whose peers: ranks get the addresses of those that are there.
#include "base/bytes.h"
#include "membership/coordinator.h"

namespace rejoin::membership {

// Who are peers now. Whoever is not named is fenced by the others; so after a restart nothing is announced before all
// members have had their time to come back. Then everything is.
void Coordinator::end_recovery_if_all_are_back() {
  if (!recovering_until_) return;
  if (!members_.empty() && !has_contributors()) return;  // a joiner may yet say that it has caught up
  for (const auto& m : members_)
    if (!is_back(m)) return;
  recovering_until_.reset();
  announce_all();
}

// Nodes that host the same ranks, as those of different replicas do, get the same message, which is made once.
void Coordinator::announce_all() {
  std::map<RankSet, std::vector<NodeId>> by_hosts;
  for (auto& [node, state] : nodes_) by_hosts[state.hosts].push_back(node), state.owed.clear();
  for (const auto& [hosts, nodes] : by_hosts) announce_to(nodes, hosts);
}

// These ranks have come, and are to be told of all of their peers.
void Coordinator::owe(NodeId node, const RankSet& ranks) {
  nodes_.at(node).owed.add(ranks);
  owed_at_ = now_;
}

// Of many that come at about the same time the first are told so, and the others together, with a tick. So what goes to
// a relay that comes back, and to each daemon behind it, does not grow with the number of those daemons.
void Coordinator::pay_at_once() {
  constexpr std::uint64_t few = 256;  // ranks: what all of them are told is little
  if (now_ - paid_at_ >= config_.silence / 16 || std::uint64_t{config_.replicas} * config_.ranks <= few) pay();
}

void Coordinator::pay() {
  std::map<RankSet, std::vector<NodeId>> lists;
  std::vector<NodeId> plans;
  for (auto& [node, state] : nodes_) {
    if (!state.owed.empty()) lists[std::exchange(state.owed, {})].push_back(node);
    if (std::exchange(state.owes_plan, false)) plans.push_back(node);
  }
  if (lists.empty() && plans.empty()) return;
  paid_at_ = now_;
  if (dissent()) unannounced_ |= !lists.empty();
  else
    for (const auto& [ranks, nodes] : lists) announce_to(nodes, ranks);
  if (plans.empty()) return;
  proto::ToNode current;
  *current.mutable_plan() = plan();
  send_to(std::move(plans), std::move(current));
}

// All peers of these ranks.
void Coordinator::announce_to(const std::vector<NodeId>& nodes, const RankSet& ranks) {
  std::map<ReplicaId, const ReplicaState*> there;
  for (const auto& [id, replica] : replicas_)
    if (fully_registered(replica)) there[id] = &replica;
  announce(nodes, ranks, there, Named::all);
}

// All of its ranks have come: to them all others, and to all others them.
void Coordinator::announce_replica(const ReplicaState& replica, ReplicaId id) {
  std::set<NodeId> its;
  for (const auto& rank : replica.ranks) its.insert(rank.node);
  for (auto one : its)
    if (nodes_.contains(one)) owe(one, nodes_.at(one).hosts);
  pay_at_once();
  RankSet all;
  all.add(0, config_.ranks);
  announce_ranks(replica, id, all, its);
}

// To the others: these ranks are there now.
void Coordinator::announce_ranks(const ReplicaState& replica, ReplicaId id, const RankSet& ranks,
                                 const std::set<NodeId>& sent_to) {
  std::map<RankSet, std::vector<NodeId>> by_concerned;
  for (const auto& [node, state] : nodes_)
    if (!sent_to.contains(node)) by_concerned[ranks.common(state.hosts)].push_back(node);
  for (const auto& [concerned, nodes] : by_concerned)
    if (!concerned.empty()) announce(nodes, concerned, {{id, &replica}}, Named::some);
}

// In as many messages as it takes for each to fit a frame, however many ranks a relay has: all that concerns a rank is
// in one of them.
void Coordinator::announce(const std::vector<NodeId>& nodes, const RankSet& ranks,
                           const std::map<ReplicaId, const ReplicaState*>& replicas, Named named) {
  constexpr std::size_t kMost = 4 * MiB;
  proto::ToNode message;
  RankSet complete;
  std::size_t bytes = 0;
  const auto flush = [&] {
    auto& peers = *message.mutable_peers();
    if (named == Named::all) complete.to(peers.mutable_complete());
    send_to(nodes, std::exchange(message, {}));
    complete.clear();
    bytes = 0;
  };
  for (const auto& [begin, end] : ranks.ranges())
    for (auto number = begin; number < end; ++number) {
      if (bytes > kMost) flush();
      complete.add(number, number + 1);
      for (const auto& [id, replica] : replicas) {
        if (number >= replica->ranks.size()) continue;
        const RankState& rank = replica->ranks[number];
        auto& peer = *message.mutable_peers()->add_peers();
        peer.set_replica(id.value);
        peer.set_incarnation(replica->incarnation.value);
        peer.set_rank(static_cast<std::uint32_t>(number));
        peer.set_address(std::string(rank.texts.at(RankText::address)));
        peer.set_stream_address(std::string(rank.texts.at(RankText::stream_address)));
        peer.set_card(std::string(rank.texts.at(RankText::card)));
        peer.set_location(std::string(rank.texts.at(RankText::location)));
        peer.set_passes_on(rank.passes_on);
        bytes += peer.ByteSizeLong();
      }
    }
  flush();
}

}  // namespace rejoin::membership
