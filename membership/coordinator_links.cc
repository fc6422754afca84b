// With whom replicas are to be connected before they are members: a start and an admission wait for that. In a small
// job with all others; in a larger one a Prospect tells them whom they will need (base/ring_links.h). And in which
// order members stand.
#include <algorithm>

#include "membership/coordinator.h"

namespace rejoin::membership {

namespace {

std::string_view location_of(const Coordinator::RankState& rank) {
  return std::string_view(rank.addresses)
      .substr(std::size_t{rank.address_size} + rank.stream_size + rank.card_size, rank.location_size);
}

}  // namespace

// Each of its ranks is connected with all of these, itself left out.
bool Coordinator::linked(const ReplicaState& replica, const Incarnations& incarnations) const {
  Incarnations self, others = incarnations;
  self.insert(replica.incarnation.value);
  others.remove(self);
  if (others.empty()) return true;
  std::uint64_t count = 0;
  for (const auto& status : replica.statuses)
    if (status.links.includes(others)) count += status.ranks.size();
  return count == config_.ranks;
}

// `promoted`: as it will be at the next step boundary.
Ring Coordinator::ring_of_members(bool promoted) const {
  Ring ring;
  for (const auto& m : members_)
    ring.push_back({m.replica, m.incarnation, m.catching_up && !(promoted && caught_up(m))});
  return in_ring_order(std::move(ring));
}

// Where all of its ranks say that they are.
std::optional<Located> Coordinator::located(ReplicaId id, Incarnation incarnation) const {
  const ReplicaState* here = registration(id, incarnation);
  if (here == nullptr || !fully_registered(*here)) return std::nullopt;
  Located located{.replica = id, .ranks = {}};
  for (const auto& rank : here->ranks) {
    if (rank.location_size == 0) return std::nullopt;
    located.ranks.push_back(location_of(rank));
  }
  return located;
}

// The contributors first. Each kind stands by where they are (ring_order.h), where all of the kind say that, and
// otherwise as it did. Where not all are connected with each other those who catch up stay as they have come: who is
// to be admitted connects for the last place.
Ring Coordinator::in_ring_order(Ring ring) const {
  ring = in_order(std::move(ring));
  const auto sort = [&](Ring::iterator begin, Ring::iterator end) {
    std::vector<std::pair<Located, Place>> all;
    for (auto one = begin; one != end; ++one) {
      auto its = located(one->replica, one->incarnation);
      if (!its) return;
      all.emplace_back(std::move(*its), *one);
    }
    std::ranges::sort(all, stands_before, [](const auto& one) -> const Located& { return one.first; });
    std::ranges::transform(all, begin, [](const auto& one) { return one.second; });
  };
  const auto joiners = std::ranges::find_if(ring, &Place::catching_up);
  sort(ring.begin(), joiners);
  if (links_.all(config_.replicas)) sort(joiners, ring.end());
  return ring;
}

// For an epoch that begins. Members whose ring stays as it is stay as they stand in the plan.
void Coordinator::order_members() {
  Ring ring;
  for (const auto& m : members_) ring.push_back({m.replica, m.incarnation, m.catching_up});
  const Ring ordered = in_ring_order(ring);
  if (in_order(std::move(ring)) == ordered) return;
  std::map<ReplicaId, std::size_t> places;
  for (const auto& place : ordered) places.emplace(place.replica, places.size());
  std::ranges::sort(members_, {}, [&](const MemberState& m) { return places.at(m.replica); });
}

// Registered, and neither members nor out for now: in the order in which they have come.
std::vector<ReplicaId> Coordinator::candidates() const {
  std::set<ReplicaId> others;
  for (const auto& m : members_) others.insert(m.replica);
  for (const auto& out : suspended_) others.insert(out.replica);
  std::vector<std::pair<Incarnation, ReplicaId>> by_incarnation;
  for (const auto& [id, replica] : replicas_) {
    if (!fully_registered(replica) || others.contains(id)) continue;
    if (first_ && (replica.mixed || !fits(*replica.declaration, *first_))) continue;
    by_incarnation.emplace_back(replica.incarnation, id);
  }
  std::ranges::sort(by_incarnation);
  std::vector<ReplicaId> all;
  for (const auto& [incarnation, id] : by_incarnation) all.push_back(id);
  return all;
}

// One of those that are to start, ascending, whose links the others wait for; whoever was it the last time most likely
// still is.
std::optional<ReplicaId> Coordinator::not_linked(const std::vector<ReplicaId>& to_start) {
  const bool all = links_.all(config_.replicas);
  if (!all) tell_prospect_of_start(to_start);
  Incarnations incarnations;
  if (all)
    for (auto id : to_start) incarnations.insert(replicas_.at(id).incarnation.value);
  const auto lacks = [&](std::size_t position) {
    if (all) return !linked(replicas_.at(to_start[position]), incarnations);
    return !linked(replicas_.at(prospect_.ring[position].replica), links_in(links_, prospect_.ring, position));
  };
  const auto at = [&](std::size_t position) { return all ? to_start[position] : prospect_.ring[position].replica; };
  for (std::size_t i = 0; i < to_start.size(); ++i)
    if (at(i) == not_linked_ && lacks(i)) return not_linked_;
  for (std::size_t i = 0; i < to_start.size(); ++i)
    if (lacks(i)) return at(i);
  return std::nullopt;
}

// To all, once for each set of replicas and what they have come with: who will stand where.
void Coordinator::tell_prospect_of_start(const std::vector<ReplicaId>& to_start) {
  std::vector<std::pair<ReplicaId, Incarnation>> of;
  for (auto id : to_start) of.emplace_back(id, replicas_.at(id).incarnation);
  if (!prospect_.stale && prospect_.of_start == of) return;
  const auto from = newest(to_start);
  const auto fit = from ? fit_to_start(to_start, *from) : std::vector<bool>(to_start.size(), true);
  Ring ring;
  for (std::size_t i = 0; i < of.size(); ++i) ring.push_back({of[i].first, of[i].second, !fit[i]});
  ring = in_ring_order(std::move(ring));
  const bool told = ring == prospect_.ring && prospect_.candidates == 0;
  prospect_ = {.ring = std::move(ring), .candidates = 0, .of_start = std::move(of), .told = {}, .told_at = now_};
  if (!told) send_all(prospect_.message(job_));
}

// To those who wait to be admitted, when it has changed. Where many come at once, not with each of them.
void Coordinator::tell_prospect() {
  if (links_.all(config_.replicas) || !has_contributors() || recovering_until_) return;
  constexpr std::size_t few = 16;
  const auto waiting = candidates();
  if (waiting.empty() || (waiting.size() > few && now_ - prospect_.told_at < config_.silence / 16)) return;
  Ring ring = ring_of_members(true);
  std::set<NodeId> nodes;
  for (auto id : waiting) {
    const ReplicaState& replica = replicas_.at(id);
    ring.push_back({id, replica.incarnation, true});
    for (const auto& rank : replica.ranks)
      if (rank.connected_node) nodes.insert(rank.node);
  }
  const std::vector<NodeId> told(nodes.begin(), nodes.end());
  if (ring == prospect_.ring && waiting.size() == prospect_.candidates && told == prospect_.told) return;
  prospect_ = {.ring = std::move(ring), .candidates = waiting.size(), .of_start = {}, .told = told, .told_at = now_};
  send_to(told, prospect_.message(job_));
}

}  // namespace rejoin::membership
