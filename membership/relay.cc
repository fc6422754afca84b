#include "membership/relay.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/deadlines.h"
#include "membership/greeting.h"
#include "membership/node.h"

namespace rejoin::membership {

// ---- the coordinator

Relay::Actions Relay::on_coordinator_up(TimePoint now, std::uint64_t introduction) {
  coordinator_up_ = true;
  alone_since_.reset();
  alone_reported_ = false;
  coordinator_heard_ = heartbeat_sent_ = now;
  auto& hello = *up().mutable_hello();
  hello = hello_of(name_, silence_);
  hello.set_relay(true);
  hello.set_introduction(introduction);
  std::vector<NodeId> all;
  for (const auto& [node, state] : nodes_) all.push_back(node);
  ask_to_introduce(std::move(all));
  return take();
}

void Relay::ask_to_introduce(std::vector<NodeId> nodes) {
  ++introductions_;
  for (const auto node : nodes) nodes_.at(node).asked = introductions_;
  proto::ToNode introduce;
  introduce.mutable_introduce()->set_number(introductions_);
  send(std::move(nodes), std::move(introduce));
}

Relay::Actions Relay::on_coordinator_down(TimePoint now) {
  coordinator_up_ = false;
  if (!alone_since_) alone_since_ = now;
  for (auto& [node, state] : nodes_) {
    state.introduced = state.wants_plan = false;
    state.hosts.clear();
  }
  ranks_.clear();
  groups_.clear();
  claims_.clear();
  plan_ = {};
  accused_.clear();
  of_themselves_.clear();
  return take();
}

Relay::Actions Relay::on_coordinator_message(const proto::ToNode& message, TimePoint now) {
  coordinator_heard_ = now;
  // To the rank that this answers.
  const auto answer = [&](std::uint32_t replica, std::uint32_t number, std::uint64_t instance) -> RankState* {
    if (auto claim = claims_.find({{replica, number}, instance}); claim != claims_.end()) {
      const RankState its = claim->second;
      if (message.has_registered()) {
        claims_.erase(claim);
        take_place({replica, number}, its);
      } else {
        if (its.connected) send({its.node}, message);
        if (message.has_refused()) drop_claim({replica, number}, instance);
      }
    }
    auto found = ranks_.find({replica, number});
    if (found == ranks_.end() || found->second.instance != instance || !found->second.connected) return nullptr;
    send({found->second.node}, message);
    return &found->second;
  };
  switch (message.kind_case()) {
    // The coordinator knows the ranks still, so it has to hear of those that are lost before they have said all again.
    case proto::ToNode::kIntroduce:
      for (auto& [key, group] : groups_) group.last_status.clear();
      return on_coordinator_up(now, message.introduce().number());
    case proto::ToNode::kWelcome: pace_ = pace_of("this relay", silence_, message.welcome(), actions_.notes); break;
    case proto::ToNode::kLeads:  // for LeaderTracker
    case proto::ToNode::kHeartbeat: break;
    case proto::ToNode::kRegistered: {
      const auto& registered = message.registered();
      RankState* rank = answer(registered.replica(), registered.rank(), registered.instance());
      if (rank == nullptr) break;
      nodes_.at(rank->node).wants_plan = true;
      rank->job = registered.job();
      join({registered.replica(), registered.rank()}, *rank, registered.incarnation());
      break;
    }
    case proto::ToNode::kRefused:
      answer(message.refused().replica(), message.refused().rank(), message.refused().instance());
      break;
    case proto::ToNode::kInquiry:
      answer(message.inquiry().replica(), message.inquiry().rank(), message.inquiry().instance());
      break;
    case proto::ToNode::kDeclare:
      answer(message.declare().replica(), message.declare().rank(), message.declare().instance());
      break;
    case proto::ToNode::kEvicted: on_evicted(message); break;
    case proto::ToNode::kPeers: on_peers(message.peers()); break;
    case proto::ToNode::kPlan: on_plan(message); break;
    case proto::ToNode::kProspect:
    case proto::ToNode::kWaits: {
      std::vector<NodeId> all;
      for (const auto& [node, state] : nodes_) all.push_back(node);
      send(std::move(all), message);
      break;
    }
    case proto::ToNode::KIND_NOT_SET:
      actions_.notes.push_back({"an empty message from the coordinator was ignored", true});
      break;
  }
  return take();
}

void Relay::write_hosts(proto::LeaderView& view) {
  std::map<std::uint32_t, RankSet> hosted;
  std::uint64_t job = 0;
  for (auto& [node, state] : nodes_)
    for (auto& [key, place] : state.places) {
      hosted[key.first].add(RankSet(key.second));
      const auto rank = ranks_.find(key);
      if (plan_.first > 0 && rank != ranks_.end() && rank->second.instance == place.instance &&
          rank->second.incarnation != 0 && rank->second.job == plan_job_)
        place.job = plan_job_;
      if (finished_ && place.job == plan_job_) place.job = 0;
      if (place.job != 0 && (job == 0 || job != view.job())) job = place.job;
    }
  view.set_job(job);
  membership::write_hosts(hosted, view);
}

void Relay::note_places(NodeState& of, const proto::FromNode& message) {
  if (message.has_hello()) of.places.clear();
  if (const auto& up = message.rank_up(); message.has_rank_up())
    of.places[{up.replica(), up.rank()}] = {up.instance(), up.heard_epoch() > 0 ? up.job() : 0};
  if (const auto& down = message.rank_down(); message.has_rank_down())
    if (auto found = of.places.find({down.replica(), down.rank()});
        found != of.places.end() && found->second.instance == down.instance())
      of.places.erase(found);
}

void Relay::on_peers(const proto::Peers& peers) {
  const RankSet complete(peers.complete(), kNoLimit);
  std::multimap<std::uint32_t, const proto::Peer*> by_rank;
  for (const auto& peer : peers.peers()) by_rank.emplace(peer.rank(), &peer);
  for (const auto& [node, state] : nodes_) {
    proto::ToNode message;
    auto& its = *message.mutable_peers();
    complete.common(state.hosts).to(its.mutable_complete());
    *its.mutable_gone() = peers.gone();
    its.set_job(peers.job());
    for (const auto& [begin, end] : state.hosts.ranges())
      for (auto at = by_rank.lower_bound(static_cast<std::uint32_t>(begin)); at != by_rank.end() && at->first < end;
           ++at)
        *its.add_peers() = *at->second;
    if (!its.peers().empty() || !its.complete().empty() || !its.gone().empty()) send({node}, std::move(message));
  }
}

void Relay::on_plan(const proto::ToNode& message) {
  const std::pair now(message.plan().epoch(), message.plan().committed());
  const bool fresh = now != plan_ || finished_ != message.plan().finished();
  if (fresh) accused_.clear(), of_themselves_.clear();
  plan_ = now;
  if (std::exchange(plan_job_, message.plan().job()) != plan_job_) put_strangers_aside();
  finished_ = message.plan().finished();
  std::vector<NodeId> concerned;
  for (auto& [node, state] : nodes_)
    if (std::exchange(state.wants_plan, false) || fresh) concerned.push_back(node);
  send(std::move(concerned), message);
}

// ---- the daemons

Relay::Actions Relay::on_node_message(NodeId node, const proto::FromNode& message, TimePoint now) {
  NodeState& from = nodes_[node];
  from.heard = now;
  note_places(from, message);
  // Once to each coordinator: whoever is asked again is heard meanwhile, as its ranks are known.
  if (message.has_hello()) from.introduced |= coordinator_up_ && message.hello().introduction() == from.asked;
  if (alone_reported_ && message.has_rank_up()) send({node}, alone());
  if (!from.introduced && !message.has_hello() && !message.has_heartbeat()) return take();
  switch (message.kind_case()) {
    case proto::FromNode::kHello:  // the shell has checked it
      from.name = message.hello().node();
      from.address = message.hello().address();
      from.spoken = Spoken::with(Versions::of(message.hello()));
      break;
    case proto::FromNode::kRankUp: {
      auto& passed = *up().mutable_rank_up() = message.rank_up();
      passed.set_speaks(Spoken::through(message.rank_up().speaks(), from.spoken).version());
      on_rank_up(node, message.rank_up());
      break;
    }
    case proto::FromNode::kRankDown: {
      const auto& down = message.rank_down();
      drop_claim({down.replica(), down.rank()}, down.instance());
      if (auto found = ranks_.find({down.replica(), down.rank()});
          found != ranks_.end() && found->second.instance == down.instance()) {
        leave(found->first, found->second);
        report_status({down.replica(), found->second.incarnation});
        ranks_.erase(found);
      }
      up() = message;
      break;
    }
    case proto::FromNode::kReduced:
      if (const auto& reduced = message.reduced(); !is_of_strangers(node, reduced.replica(), reduced.incarnation()))
        add_reduced_ranks(reduced);
      break;
    case proto::FromNode::kReplicaStatus:
      if (const auto& status = message.replica_status(); !is_of_strangers(node, status.replica(), status.incarnation()))
        on_replica_status(node, status);
      break;
    case proto::FromNode::kAccusation:
      if (passes_on(message.accusation(), now)) up() = message;
      break;
    case proto::FromNode::kDetails:
    case proto::FromNode::kAlive:
    case proto::FromNode::kDeclaration:
    case proto::FromNode::kReport:
    case proto::FromNode::kDrift: up() = message; break;
    case proto::FromNode::kHeartbeat: {
      proto::ToNode alive;
      alive.mutable_heartbeat();
      send({node}, std::move(alive));
      break;
    }
    case proto::FromNode::kLinks:
    case proto::FromNode::kCaughtUp:
    case proto::FromNode::kLeaderView:
    case proto::FromNode::KIND_NOT_SET:
      actions_.notes.push_back({"a message from a node that says nothing to a coordinator was ignored", true});
  }
  return take();
}

// Its ranks may still run: they have `silence` to come back through another connection. Where this process was stopped,
// what was sent over this one may have been heard behind what was sent over that other one.
Relay::Actions Relay::on_node_lost(NodeId node, TimePoint now) {
  const auto gone = nodes_.extract(node);
  std::set<NodeId> asked;
  std::set<GroupKey> left;
  const auto lose = [&](const RankKey& key, RankState& rank) {
    if (!rank.connected || rank.node != node) return;
    leave(key, rank);
    left.insert({key.first, rank.incarnation});
    rank.lost_at = now;
    for (const auto& [other, state] : nodes_)
      if (const auto place = state.places.find(key);
          place != state.places.end() && place->second.instance == rank.instance)
        asked.insert(other);
  };
  for (auto& [key, claim] : claims_) lose(key.first, claim);
  for (auto& [key, rank] : ranks_) lose(key, rank);
  for (auto& [key, group] : groups_) group.statuses.erase(node);
  for (const auto& key : left) report_status(key);  // the others' may have waited for those alone
  if (!gone.empty())
    for (const auto& [key, place] : gone.mapped().places)
      if (const auto rank = ranks_.find(key);
          rank != ranks_.end() && rank->second.connected && rank->second.instance == place.instance)
        asked.insert(rank->second.node);
  if (!asked.empty()) ask_to_introduce({asked.begin(), asked.end()});
  return take();
}

Relay::Actions Relay::on_tick(TimePoint now) {
  if (const Duration pause = pause_detector_.on_tick(now); pause > Duration{}) {
    actions_.notes.push_back(
        {fmt::format("this relay was paused for {:.0f} ms; nobody is put out for that time", milliseconds(pause)),
         true});
    for (auto& [node, state] : nodes_) forgive(state.heard, pause, now);
    for (auto& [key, rank] : ranks_) forgive(rank.lost_at, pause, now);
    for (auto& [key, claim] : claims_) forgive(claim.lost_at, pause, now);
    forgive(coordinator_heard_, pause, now);
  }
  if (!pause_detector_.settling(now)) lose_silent(now);
  tell_that_it_is_alone(now);
  if (coordinator_up_ && now - heartbeat_sent_ >= pace_) {
    heartbeat_sent_ = now;
    up().mutable_heartbeat();
  }
  return take();
}

// The daemons are connected with it, and their trainers would find nothing amiss.
void Relay::tell_that_it_is_alone(TimePoint now) {
  if (coordinator_up_ || finished_) return;
  if (!alone_since_) alone_since_ = now;
  if (now - *alone_since_ <= silence_ || std::exchange(alone_reported_, true)) return;
  std::vector<NodeId> all;
  for (const auto& [node, state] : nodes_) all.push_back(node);
  send(std::move(all), alone());
}

proto::ToNode Relay::alone() const {
  proto::ToNode message;
  message.mutable_waits()->set_stands(true);
  message.mutable_waits()->set_why(fmt::format("a coordinator: relay {} is connected with none", name_));
  return message;
}

void Relay::lose_silent(TimePoint now) {
  std::vector<NodeId> silent;
  for (const auto& [node, state] : nodes_)
    if (now - state.heard > silence_) silent.push_back(node);
  for (auto node : silent) {
    const std::string who = fmt::format("{} at {}", nodes_.at(node).name, nodes_.at(node).address);
    auto more = on_node_lost(node, now - silence_);
    actions_ = std::move(more);
    actions_.notes.push_back({fmt::format("node {} was silent for {:.0f} ms", who, milliseconds(silence_)), true});
    actions_.close.push_back(node);
  }
  for (auto entry = ranks_.begin(); entry != ranks_.end();) {
    const auto& [key, rank] = *entry;
    if (rank.connected || now - rank.lost_at < silence_) {
      ++entry;
      continue;
    }
    down(key, rank.instance);
    entry = ranks_.erase(entry);
  }
  std::erase_if(claims_, [&](const auto& entry) {
    const auto& [key, claim] = entry;
    const bool gone = !claim.connected && now - claim.lost_at >= silence_;
    if (gone) down(key.first, key.second);
    return gone;
  });
}

void Relay::down(const RankKey& key, std::uint64_t instance) {
  auto& down = *up().mutable_rank_down();
  down.set_replica(key.first);
  down.set_rank(key.second);
  down.set_instance(instance);
  down.set_reason("its daemon did not come back in time");
}

void Relay::send(std::vector<NodeId> nodes, proto::ToNode message) {
  if (!nodes.empty()) actions_.to_nodes.emplace_back(std::move(nodes), std::move(message));
}

}  // namespace rejoin::membership
