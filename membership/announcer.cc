#include "membership/announcer.h"

#include "base/bytes.h"

namespace rejoin::membership {

void Announcer::add_pending(NodeId node, const RankSet& ranks, TimePoint now) {
  pending_[node].ranks.add(ranks);
  added_at_ = now;
}

void Announcer::add_pending_plan(NodeId node, TimePoint now) {
  pending_[node].plan = true;
  added_at_ = now;
}

bool Announcer::flushes_at_once(TimePoint now) const { return few_ || now - flushed_at_ >= silence_ / 16; }

bool Announcer::flushes_with_tick(TimePoint now, bool more_may_come) const {
  const bool waits = more_may_come || now - added_at_ < silence_ / 64;
  return !waits || now - flushed_at_ >= silence_ / 4;
}

Announcer::Pending Announcer::take_pending(TimePoint now) {
  Pending pending;
  for (auto& [node, its] : std::exchange(pending_, {})) {
    if (!its.ranks.empty()) pending.of_ranks[std::move(its.ranks)].push_back(node);
    if (its.plan) pending.of_plan.push_back(node);
  }
  if (!pending.of_ranks.empty() || !pending.of_plan.empty()) flushed_at_ = now;
  return pending;
}

// Nodes that host the same ranks, as those of different replicas do, get the same message, which is made once.
Announcer::Messages Announcer::all(const Nodes& nodes, const Replicas& replicas) {
  std::map<RankSet, std::vector<NodeId>> by_hosts;
  for (const auto& [node, state] : nodes) by_hosts[state.hosts].push_back(node);
  for (auto& [node, its] : pending_) its.ranks.clear();
  Messages messages;
  for (const auto& [hosts, some] : by_hosts)
    for (auto& message : all_peers(some, hosts, replicas)) messages.push_back(std::move(message));
  return messages;
}

Announcer::Messages Announcer::all_peers(const std::vector<NodeId>& nodes, const RankSet& ranks,
                                         const Replicas& replicas) const {
  std::map<ReplicaId, const ReplicaState*> there;
  for (const auto& [id, replica] : replicas)
    if (replica.registered == ranks_) there[id] = &replica;
  Messages messages;
  put(messages, nodes, ranks, there, Named::all);
  return messages;
}

Announcer::Messages Announcer::news(ReplicaId id, const ReplicaState& replica, const RankSet& ranks, const Nodes& nodes,
                                    const std::set<NodeId>& left_out) const {
  std::map<RankSet, std::vector<NodeId>> by_concerned;
  for (const auto& [node, state] : nodes)
    if (!left_out.contains(node)) by_concerned[ranks.common(state.hosts)].push_back(node);
  Messages messages;
  for (const auto& [concerned, some] : by_concerned)
    if (!concerned.empty()) put(messages, some, concerned, {{id, &replica}}, Named::some);
  return messages;
}

// In as many messages as it takes for each to fit a frame, however many ranks a relay has: all that concerns a rank is
// in one of them.
void Announcer::put(Messages& messages, const std::vector<NodeId>& nodes, const RankSet& ranks,
                    const std::map<ReplicaId, const ReplicaState*>& replicas, Named named) const {
  constexpr std::size_t kMost = 4 * MiB;
  proto::ToNode message;
  RankSet complete;
  std::size_t bytes = 0;
  const auto flush = [&] {
    auto& peers = *message.mutable_peers();
    if (named == Named::all) complete.to(peers.mutable_complete());
    messages.emplace_back(nodes, std::exchange(message, {}));
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
