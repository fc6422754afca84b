// What a relay reports of many ranks as one, when the last of them has said it.
#include "membership/node.h"
#include "membership/relay.h"

namespace rejoin::membership {

// One report, when these were the last that it waited for. Once a step has ranks that had lacked connections, each at
// once: that is how the coordinator hears that they have them now, and it is to know who hangs.
void Relay::add_reduced_ranks(const proto::Reduced& theirs) {
  const GroupKey key{theirs.replica(), theirs.incarnation()};
  const std::uint64_t epoch = theirs.epoch(), step = theirs.step();
  auto found = groups_.find(key);
  if (found == groups_.end()) return;
  Group& group = found->second;
  const std::pair reported(epoch, step), known(group.epoch, group.step);
  if (reported < known || epoch == 0) return;
  if (reported > known) group.reduced.clear(), group.digests.clear(), group.computed = {};
  std::tie(group.epoch, group.step) = reported;
  const RankSet ranks(theirs.ranks(), kNoLimit);
  group.reduced.add(ranks);
  group.digests.take(theirs, kMostRanks);
  group.computed.add(theirs.compute_us());
  if (reported == std::pair(plan_.first, plan_.second + 1) && hear_others_than(key.first, ranks))
    group.at_once = reported;
  report_reduced(key, group);
}

void Relay::report_reduced(const GroupKey& key, const Group& group) {
  const bool at_once = group.at_once == std::pair(group.epoch, group.step);
  if (group.reduced.empty() || !(at_once || group.reduced.includes(group.registered))) return;
  auto& reduced = *up().mutable_reduced();
  reduced.set_replica(key.first);
  reduced.set_incarnation(key.second);
  reduced.set_epoch(group.epoch);
  reduced.set_step(group.step);
  group.reduced.to(reduced.mutable_ranks());
  reduced.set_compute_us(group.computed.us());
  group.digests.write_to(group.reduced, reduced);
}

void Relay::on_replica_status(NodeId node, const proto::ReplicaStatus& status) {
  auto found = groups_.find({status.replica(), status.incarnation()});
  if (found == groups_.end()) return;
  found->second.statuses[node] = status;
  report_status(found->first);
}

void Relay::report_status(const GroupKey& key) {
  const auto found = groups_.find(key);
  if (found == groups_.end()) return;
  Group& group = found->second;
  RankSet together;
  std::optional<Incarnations> links;
  RoundTrips round_trips;
  LinkRates rates;
  bool caught_up = true;
  proto::FromNode message;
  auto& all_of_it = *message.mutable_replica_status();
  for (const auto& [node, status] : group.statuses) {
    for (const auto& one : status.unreached()) add_unreached(one, all_of_it);
    together.add(RankSet(status.ranks(), kNoLimit));
    caught_up = caught_up && status.caught_up();
    keep_common(links, Incarnations(status.links(), kNoLimit));
    round_trips.keep_longer(RoundTrips(status.round_trips()));
    rates.keep_lower(LinkRates(status.rates()));
  }
  if (!together.includes(group.registered)) return;
  all_of_it.set_replica(key.first);
  all_of_it.set_incarnation(key.second);
  all_of_it.set_caught_up(caught_up);
  links->to(all_of_it.mutable_links());
  round_trips.to(all_of_it.mutable_round_trips());
  rates.to(all_of_it.mutable_rates());
  together.to(all_of_it.mutable_ranks());
  if (std::string now = all_of_it.SerializeAsString(); std::exchange(group.last_status, now) != now)
    up() = std::move(message);
}

}  // namespace rejoin::membership
