// Who has a rank's place behind a relay, and who else asks for it.
#include "membership/node.h"
#include "membership/process.h"
#include "membership/relay.h"

namespace rejoin::membership {

void Relay::on_rank_up(NodeId node, const proto::RankUp& up) {
  const RankKey key{up.replica(), up.rank()};
  drop_claim(key, up.instance());  // it comes another way now
  const auto present = ranks_.find(key);
  // The answer to its first message was on its way to it when it said so once more, and it may have told since where it
  // stands as who it is now, which it says once.
  if (present != ranks_.end() && present->second.connected && present->second.node == node &&
      present->second.instance == up.instance() && present->second.incarnation != 0 && up.incarnation() == 0)
    return;
  const bool taken = present != ranks_.end() && present->second.instance != up.instance() &&
                     (!present->second.connected || present->second.node != node);
  const bool strange = up.incarnation() != 0 && of_another_job(up.job(), plan_job_);
  // The last plan may be of the job before this one: whoever had its place as one of none has it no more.
  if (strange && present != ranks_.end() && present->second.instance == up.instance()) {
    quit_group(key, present->second);
    ranks_.erase(present);
  }
  RankState& rank = taken || strange ? claim(key, node, up.instance()) : take_place(key, node, up.instance());
  rank.job = up.job();
  if (up.incarnation() == 0) return;                                            // known when it is registered
  if (strange || (taken && present->second.incarnation == up.incarnation())) {  // nobody hears it for that one
    rank.incarnation = up.incarnation();
    return;
  }
  join(key, rank, up.incarnation());
  add_reduced_ranks(reduced_of(up));
}

// Its daemon may have gone meanwhile: then it has its time to come back, as any other.
void Relay::take_place(const RankKey& key, const RankState& claim) {
  RankState& rank = ranks_[key];
  const RankState before = rank;
  if (rank.connected) leave(key, rank);
  // Who has yet to hear whether it gets the place is not forgotten: it has to hear that, and its end has to be told.
  if (before.instance != 0 && before.instance != claim.instance && before.incarnation == 0 && before.node != claim.node)
    claims_[{key, before.instance}] = before;
  rank = claim;
  if (claim.connected) nodes_[claim.node].hosts.add(RankSet(key.second));
}

Relay::RankState& Relay::take_place(const RankKey& key, NodeId node, std::uint64_t instance) {
  take_place(key, {.node = node, .instance = instance, .incarnation = 0, .connected = true, .lost_at = {}});
  return ranks_.at(key);
}

// What it reports goes up as anybody's does: it is of its own incarnation.
Relay::RankState& Relay::claim(const RankKey& key, NodeId node, std::uint64_t instance) {
  return claims_[{key, instance}] = {
             .node = node, .instance = instance, .incarnation = 0, .connected = true, .lost_at = {}};
}

void Relay::drop_claim(const RankKey& key, std::uint64_t instance) {
  auto dropped = claims_.extract({key, instance});
  if (dropped && dropped.mapped().connected) leave(key, dropped.mapped());
}

void Relay::join(const RankKey& key, RankState& rank, std::uint64_t incarnation) {
  if (rank.incarnation != incarnation) leave_group(key, rank);
  rank.incarnation = incarnation;
  groups_[{key.first, incarnation}].registered.add(RankSet(key.second));
}

// Each job counts its incarnations from 1: whoever came before it was known which job this is has the place of none.
void Relay::put_strangers_aside() {
  for (auto at = ranks_.begin(); at != ranks_.end();) {
    auto& [key, rank] = *at;
    if (rank.incarnation == 0 || !of_another_job(rank.job, plan_job_)) {
      ++at;
      continue;
    }
    quit_group(key, rank);
    claims_[{key, rank.instance}] = rank;
    at = ranks_.erase(at);
  }
}

// It is connected over that node, and so is nobody of this job who may be meant.
bool Relay::is_of_strangers(NodeId node, std::uint32_t replica, std::uint64_t incarnation) const {
  const auto is_it = [&](const RankKey& key, const RankState& rank) {
    return key.first == replica && rank.node == node && rank.incarnation == incarnation;
  };
  const auto strange = [&](const auto& claim) {
    return of_another_job(claim.second.job, plan_job_) && is_it(claim.first.first, claim.second);
  };
  return std::ranges::any_of(claims_, strange) &&
         std::ranges::none_of(ranks_, [&](const auto& rank) { return is_it(rank.first, rank.second); });
}

void Relay::leave(const RankKey& key, RankState& rank) {
  rank.connected = false;
  leave_group(key, rank);
}

void Relay::leave_group(const RankKey& key, const RankState& rank) {
  if (!of_another_job(rank.job, plan_job_)) quit_group(key, rank);  // a stranger is in none
}

void Relay::quit_group(const RankKey& key, const RankState& rank) {
  auto group = groups_.find({key.first, rank.incarnation});
  if (group == groups_.end()) return;
  if (const auto present = ranks_.find(key); present != ranks_.end() && present->second.connected &&
                                             present->second.instance != rank.instance &&
                                             present->second.incarnation == rank.incarnation)
    return;  // it is a claim's, and who has the place is in that group
  group->second.registered.remove(RankSet(key.second));
  group->second.statuses.erase(rank.node);
  if (group->second.registered.empty()) groups_.erase(group);
  else report_reduced(group->first, group->second);  // it may have waited for this one alone
}

void Relay::on_evicted(const proto::ToNode& message) {
  const auto& evicted = message.evicted();
  const auto is_it = [&](const RankState& rank) {
    return rank.incarnation == evicted.incarnation() && !of_another_job(rank.job, evicted.job());
  };
  std::set<NodeId> concerned;
  for (auto at = ranks_.lower_bound({evicted.replica(), 0}); at != ranks_.end() && at->first.first == evicted.replica();
       ++at)
    if (auto& [key, rank] = *at; is_it(rank) && rank.connected) {
      concerned.insert(rank.node);
      leave_group(key, rank);
    }
  for (auto at = claims_.lower_bound({{evicted.replica(), 0}, 0});
       at != claims_.end() && at->first.first.first == evicted.replica();) {
    auto& [key, claim] = *at;
    if (!is_it(claim)) {
      ++at;
      continue;
    }
    if (claim.connected) {
      concerned.insert(claim.node);
      leave_group(key.first, claim);
    }
    at = claims_.erase(at);
  }
  send({concerned.begin(), concerned.end()}, message);
}

}  // namespace rejoin::membership
