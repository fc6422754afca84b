#include "membership/coordinator.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/bytes.h"
#include "base/text.h"
#include "membership/disconnected.h"

namespace rejoin::membership {

namespace {

proto::Member& name(const auto& of, proto::Member& member) {
  member.set_replica(of.replica.value);
  member.set_incarnation(of.incarnation.value);
  return member;
}

}  // namespace

// ---- what comes in

Actions Coordinator::on_message(NodeId node, const proto::FromNode& message, TimePoint now) {
  now_ = now;
  nodes_[node].hear(now, config_.silence);
  if (outdated_ && !message.has_heartbeat()) {
    if (message.has_rank_up()) find_outdated(message.rank_up());
    return take();
  }
  switch (message.kind_case()) {
    case proto::FromNode::kHello:  // the shell has checked it
      if (message.hello().relay() && message.hello().introduction() == 0 && !nodes_[node].name.empty()) {
        lose_node(node, now, Connected::anew);
        nodes_[node].hear(now, config_.silence);
      }
      nodes_[node].name = message.hello().node();
      nodes_[node].address = message.hello().address();
      nodes_[node].silence_ms = message.hello().silence_ms();
      nodes_[node].spoken = Spoken::with(Versions::of(message.hello()));
      nodes_[node].release = printable(message.hello().release(), kLongestRelease);
      break;
    case proto::FromNode::kRankUp: on_rank_up(node, message.rank_up()); break;
    case proto::FromNode::kRankDown: on_rank_down(node, message.rank_down()); break;
    case proto::FromNode::kReduced: on_reduced(node, message.reduced()); break;
    case proto::FromNode::kReplicaStatus: on_replica_status(node, message.replica_status()); break;
    case proto::FromNode::kAccusation: on_accusation(node, message.accusation()); break;
    case proto::FromNode::kDetails: audit_.on_details(message.details()); break;
    case proto::FromNode::kDrift: audit_.on_drift(message.drift()); break;
    case proto::FromNode::kAlive: on_alive(message.alive()); break;
    case proto::FromNode::kDeclaration: on_declaration(message.declaration()); break;
    case proto::FromNode::kHeartbeat: {
      proto::ToNode answer;
      answer.mutable_heartbeat();
      send(node, std::move(answer));
      break;
    }
    case proto::FromNode::kReport: break;  // the shell's
    case proto::FromNode::kLinks:
    case proto::FromNode::kCaughtUp:
    case proto::FromNode::kLeaderView:
    case proto::FromNode::KIND_NOT_SET: warn("a message from a node that says nothing to a coordinator was ignored");
  }
  return take();
}

void Coordinator::on_sign_of_life(NodeId node, TimePoint now) {
  if (auto found = nodes_.find(node); found != nodes_.end()) found->second.hear(now, config_.silence);
}

// Its ranks may still run: they have `silence` to come back through another connection, or longer while others do.
Actions Coordinator::on_node_lost(NodeId node, TimePoint now) {
  now_ = now;
  lose_node(node, now);
  return take();
}

// A relay that followed somebody else, or nobody, meanwhile has forgotten whom it spoke for over the same connection.
// Who has ended since is said by nobody, as who does not come back to a relay's next connection.
void Coordinator::lose_node(NodeId node, TimePoint since, Connected connected) {
  const auto gone = nodes_.extract(node);
  announcer_.forget(node);
  waits_.untold.erase(node);
  const std::string name = gone.empty() ? "" : gone.mapped().name;
  std::vector<ProcessId> dropped;
  for (const auto& claim : claims_)
    if (claim.node == node) dropped.push_back(ProcessId::of(claim.up));
  std::erase_if(claims_, [&](const PlaceClaim& claim) { return claim.node == node; });
  declarations_.forget_if([&](const Mismatch& one) { return one.node == node; });
  for (auto& [place, stranger] : strangers_)
    if (stranger.node == node) stranger.lost_at = since;
  for (auto& [id, replica] : replicas_) {
    replica.statuses.forget(node);
    for (auto& rank : replica.ranks)
      if (rank.connected_node && rank.node == node) {
        rank.connected_node = false;
        rank.lost_at = since;
        const std::string own = node_name(rank);
        rank.lost_why =
            connected == Connected::anew ? fmt::format("its node {} has not come back to relay {}", own, name)
            : name == own                ? fmt::format("its node {} is not connected", own)
                          : fmt::format("relay {}, through which its node {} reports, is not connected", name, own);
      }
  }
  if (!gone.empty()) ask_the_other_nodes(node, gone.mapped(), dropped);
}

Actions Coordinator::on_tick(TimePoint now) {
  now_ = now;
  if (const Duration pause = pause_detector_.on_tick(now); pause > Duration{}) suspect_itself(pause);
  if (finished()) settle_claims();
  if (outdated_) tell_why_it_waits();
  if (announcer_.flushes_with_tick(now, pause_detector_.settling(now))) flush_announcements();
  if (!judges_now()) return take();
  forgive_what_nobody_was_heard_in();
  lose_silent_nodes();
  ends_count_ = ends_count_ || !recovering_until_ || now_ >= *recovering_until_;
  if (ends_count_) settle_ends();
  if (recovering_until_) settle_recovery();
  if (!recovering_until_) settle_absent();
  settle_claims();
  settle_declarations();
  declarations_.forget_unused(replicas_);
  if (!mend()) judge();
  look_for_slow_link();
  lower_protocol();
  try_start();
  tell_prospect();
  tell_why_it_waits();
  return take();
}

// That a process has ended is true whoever says it. That it is silent is true of this way alone: a daemon that has left
// a relay may have come by another one.
void Coordinator::on_rank_down(NodeId node, const proto::RankDown& down) {
  const auto concerns = [&](NodeId its) { return down.ended() || its == node; };
  if (auto stranger = strangers_.find(RankPlace::of(down));
      stranger != strangers_.end() && stranger->second.instance == down.instance()) {
    if (!concerns(stranger->second.node)) return;
    if (!down.ended()) return void(stranger->second.lost_at = now_);
    strangers_.erase(stranger);
    return try_start();
  }
  const auto is_over = [&](const auto& one) { return concerns(one.node) && same_process(one.up, down); };
  const auto process = ProcessId::of(down);
  const bool waited = std::erase_if(claims_, is_over) > 0;
  declarations_.forget_if(is_over);
  std::erase(nodes_[node].moved, process);
  if (waited && !down.ended()) ask_the_other_nodes(node, {}, {process});
  RankState* rank = rank_of(ProcessId::of(down));
  if (rank == nullptr) return keep_end(down);
  if (!concerns(rank->node)) return;  // elsewhere
  if (down.ended()) return lose(down), settle_claims();
  const std::string why = shortened(down.reason(), kLongestReason);
  note("replica {} rank {}: {}", down.replica(), down.rank(), why);
  rank->connected_node = false;
  rank->lost_at = ask_the_other_nodes(node, {}, {}) ? now_ : now_ - config_.silence;
  rank->lost_why = why;  // the next tick settles what follows, for all that are lost with it
}

void Coordinator::on_reduced(NodeId node, const proto::Reduced& reduced) {
  MemberState* m = members_.find(ReplicaId(reduced.replica()));
  if (m == nullptr || m->incarnation.value != reduced.incarnation() || reduced.epoch() != epoch_.value ||
      reduced.step() != committed_.value + 1)
    return;  // stale
  const RankSet ranks(reduced.ranks(), config_.ranks);
  if (is_of_strangers(node, reduced.replica(), RankSet(reduced.ranks(), ~std::uint64_t{0}))) return;
  members_.add_reduced(*m, ranks);
  on_connected(accusations_, m->replica, ranks);
  m->computed.add(plausible(reduced.compute_us()));
  audit_.on_reduced(m->replica, reduced);
  try_commit();
}

// ---- decisions

void Coordinator::try_commit() {
  if (members_.empty() || finished() || stopped_) return;
  if (!members_.all_reduced() || !has_contributors()) return;
  if (!differences_settled()) return;
  const Step step(committed_.value + 1);
  excused_ = std::ranges::any_of(accusations_, [](const auto& one) { return one.second.excused.has_value(); });
  measure(step);
  proto::LogRecord record;
  auto& committed = *record.mutable_committed();
  committed.set_step(step.value);
  committed.set_epoch(epoch_.value);
  const proto::Plan decided = plan();
  for (const auto& member : decided.members())
    if (!member.catching_up()) *committed.add_members() = member;
  const auto change = change_of_balance(step);
  if (change) change->to(*committed.mutable_balance());
  note_never_members(record);
  const bool in_new_units = ledger_.shares() && ledger_.unit() != JobConfig::unit_before(config_.batch, config_.ranks);
  if (ledger_.balances() || (change && change->in_force()) || in_new_units)
    actions_.append.emplace_back().mutable_needs()->set_protocol(static_cast<std::uint32_t>(Feature::balance));
  actions_.append.push_back(std::move(record));
  committed_ = step;
  most_committed_ = std::max(most_committed_, step);
  give_up_suspended();
  ledger_.commit(step);
  if (change) ledger_.set_next(*change);
  end_word();
  audit_.on_committed(now_);
  under_way_since_ = now_;
  members_.begin_step();
  accusations_.clear();
  mended_.clear();
  nobody_was_heard_ = false;
  warned_.clear();
  // Before newcomers get theirs, since replay() can't tell them apart; but what is to be shared is shared with them.
  if (!ledger_.shares()) plan_step();
  settled_ = true;
  const bool changed = change_members_at_boundary(), rises = protocol_rises();
  leader_ = first_contributor();
  if (changed) begin_epoch("members changed", Begun::fresh);
  else if (rises) begin_epoch(fmt::format("all members speak protocol {}", spoken_by_all().version()), Begun::fresh);
  plan_step();
  broadcast_plan();
  tell_prospect();
}

// Admissions and promotions; true where there was one.
bool Coordinator::change_members_at_boundary() {
  bool changed = false;
  for (auto& m : members_) {
    if (!m.catching_up) continue;
    if (caught_up(m)) {
      m.catching_up = false;
      changed = true;
      note("replica {} has caught up, and contributes from step {} on", m.replica, committed_.value + 1);
    }
  }
  const auto waiting = candidates();
  Ring ring = waiting.empty() ? Ring{} : ring_of_members(When::now);
  for (auto id : waiting) {
    const ReplicaState& replica = replicas_.at(id);
    if (!present(id, replica.incarnation)) continue;  // all would wait for who is known to be away
    // change_of_balance() has ended it, and the step that is planned already is the last one under it.
    if (ledger_.balance().in_force() && !may_balance(replica)) continue;
    ring.push_back({id, replica.incarnation, true});
    if (!linked(replica, links_in(links_, ring, ring.size() - 1))) {
      ring.pop_back();
      continue;
    }
    members_.add({.replica = id, .incarnation = replica.incarnation, .catching_up = true});
    readmissions_.on_admitted(id, committed_, now_);
    changed = true;
    note("replica {} is admitted after step {}, catching up", id, committed_);
  }
  return changed;
}

void Coordinator::begin_epoch(const std::string& reason, Begun step) {
  epoch_ = epoch_.next();
  under_way_since_ = now_;
  settled_ = step == Begun::fresh;
  if (settled_) leader_ = first_contributor();
  audit_.on_epoch();
  const Spoken before = std::exchange(protocol_, spoken_by_all());
  if (protocol_.version() != before.version())
    note("from epoch {} on all members speak protocol {}, until then {}", epoch_, protocol_.version(),
         before.version());
  order_members(step);
  proto::LogRecord record;
  auto& begun = *record.mutable_epoch();
  begun.set_epoch(epoch_.value);
  begun.set_step(committed_.value + 1);
  begun.set_reason(reason);
  begun.set_fresh(ledger_.shares() && step == Begun::fresh);
  if (leader_) begun.set_leader(leader_->value);
  if (protocol_.version() > kSilentProtocol) begun.set_protocol(protocol_.version());
  members_.begin_step();
  for (const auto& m : members_) name(m, *begun.add_members()).set_catching_up(m.catching_up);
  for (const auto& out : suspended_) name(out, *begun.add_suspended());
  note_never_members(record);
  note_outages(begun, now_);
  if (members_.empty())
    stopped_.reset(), differing_.clear();  // what differed has gone with its processes; who comes brings a checkpoint
  actions_.append.push_back(std::move(record));
  accusations_.clear();
  warned_.clear();
}

// Gives every contributor its samples; of the step after the last one, too, so that a log means the same whatever
// number of steps the job is given when it is read.
void Coordinator::plan_step() {
  std::vector<ReplicaId> contributors;
  for (const auto& m : members_)
    if (!m.catching_up) contributors.push_back(m.replica);
  ledger_.assign(contributors);
}

proto::Plan Coordinator::plan() const {
  proto::Plan plan;
  plan.set_epoch(epoch_.value);
  plan.set_committed(committed_.value);
  plan.set_step(committed_.value + 1);
  plan.set_finished(finished());
  plan.set_job(job_);
  plan.set_excused(excused_);
  plan.set_settled(settled_);
  if (protocol_.version() > kSilentProtocol) plan.set_protocol(protocol_.version());
  plan.set_balances(ledger_.balances());
  if (leader_) plan.set_leader(leader_->value);
  ledger_.trained().to(plan.mutable_trained());
  audit_.fill(plan);
  if (stopped_) plan.set_stopped(*stopped_);
  for (const auto& m : members_) {
    auto& member = name(m, *plan.add_members());
    member.set_catching_up(m.catching_up);
    const Batch* batch = ledger_.batch_of(m.replica);
    if (batch == nullptr || m.catching_up) continue;
    for (const auto& range : *batch) {
      member.add_batch()->set_begin(range.begin);
      member.mutable_batch()->rbegin()->set_end(range.end);
    }
    if (ledger_.shares()) member.set_weight(samples_of(*batch));
  }
  std::vector<ReplicaId> given_up;  // with the commit, if they are not taken back before
  for (const auto& out : suspended_) {
    name(out, *plan.add_suspended());
    given_up.push_back(out.replica);
  }
  ledger_.to(*plan.mutable_ahead(), given_up);
  return plan;
}

void Coordinator::broadcast_plan() {
  if (nodes_.empty()) return;
  proto::ToNode message;
  *message.mutable_plan() = plan();
  send_all(std::move(message));
}

// ---- helpers

bool Coordinator::fully_registered(const ReplicaState& replica) const { return replica.registered == config_.ranks; }

bool Coordinator::caught_up(const ReplicaState& replica) const { return replica.caught_up.size() == config_.ranks; }

bool Coordinator::caught_up(const MemberState& m) const {
  const ReplicaState* here = registration(m.replica, m.incarnation);
  return m.complete || (here != nullptr && caught_up(*here));
}

// A replica is at most once among them: its next incarnation is a member after a commit at the earliest.
SuspendedReplica* Coordinator::out_for_now(ReplicaId replica) {
  auto found =
      std::find_if(suspended_.begin(), suspended_.end(), [&](const auto& out) { return out.replica == replica; });
  return found == suspended_.end() ? nullptr : &*found;
}

// Of this very incarnation.
const ReplicaState* Coordinator::registration(ReplicaId replica, Incarnation incarnation) const {
  auto found = replicas_.find(replica);
  return found == replicas_.end() || found->second.incarnation != incarnation ? nullptr : &found->second;
}

RankState* Coordinator::rank_of(const ProcessId& process) {
  auto found = replicas_.find(process.place.replica);
  if (found == replicas_.end() || process.place.rank.value >= found->second.ranks.size()) return nullptr;
  RankState& rank = found->second.ranks[process.place.rank.value];
  return rank.registered && rank.instance == process.instance ? &rank : nullptr;
}

void Coordinator::send(NodeId node, proto::ToNode message) {
  if (nodes_.contains(node)) send_to({node}, std::move(message));
}

void Coordinator::send_all(proto::ToNode message) {
  std::vector<NodeId> nodes;
  for (const auto& [node, state] : nodes_) nodes.push_back(node);
  if (!nodes.empty()) send_to(std::move(nodes), std::move(message));
}

void Coordinator::send_to(std::vector<NodeId> nodes, proto::ToNode message) {
  if (message.has_peers()) message.mutable_peers()->set_job(job_);
  actions_.send.emplace_back(std::move(nodes), std::move(message));
}

void Coordinator::send_each(Announcer::Messages messages) {
  for (auto& [nodes, message] : messages) send_to(std::move(nodes), std::move(message));
}

}  // namespace rejoin::membership
