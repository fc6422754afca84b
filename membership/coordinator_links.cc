// With whom replicas are to be connected before they are members: a start and an admission wait for that. In a small
// job with all others; in a larger one a Prospect tells them whom they will need (base/ring_links.h). And in which
// order members stand. And what they say of how they are connected.
#include <algorithm>

#include "membership/coordinator.h"

namespace rejoin::membership {

namespace {

// Of who stands where in a start: other links may tell more, and so on.
constexpr unsigned kMostChanges = 4;

// Those that have come through this node last.
RankSet here(const ReplicaState& replica, const RankSet& ranks, NodeId node) {
  RankSet its = ranks;
  for (const auto& [begin, end] : ranks.ranges())
    for (auto number = begin; number < std::min<std::uint64_t>(end, replica.ranks.size()); ++number)
      if (replica.ranks[number].registered && replica.ranks[number].node != node) its.remove(RankSet(number));
  return its;
}

}  // namespace

// That a replica has caught up is acted on at the next step boundary, or when nobody else is left, whoever says it.
void Coordinator::on_replica_status(NodeId node, const proto::ReplicaStatus& status) {
  auto found = replicas_.find(ReplicaId(status.replica()));
  if (found == replicas_.end() || found->second.incarnation.value != status.incarnation()) return;
  const RankSet named(status.ranks(), config_.ranks);
  if (is_of_strangers(node, status.replica(), RankSet(status.ranks(), ~std::uint64_t{0}))) return;
  if (status.caught_up()) found->second.caught_up.add(named);
  ConnectedRanks current{.ranks = {},
                         .links = Incarnations(status.links(), ~std::uint64_t{0}),
                         .unreached = {status.unreached().begin(), status.unreached().end()},
                         .round_trips = RoundTrips(status.round_trips()),
                         .rates = LinkRates(status.rates())};
  const RoundTrips trips_before = round_trips(found->first, found->second.incarnation);
  if (MemberState* m = members_.find(found->first); m != nullptr && m->catching_up && !m->complete && caught_up(*m)) {
    m->complete = true;
    if (could_say(*m)) holder_heard_ = now_;  // and was heard before
    actions_.append.emplace_back().mutable_caught_up()->set_incarnation(m->incarnation.value);
  }
  found->second.statuses.say(node, std::move(current), named, here(found->second, named, node));
  near_.stale = near_.stale || round_trips(found->first, found->second.incarnation) != trips_before;
  if (members_.find(found->first) == nullptr && out_for_now(found->first) == nullptr)
    for (auto& line : unreached_lines(found->first, found->second)) warn_once(std::move(line));
  try_start();
}

// Each of its ranks is connected with all of these, itself left out.
bool Coordinator::linked(const ReplicaState& replica, const Incarnations& incarnations) const {
  Incarnations self, others = incarnations;
  self.insert(replica.incarnation.value);
  others.remove(self);
  if (others.empty()) return true;
  std::uint64_t count = 0;
  for (const auto& status : replica.statuses.current())
    if (status.links.includes(others)) count += status.ranks.size();
  return count == config_.ranks;
}

// At the next step boundary those who have caught up contribute.
Ring Coordinator::ring_of_members(When when) const {
  Ring ring;
  for (const auto& m : members_)
    ring.push_back({m.replica, m.incarnation, m.catching_up && !(when == When::next_step && caught_up(m))});
  return in_ring_order(std::move(ring));
}

// Where all of its ranks say that they are.
std::optional<Located> Coordinator::located(ReplicaId id, Incarnation incarnation) const {
  const ReplicaState* here = registration(id, incarnation);
  if (here == nullptr || !fully_registered(*here)) return std::nullopt;
  Located located{.replica = id, .ranks = {}};
  for (const auto& rank : here->ranks) {
    const std::string_view location = rank.texts.at(RankText::location);
    if (location.empty()) return std::nullopt;
    located.ranks.push_back(location);
  }
  return located;
}

RoundTrips Coordinator::round_trips(ReplicaId id, Incarnation incarnation) const {
  RoundTrips all;
  if (const ReplicaState* here = registration(id, incarnation))
    for (const auto& status : here->statuses.current()) all.keep_longer(status.round_trips);
  return all;
}

Neighbourhoods Coordinator::near_each_other(std::span<const RingMember> members) const {
  std::vector<std::uint64_t> of;
  for (const auto& member : members) of.push_back(member.incarnation.value);
  if (!near_.stale && near_.of == of) return near_.found;
  std::vector<RoundTrips> reported;
  std::vector<Measured> measured;
  for (const auto& member : members) reported.push_back(round_trips(member.replica, member.incarnation));
  for (std::size_t i = 0; i < members.size(); ++i) measured.push_back({of[i], &reported[i]});
  near_ = {std::move(of), membership::neighbourhoods(members.size(), ways_between(measured)), false};
  return near_.found;
}

std::vector<std::vector<ReplicaId>> Coordinator::neighbourhoods() const {
  const Ring ring = ring_in_plan();
  std::vector<std::vector<ReplicaId>> all;
  for (const auto& one : near_each_other(ring)) {
    auto& replicas = all.emplace_back();
    for (auto position : one) replicas.push_back(ring[position].replica);
  }
  return all;
}

// By where they say that they are (ring_order.h), or, where not all do, and of those that are in one location, by who
// is near whom. As long as somebody has yet to come back they stand as they did.
void Coordinator::order_by_location(Ring::iterator begin, Ring::iterator end, Moving moving) const {
  std::vector<std::pair<Located, RingMember>> all;
  bool all_located = true;
  for (auto one = begin; one != end; ++one) {
    const ReplicaState* here = registration(one->replica, one->incarnation);
    if (here == nullptr || !fully_registered(*here)) return;
    auto its = located(one->replica, one->incarnation);
    all_located = all_located && its;
    if (its && moving == Moving::no) its->replica = ReplicaId(static_cast<std::uint32_t>(all.size()));  // as they stand
    all.emplace_back(its ? std::move(*its) : Located{}, *one);
  }
  if (all_located) {
    std::ranges::sort(all, stands_before, [](const auto& one) -> const Located& { return one.first; });
    std::ranges::transform(all, begin, [](const auto& one) { return one.second; });
  }
  if (moving == Moving::no || !config_.round_trips) return;
  for (std::size_t from = 0, to = 0; from < all.size(); from = to) {
    while (to < all.size() && (!all_located || all[to].first.ranks == all[from].first.ranks)) ++to;
    if (to - from < 3) continue;  // whose order makes no difference
    const std::vector<RingMember> some(begin + static_cast<std::ptrdiff_t>(from),
                                       begin + static_cast<std::ptrdiff_t>(to));
    // Of a part of the ring what is before and behind it counts as one more, which is near nobody.
    const std::size_t others = some.size() < all.size() ? 1 : 0;
    const auto order = together(some.size() + others, near_each_other(some));
    for (std::size_t i = 0; i < some.size(); ++i) begin[static_cast<std::ptrdiff_t>(from + i)] = some[order[i]];
  }
}

// The contributors first. Where not all are connected with each other those who catch up stay as they have come: who is
// to be admitted connects for the last place.
Ring Coordinator::in_ring_order(Ring ring, Moving moving) const {
  ring = in_order(std::move(ring));
  const auto joiners = std::ranges::find_if(ring, &RingMember::catching_up);
  order_by_location(ring.begin(), joiners, moving);
  if (links_.all(config_.replicas)) order_by_location(joiners, ring.end(), moving);
  return ring;
}

Ring Coordinator::ring_in_plan() const {
  Ring ring;
  for (const auto& m : members_) ring.push_back({m.replica, m.incarnation, m.catching_up});
  return ring;
}

// For an epoch that begins. Members whose ring stays as it is stay as they stand in the plan. Where a loss begins it,
// and whoever moves would need other connections, nobody does for what was measured meanwhile.
void Coordinator::order_members(Begun step) {
  const Ring ring = ring_in_plan();
  const bool costs = !links_.all(config_.replicas) && step != Begun::fresh;
  const Ring ordered = in_ring_order(ring, costs ? Moving::no : Moving::yes);
  if (in_order(ring) == ordered) return;
  std::map<ReplicaId, std::size_t> positions;
  for (const auto& member : ordered) positions.emplace(member.replica, positions.size());
  members_.order_by(positions);
}

// Registered, and neither members, nor out for now, nor held back: in the order in which they have come.
std::vector<ReplicaId> Coordinator::candidates() const {
  std::set<ReplicaId> others;
  for (const auto& m : members_) others.insert(m.replica);
  for (const auto& out : suspended_) others.insert(out.replica);
  const auto& first = declarations_.first();
  std::vector<std::pair<Incarnation, ReplicaId>> by_incarnation;
  for (const auto& [id, replica] : replicas_) {
    if (!fully_registered(replica) || others.contains(id) || readmissions_.until(id, now_)) continue;
    if (first && !Declarations::fits(replica, *first)) continue;
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
  for (;;) {
    for (std::size_t i = 0; i < to_start.size(); ++i)
      if (at(i) == not_linked_ && lacks(i)) return not_linked_;
    for (std::size_t i = 0; i < to_start.size(); ++i)
      if (lacks(i)) return at(i);
    if (all || prospect_.changed >= kMostChanges) return std::nullopt;
    // Now that they are connected they have told who is near whom, by which they may stand otherwise.
    const Ring before = prospect_.ring;
    prospect_.stale = true;
    tell_prospect_of_start(to_start);
    if (prospect_.ring == before) return std::nullopt;
  }
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
  const bool sent = ring == prospect_.ring && prospect_.candidates == 0;
  const unsigned changed = prospect_.of_start == of ? prospect_.changed + (sent ? 0 : 1) : 0;
  prospect_ = {.ring = std::move(ring),
               .candidates = 0,
               .of_start = std::move(of),
               .changed = changed,
               .receivers = {},
               .sent_at = now_};
  if (!sent) send_all(prospect_.message(job_));
}

// To those who wait to be admitted, when it has changed. Where many come at once, not with each of them.
void Coordinator::tell_prospect() {
  if (links_.all(config_.replicas) || !has_contributors() || recovering_until_) return;
  constexpr std::size_t few = 16;
  const auto waiting = candidates();
  if (waiting.empty() || (waiting.size() > few && now_ - prospect_.sent_at < config_.silence / 16)) return;
  Ring ring = ring_of_members(When::next_step);
  std::set<NodeId> nodes;
  for (auto id : waiting) {
    const ReplicaState& replica = replicas_.at(id);
    ring.push_back({id, replica.incarnation, true});
    for (const auto& rank : replica.ranks)
      if (rank.connected_node) nodes.insert(rank.node);
  }
  const std::vector<NodeId> receivers(nodes.begin(), nodes.end());
  if (ring == prospect_.ring && waiting.size() == prospect_.candidates && receivers == prospect_.receivers) return;
  prospect_ = {.ring = std::move(ring), .candidates = waiting.size(), .receivers = receivers, .sent_at = now_};
  send_to(receivers, prospect_.message(job_));
}

}  // namespace rejoin::membership
