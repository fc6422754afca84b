#include "membership/coordinator.h"

#include <algorithm>

namespace rejoin::membership {

// ---- what comes in

Actions Coordinator::on_message(NodeId node, const proto::FromNode& message, TimePoint now) {
  nodes_[node].heard = now;
  switch (message.kind_case()) {
    case proto::FromNode::kHello: break;  // the shell has checked it
    case proto::FromNode::kRankUp: on_rank_up(node, message.rank_up(), now); break;
    case proto::FromNode::kRankDown: {
      const auto& down = message.rank_down();
      on_rank_down(ReplicaId(down.replica()), down.rank(), down.life(), down.reason());
      break;
    }
    case proto::FromNode::kExchanged: on_exchanged(message.exchanged()); break;
    case proto::FromNode::kStanding: on_standing(message.standing()); break;
    case proto::FromNode::kAccusation: on_accusation(message.accusation(), now); break;
    case proto::FromNode::kHeartbeat: {
      proto::ToNode answer;
      answer.mutable_heartbeat();
      send(node, std::move(answer));
      break;
    }
    case proto::FromNode::kLinks:
    case proto::FromNode::kCaughtUp:
    case proto::FromNode::KIND_NOT_SET: note("a message from a node that says nothing to a coordinator was ignored");
  }
  return take();
}

// Its ranks may still run: they have `silence` to come back through another connection.
Actions Coordinator::on_node_lost(NodeId node, TimePoint now) {
  nodes_.erase(node);
  for (auto& [id, replica] : replicas_)
    for (auto& rank : replica.ranks)
      if (rank.connected_node && rank.node == node) {
        rank.connected_node = false;
        rank.lost_at = now;
      }
  return take();
}

Actions Coordinator::on_tick(TimePoint now) {
  std::vector<NodeId> silent;
  for (const auto& [node, state] : nodes_)
    if (now - state.heard > config_.silence) silent.push_back(node);
  for (auto node : silent) {
    note("a node was silent for {:.0f} ms", milliseconds(config_.silence));
    auto more = on_node_lost(node, now - config_.silence);
    actions_ = std::move(more);
    // Its ranks may be out by the time that it is heard again: it has to connect anew, and to introduce them.
    actions_.close.push_back(node);
  }
  std::vector<ReplicaId> gone;
  for (const auto& [id, replica] : replicas_)
    if (std::any_of(replica.ranks.begin(), replica.ranks.end(), [&](const RankState& rank) {
          return rank.registered && !rank.connected_node && now - rank.lost_at >= config_.silence;
        }))
      gone.push_back(id);
  for (auto id : gone) remove(id, "its daemon did not come back in time");
  if (recovering_until_ && now >= *recovering_until_) {
    recovering_until_.reset();
    for (const auto& [node, state] : nodes_) announce_to(node, state.hosts);
    std::vector<ReplicaId> absent;
    for (const auto& m : members_) {
      auto found = replicas_.find(m.replica);
      if (found == replicas_.end() || found->second.incarnation != m.incarnation || !whole(found->second))
        absent.push_back(m.replica);
    }
    for (auto id : absent) remove(id, "it did not come back after the coordinator's restart");
  }
  judge(now);
  return take();
}

void Coordinator::on_rank_down(ReplicaId replica, std::uint32_t rank, std::uint64_t life, const std::string& reason) {
  if (rank_of(replica.value, rank, life) == nullptr) return;  // of a life that is over already
  remove(replica, fmt::format("rank {}: {}", rank, reason));
}

void Coordinator::on_exchanged(const proto::Exchanged& exchanged) {
  MemberState* m = member(ReplicaId(exchanged.replica()));
  if (m == nullptr || m->incarnation.value != exchanged.incarnation() || exchanged.epoch() != epoch_.value ||
      exchanged.step() != committed_.value + 1)
    return;  // stale
  m->exchanged.add(RankSet(exchanged.ranks(), config_.ranks));
  try_commit();
}

// That a replica has caught up is acted on at the next step boundary.
void Coordinator::on_standing(const proto::Standing& standing) {
  auto found = replicas_.find(ReplicaId(standing.replica()));
  if (found == replicas_.end() || found->second.incarnation.value != standing.incarnation()) return;
  Standing now{.ranks = RankSet(standing.ranks(), config_.ranks),
               .links = {standing.links().begin(), standing.links().end()},
               .caught_up = standing.caught_up()};
  std::sort(now.links.begin(), now.links.end());
  auto& standings = found->second.standings;
  for (auto& before : standings) before.ranks.remove(now.ranks);
  std::erase_if(standings, [](const Standing& before) { return before.ranks.empty(); });
  if (!now.ranks.empty()) standings.push_back(std::move(now));
  try_start();
}

void Coordinator::on_accusation(const proto::Accusation& accusation, TimePoint now) {
  const bool current = accusation.epoch() == epoch_.value && member(ReplicaId(accusation.replica())) != nullptr &&
                       member(ReplicaId(accusation.suspect())) != nullptr;
  if (!current) return;
  auto [edge, fresh] = accusations_.try_emplace({accusation.replica(), accusation.suspect()});
  if (fresh || (!edge->second.counts && !accusation.only_waiting())) edge->second.since = now;
  edge->second.what = accusation.what();
  edge->second.lost |= accusation.lost();
  edge->second.counts |= !accusation.only_waiting();
}

// The wait-for graph: who is waited for, but waits for nobody, is the one that hangs. A broken connection accuses both
// its ends; the daemons' word about a dead process usually decides before.
void Coordinator::judge(TimePoint now) {
  const Duration patience = config_.silence / 4;
  std::map<std::uint32_t, int> accused;
  std::set<std::uint32_t> waiting;
  for (const auto& [edge, about] : accusations_) {
    if (!about.counts) continue;
    if (edge.first != edge.second) waiting.insert(edge.first);
    if (now - about.since >= patience) ++accused[edge.second];
  }
  if (accused.empty()) return;
  const auto worse = [&](const auto& a, const auto& b) {  // less guilty first
    const auto rank = [&](const auto& entry) {
      const MemberState* m = member(ReplicaId(entry.first));
      return std::tuple(!waiting.contains(entry.first), entry.second, m != nullptr && m->catching_up, entry.first);
    };
    return rank(a) < rank(b);
  };
  const auto guilty = std::max_element(accused.begin(), accused.end(), worse)->first;
  std::string what;
  for (const auto& [edge, about] : accusations_)
    if (edge.second == guilty)
      what = fmt::format("replica {} {} {}", edge.first, about.lost ? "lost it:" : "waits for", about.what);
  remove(ReplicaId(guilty), what);
}

// ---- decisions

void Coordinator::try_start() {
  if (started() && std::any_of(members_.begin(), members_.end(), [](const auto& m) { return !m.catching_up; })) return;
  // Nobody contributes: a fresh job, or everything was lost. Wait for all, then go on from the most advanced state.
  std::set<std::uint64_t> all;
  for (const auto& [id, replica] : replicas_)
    if (whole(replica)) all.insert(replica.incarnation.value);
  if (all.size() < config_.replicas) return;
  for (const auto& [id, replica] : replicas_) {
    auto others = all;
    others.erase(replica.incarnation.value);
    if (!linked(replica, others)) return;
  }
  using Fingerprint = std::vector<std::pair<std::uint64_t, std::uint64_t>>;  // version and digest of each rank
  std::map<Fingerprint, int> votes;
  const auto fingerprint = [](const ReplicaState& replica) {
    Fingerprint print;
    for (const auto& rank : replica.ranks) print.emplace_back(rank.version, rank.digest);
    return print;
  };
  std::uint64_t newest = 0;
  for (const auto& [id, replica] : replicas_) {
    std::uint64_t version = ~std::uint64_t{0};
    for (const auto& rank : replica.ranks) version = std::min(version, rank.version);
    newest = std::max(newest, version);
  }
  for (const auto& [id, replica] : replicas_) {
    const auto print = fingerprint(replica);
    if (std::all_of(print.begin(), print.end(), [&](const auto& p) { return p.first == newest; })) ++votes[print];
  }
  REJOIN_CHECK(!votes.empty());
  const auto chosen = std::max_element(votes.begin(), votes.end(), [](const auto& a, const auto& b) {
                        return a.second < b.second;
                      })->first;
  if (committed_ != Step(newest)) {
    proto::LogRecord record;
    record.mutable_rolled_back()->set_version(newest);
    actions_.append.push_back(record);
    REJOIN_CHECK(replay(record));
    note("the job goes on from step {}", newest);
  }
  members_.clear();
  for (const auto& [id, replica] : replicas_)
    members_.push_back(
        {.replica = id, .incarnation = replica.incarnation, .catching_up = fingerprint(replica) != chosen});
  begin_epoch("start");
  plan_step();
  broadcast_plan();
}

void Coordinator::try_commit() {
  if (members_.empty() || finished()) return;
  for (const auto& m : members_)
    if (m.exchanged.size() < config_.ranks) return;
  if (std::all_of(members_.begin(), members_.end(), [](const auto& m) { return m.catching_up; })) return;
  const Step step(committed_.value + 1);
  proto::LogRecord record;
  auto& committed = *record.mutable_committed();
  committed.set_step(step.value);
  committed.set_epoch(epoch_.value);
  const proto::Plan decided = plan();
  for (const auto& member : decided.members())
    if (!member.catching_up()) *committed.add_members() = member;
  actions_.append.push_back(std::move(record));
  committed_ = step;
  ledger_.commit(step);
  for (auto& m : members_) m.exchanged.clear();
  accusations_.clear();
  plan_step();  // before newcomers get theirs: replay() can't tell them apart
  if (change_members_at_boundary()) {
    begin_epoch("members changed");
    plan_step();
  }
  broadcast_plan();
}

// Admissions and promotions; true where there was one.
bool Coordinator::change_members_at_boundary() {
  bool changed = false;
  std::set<std::uint64_t> present;
  for (auto& m : members_) {
    present.insert(m.incarnation.value);
    if (!m.catching_up) continue;
    if (caught_up(replicas_.at(m.replica))) {
      m.catching_up = false;
      changed = true;
      note("replica {} contributes again from step {}", m.replica, committed_.value + 1);
    }
  }
  for (const auto& [id, replica] : replicas_) {
    if (member(id) != nullptr || !whole(replica) || !linked(replica, present)) continue;
    members_.push_back({.replica = id, .incarnation = replica.incarnation, .catching_up = true});
    present.insert(replica.incarnation.value);
    changed = true;
    note("replica {} is admitted at step {}, catching up", id, committed_.value + 1);
  }
  return changed;
}

// Out of the job, whether it is a member or only registered. The step under way is retried without it.
void Coordinator::remove(ReplicaId id, const std::string& reason) {
  if (finished()) {  // it has done its part and leaves; its other ranks still have to hear that
    replicas_.erase(id);
    std::erase_if(members_, [&](const MemberState& m) { return m.replica == id; });
    return;
  }
  drop_registration(id, reason);
  const MemberState* gone = member(id);
  if (gone == nullptr) return;
  note("replica {} is out: {}", id, reason);
  ledger_.hand_back(id);
  std::erase_if(members_, [&](const MemberState& m) { return m.replica == id; });
  if (std::all_of(members_.begin(), members_.end(), [](const auto& m) { return m.catching_up; })) {
    // Half a state is worth nothing without a source: who was catching up starts again, too.
    for (const auto& m : std::exchange(members_, {}))
      drop_registration(m.replica, "no contributor is left to catch up from");
    note("no contributor is left; the job waits for all {} replicas", config_.replicas);
  }
  begin_epoch(fmt::format("without replica {}: {}", id, reason));
  plan_step();
  broadcast_plan();
  (void)may_announce();  // those who are left may now be all who were waited for
  try_start();
}

void Coordinator::drop_registration(ReplicaId id, const std::string& reason) {
  auto found = replicas_.find(id);
  if (found == replicas_.end()) return;
  std::set<NodeId> told;
  for (const auto& rank : found->second.ranks) {
    if (!rank.connected_node || !told.insert(rank.node).second) continue;
    proto::ToNode message;
    message.mutable_fenced()->set_replica(id.value);
    message.mutable_fenced()->set_incarnation(found->second.incarnation.value);
    message.mutable_fenced()->set_reason(reason);
    send(rank.node, std::move(message));
  }
  proto::ToNode gone;
  gone.mutable_peers()->add_gone(found->second.incarnation.value);
  replicas_.erase(found);
  for (const auto& [node, state] : nodes_) send(node, gone);
}

void Coordinator::begin_epoch(const std::string& reason) {
  epoch_ = epoch_.next();
  proto::LogRecord record;
  auto& begun = *record.mutable_epoch();
  begun.set_epoch(epoch_.value);
  begun.set_step(committed_.value + 1);
  begun.set_reason(reason);
  for (auto& m : members_) {
    m.exchanged.clear();
    auto& member = *begun.add_members();
    member.set_replica(m.replica.value);
    member.set_incarnation(m.incarnation.value);
    member.set_catching_up(m.catching_up);
  }
  actions_.append.push_back(std::move(record));
  accusations_.clear();
}

// Gives every contributor its samples.
void Coordinator::plan_step() {
  std::vector<ReplicaId> contributors;
  for (const auto& m : members_)
    if (!m.catching_up) contributors.push_back(m.replica);
  if (!finished()) ledger_.assign(contributors);
}

proto::Plan Coordinator::plan() const {
  proto::Plan plan;
  plan.set_epoch(epoch_.value);
  plan.set_committed(committed_.value);
  plan.set_step(committed_.value + 1);
  plan.set_finished(finished());
  for (const auto& m : members_) {
    auto& member = *plan.add_members();
    member.set_replica(m.replica.value);
    member.set_incarnation(m.incarnation.value);
    member.set_catching_up(m.catching_up);
    if (const Batch* batch = ledger_.batch_of(m.replica); batch != nullptr && !m.catching_up)
      for (const auto& range : *batch) {
        member.add_batch()->set_begin(range.begin);
        member.mutable_batch()->rbegin()->set_end(range.end);
      }
  }
  return plan;
}

void Coordinator::broadcast_plan() {
  proto::ToNode message;
  *message.mutable_plan() = plan();
  for (const auto& [node, state] : nodes_) send(node, message);
}

// ---- helpers

bool Coordinator::whole(const ReplicaState& replica) const { return replica.registered == config_.ranks; }

bool Coordinator::linked(const ReplicaState& replica, const std::set<std::uint64_t>& incarnations) const {
  std::uint64_t count = 0;
  for (const auto& standing : replica.standings)
    if (std::includes(standing.links.begin(), standing.links.end(), incarnations.begin(), incarnations.end()))
      count += standing.ranks.size();
  return incarnations.empty() || count == config_.ranks;
}

bool Coordinator::caught_up(const ReplicaState& replica) const {
  std::uint64_t count = 0;
  for (const auto& standing : replica.standings)
    if (standing.caught_up) count += standing.ranks.size();
  return count == config_.ranks;
}

Coordinator::MemberState* Coordinator::member(ReplicaId replica) {
  auto found = std::find_if(members_.begin(), members_.end(), [&](const auto& m) { return m.replica == replica; });
  return found == members_.end() ? nullptr : &*found;
}

Coordinator::RankState* Coordinator::rank_of(std::uint32_t replica, std::uint32_t rank, std::uint64_t life) {
  auto found = replicas_.find(ReplicaId(replica));
  if (found == replicas_.end()) return nullptr;
  auto& ranks = found->second.ranks;
  return rank < ranks.size() && ranks[rank].registered && ranks[rank].life == life ? &ranks[rank] : nullptr;
}

void Coordinator::send(NodeId node, proto::ToNode message) {
  if (nodes_.contains(node)) actions_.send.emplace_back(node, std::move(message));
}

}  // namespace rejoin::membership
