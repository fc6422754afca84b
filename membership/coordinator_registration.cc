// Who is there: ranks register, come back, and get their peers' addresses.
#include <fmt/format.h>

#include <algorithm>

#include "base/bytes.h"
#include "base/location.h"
#include "membership/coordinator.h"

namespace rejoin::membership {

void Coordinator::on_rank_up(NodeId node, const proto::RankUp& up) {
  const ReplicaId id(up.replica());
  if (up.replica() >= config_.replicas || up.rank() >= config_.ranks)
    return refuse(node, up, refusals::Why::job,
                  fmt::format("replica {} rank {} is outside this job of {} replicas × {} ranks, both numbered from 0",
                              up.replica(), up.rank(), config_.replicas, config_.ranks));
  if (belongs_elsewhere(node, up)) return;
  if (finished() && up.incarnation() == 0) return send_finished(node, up);
  if (up.version() > kMostSteps)
    return refuse(node, up, refusals::Why::offer,
                  fmt::format("its state's version is {}, and steps are numbered up to {}", up.version(), kMostSteps));
  if (up.incarnation() == 0 && claims_place(node, up)) return;
  if (differs(node, up)) return;
  if (auto contradiction = contradicted(up)) return refuse(node, up, refusals::Why::job, *contradiction);
  auto found = replicas_.find(id);
  if (up.incarnation() != 0) {  // it was registered before and comes back (its daemon or the coordinator restarted)
    const MemberState* m = members_.find(id);
    // By its incarnation; by its instance, too: what an earlier leader called it is over when it hears the later one.
    const bool known = found != replicas_.end() && (found->second.incarnation.value == up.incarnation() ||
                                                    rank_of(up.replica(), up.rank(), up.instance()) != nullptr);
    const Suspended* out = out_for_now(id);
    const bool from_log = (out != nullptr && out->incarnation.value == up.incarnation() && !out->ended) ||
                          (m != nullptr && m->incarnation.value == up.incarnation());
    // An earlier instance of this coordinator has given it out.
    const bool only_registered = never_members_.contains(up.incarnation()) &&
                                 (found == replicas_.end() || found->second.incarnation.value < up.incarnation());
    if (!known && !from_log && !only_registered) {
      const auto reason = reason_for_being_out(id);
      warn("replica {} rank {}, which has come back, is sent away: {}", id, up.rank(), reason);
      return evict(node, id, Incarnation(up.incarnation()), reason, up.job());
    }
    // Whoever had its place has ended.
    if (!known && !from_log) remove(id, fmt::format("rank {} was started again", up.rank()));
    auto& replica = replicas_[id];
    if (!known) replica.incarnation = Incarnation(up.incarnation());
    const bool was_fully_registered = fully_registered(replica);
    const RankState* there = rank_of(up.replica(), up.rank(), up.instance());
    if (recovering_until_ || there == nullptr || !there->connected_node) on_return();
    keep(replica, node, up);
    welcome_back(node, up, replica);
    if (!was_fully_registered && fully_registered(replica)) on_fully_registered(id);
    if (versions_of(replica.ranks[up.rank()]).spoken.version() < protocol_.version()) lower_protocol();
    on_reduced(reduced_of(up));  // stale, unless it is of this epoch and step
    return try_start();
  }
  register_new(node, up);
}

void Coordinator::refuse(NodeId node, const proto::RankUp& up, refusals::Why why, std::string reason) {
  proto::ToNode answer;
  auto& refused = *answer.mutable_refused();
  refused.set_replica(up.replica());
  refused.set_rank(up.rank());
  refused.set_instance(up.instance());
  refused.set_reason(std::move(reason));
  refused.set_why(static_cast<std::uint32_t>(why));
  warn("replica {} rank {} was refused: {}", up.replica(), up.rank(), refused.reason());
  send(node, std::move(answer));
}

// Who comes to a finished job has no part in it: it is registered by name only, so that it can hear the last plan.
void Coordinator::send_finished(NodeId node, const proto::RankUp& up) {
  auto& record = actions_.append.emplace_back();
  record.mutable_incarnated()->set_incarnation(++last_incarnation_);
  note_never_members(record);
  nodes_[node].hosts.add(up.rank(), std::uint64_t{up.rank()} + 1);
  welcome(node, up, Incarnation(last_incarnation_));
  send_plan(node);
}

// It was registered by a coordinator with another log, or has heard decisions that this log lacks. It is neither sent
// away, since it may have the last copy of its job's state, nor taken in: only this coordinator can be in the wrong
// place.
bool Coordinator::belongs_elsewhere(NodeId node, const proto::RankUp& up) {
  if (up.incarnation() == 0 || up.job() == 0 || job_ == 0) return false;
  const std::pair place(up.replica(), up.rank());
  if (up.job() != job_) {
    // Here another job runs, or that other coordinator has decided nothing: it may be sent away.
    const bool runs =
        std::any_of(members_.begin(), members_.end(), [&](const MemberState& m) { return contributes_here(m); });
    if (runs || up.heard_epoch() == 0) {
      const auto reason = fmt::format(
          "it belongs to job {:016x}, and this coordinator's is {:016x} (has its daemon another job's --connect?)",
          up.job(), job_);
      warn("replica {} rank {} is sent away: {}", up.replica(), up.rank(), reason);
      evict(node, ReplicaId(up.replica()), Incarnation(up.incarnation()), reason, up.job());
      return true;
    }
    auto what = fmt::format(
        "replica {} rank {}: it belongs to job {:016x}, which has committed step {}; this log is of job {:016x}, which "
        "has committed step {}: start the coordinator with that job's --log-directory, or end that process",
        up.replica(), up.rank(), up.job(), up.heard_committed(), job_, committed_);
    warn("{}", what);
    strangers_[place] = {node, up.instance(), std::move(what)};
    return true;
  }
  if (up.heard_epoch() <= epoch_.value && up.heard_committed() <= most_committed_.value) return false;
  outdated_ = fmt::format(
      "the log is an older copy: it ends with step {} in epoch {}, and replica {} rank {} has heard of step {} in "
      "epoch "
      "{}. Nothing is decided until the coordinator is started with the whole log, or, to go on from this one, "
      "without that process",
      most_committed_, epoch_, up.replica(), up.rank(), up.heard_committed(), up.heard_epoch());
  warn("{}", *outdated_);
  return true;
}

// A process that has not been registered yet, or none that anything depended on.
void Coordinator::register_new(NodeId node, const proto::RankUp& up) {
  const ReplicaId id(up.replica());
  auto found = replicas_.find(id);
  // If this replica lives already, that instance has ended without our hearing of it.
  if (found != replicas_.end() && !found->second.ranks.empty() && found->second.ranks[up.rank()].registered) {
    if (found->second.ranks[up.rank()].instance == up.instance()) {
      keep(found->second, node, up);  // it never heard our answer; its daemon may be another one by now
      return welcome_back(node, up, found->second);
    }
    remove(id, fmt::format("rank {} was started again", up.rank()));
    found = replicas_.find(id);
  }
  const auto is_it = [&](Incarnation incarnation) {
    return found == replicas_.end() || found->second.incarnation == incarnation;
  };
  const MemberState* m = members_.find(id);
  const Suspended* out = out_for_now(id);
  if ((m != nullptr && is_it(m->incarnation)) || (out != nullptr && is_it(out->incarnation))) {
    remove(id, fmt::format("rank {} was started again", up.rank()));
    found = replicas_.find(id);
  }
  if (found == replicas_.end()) {
    const Incarnation incarnation(++last_incarnation_);
    proto::LogRecord record;
    record.mutable_incarnated()->set_incarnation(last_incarnation_);
    note_never_members(record);
    actions_.append.push_back(std::move(record));
    found = replicas_.emplace(id, ReplicaState{.incarnation = incarnation}).first;
  }
  ReplicaState& replica = found->second;
  keep(replica, node, up).lost_at = now_;
  welcome(node, up, replica.incarnation);
  if (!fully_registered(replica)) return;
  note("replica {} has registered", id);
  on_fully_registered(id);
  try_start();
}

// Those who differ in what they declare could not connect with each other.
void Coordinator::on_fully_registered(ReplicaId id) {
  const bool differed = dissent();
  settle_declarations();
  auto found = replicas_.find(id);
  if (differed) unannounced_ = true;
  else if (found != replicas_.end() && may_announce()) announce_replica(found->second, id), tell_prospect();
  announce_after_dissent();
}

void Coordinator::welcome(NodeId node, const proto::RankUp& up, Incarnation incarnation) {
  proto::ToNode answer;
  auto& registered = *answer.mutable_registered();
  registered.set_replica(up.replica());
  registered.set_rank(up.rank());
  registered.set_instance(up.instance());
  registered.set_incarnation(incarnation.value);
  registered.set_job(job_);
  if (!links_.all(config_.replicas)) put_rule(links_, registered);
  send(node, std::move(answer));
}

// A rank that we know: the plan again, since one that it heard before could not mean it.
void Coordinator::welcome_back(NodeId node, const proto::RankUp& up, const ReplicaState& replica) {
  welcome(node, up, replica.incarnation);
  const bool recovering = recovering_until_.has_value();
  if (dissent()) {
    unannounced_ = true;
  } else if (may_announce() && !recovering) {  // otherwise all has just been announced to everybody
    owe(node, RankSet(up.rank()));
    if (fully_registered(replica)) announce_ranks(replica, ReplicaId(up.replica()), RankSet(up.rank()), {node});
  }
  if (finished()) send_plan(node);  // it may be the last that this coordinator says
  else if (started()) nodes_.at(node).owes_plan = true, owed_at_ = now_;
  if (present(ReplicaId(up.replica()), replica.incarnation)) pay_at_once();
  if (has_contributors()) prospect_.receivers.clear();  // it is sent again
  else if (!prospect_.ring.empty() && prospect_.candidates == 0) send(node, prospect_.message(job_));
}

void Coordinator::send_plan(NodeId node) {
  proto::ToNode current;
  *current.mutable_plan() = plan();
  send(node, std::move(current));
}

// As it says of itself now.
Coordinator::RankState& Coordinator::keep(ReplicaState& replica, NodeId node, const proto::RankUp& up) {
  replica.ranks.resize(config_.ranks);
  RankState& rank = replica.ranks[up.rank()];
  prospect_.stale = true;
  if (!rank.registered) rank.registered = true, ++replica.registered;
  rank.declaration = &declaration_of(up);
  replica.mixed = replica.mixed || (replica.declaration != nullptr && replica.declaration != rank.declaration);
  if (replica.declaration == nullptr) replica.declaration = rank.declaration;
  if (auto refused = refused_.find(ReplicaId(up.replica()));
      refused != refused_.end() && refused->second.first == up.rank())
    refused_.erase(refused);
  const auto process = ConnectedNode::Process::of(up);
  if (const auto before = nodes_.find(rank.node);
      rank.connected_node && rank.instance == up.instance() && rank.node != node && before != nodes_.end())
    before->second.moved.push_back(process);
  std::erase(nodes_[node].moved, process);
  rank.node = node;
  near_.stale |= replica.statuses.come(up.rank(), node);
  rank.instance = up.instance();
  rank.version = up.version();
  rank.digest = up.digest();
  rank.trained = keep_brought(Samples(up.trained(), kMostSamples));
  audit_.on_digest_time(up.rank(), std::chrono::microseconds(std::min<std::uint64_t>(up.digest_us(), 1'000'000'000)));
  rank.connected_node = true;
  rank.pid = up.pid();
  for (auto& claim : claims_)  // it is asked again, through where it is now
    if (claim.up.replica() == up.replica() && claim.up.rank() == up.rank()) claim.asked = {};
  rank.daemon = up.daemon();
  keep_versions(rank, node, up);
  rank.weighs = up.weighs();
  rank.passes_on = up.passes_on();
  std::string_view location = up.location();
  if (const auto right = Location::parse(location); !location.empty() && !right) {
    warn_once(
        fmt::format("replica {} rank {} on node {}: {}", up.replica(), up.rank(), up.node(), right.error().message));
    location = {};
  }
  rank.texts = RankTexts({up.address(), up.stream_address(), up.card(), location, up.node()});
  if (auto line = strange_stream(ReplicaId(up.replica()), up.rank()); !line.empty()) warn_once(std::move(line));
  nodes_[node].hosts.add(up.rank(), std::uint64_t{up.rank()} + 1);
  return rank;
}

// Where this process was stopped, what a daemon sent over a connection that it has left since may be heard behind what
// it sent over the next one. So whoever was heard over both when the first of them is lost says once more where it
// stands. `dropped`: those that asked for a place, and do no more. False: nobody was heard over both.
bool Coordinator::ask_the_other_nodes(NodeId lost, const ConnectedNode& was, const ConnectedNode::Processes& dropped) {
  std::set<NodeId> asked;
  for (const auto& one : was.moved)
    if (const RankState* rank = rank_of(one.replica, one.rank, one.instance); rank != nullptr && rank->connected_node)
      asked.insert(rank->node);
  for (auto& [node, state] : nodes_)
    std::erase_if(state.moved, [&, node = node](const auto& one) {
      const RankState* rank = rank_of(one.replica, one.rank, one.instance);
      const auto waits = [&](const Claim& claim) { return ConnectedNode::Process::of(claim.up) == one; };
      const bool asks = rank != nullptr ? !rank->connected_node && rank->node == lost
                                        : std::ranges::find(dropped, one) != dropped.end();
      if (asks) asked.insert(node);
      return asks || (rank == nullptr && std::ranges::none_of(claims_, waits));
    });
  if (asked.empty()) return false;
  proto::ToNode message;
  message.mutable_introduce();
  send_to({asked.begin(), asked.end()}, std::move(message));
  return true;
}

// Who are peers now. Whoever is not named is fenced by the others; so after a restart nothing is announced before all
// members have had their time to come back. Then everything is.
bool Coordinator::may_announce() {
  if (!recovering_until_) return true;
  if (!members_.empty() && !has_contributors()) return false;  // a joiner may yet say that it has caught up
  for (const auto& m : members_)
    if (!is_back(m)) return false;
  recovering_until_.reset();
  announce_all();
  return true;
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
