// Who is out: silent, hung, cut off or dead, and what each of these means. See "State survives" in
// docs/design-notes.md.
#include <fmt/format.h>

#include <algorithm>

#include "base/deadlines.h"
#include "base/text.h"
#include "membership/coordinator.h"

namespace rejoin::membership {

// ---- silence

// The time in which this process did not run is nobody's silence.
void Coordinator::suspect_itself(Duration pause) {
  warn("this coordinator was paused for {:.0f} ms; nobody is put out for that time", milliseconds(pause));
  forgive_all(pause);
  forgive(under_way_since_, pause, now_);
  if (recovering_until_) *recovering_until_ += pause;
  if (incomplete_since_) forgive(*incomplete_since_, pause, now_);
}

void Coordinator::forgive_all(Duration pause) {
  for (auto& [node, state] : nodes_) forgive(state.heard, pause, now_);
  for (auto& [id, replica] : replicas_)
    for (auto& rank : replica.ranks) forgive(rank.lost_at, pause, now_);
  for (auto& [place, stranger] : strangers_)
    if (stranger.lost_at) forgive(*stranger.lost_at, pause, now_);
  for (auto& [edge, about] : accusations_) {
    for (auto& [rank, since] : about.counting) forgive(since, pause, now_);
    forgive(about.waits_since, pause, now_);
    forgive(about.heard, pause, now_);
    if (about.excused) forgive(*about.excused, pause, now_);
  }
  forgive(back_at_, pause, now_);
  forgive(holder_heard_, pause, now_);
}

void Coordinator::lose_silent_nodes() {
  std::vector<NodeId> silent;
  for (const auto& [node, state] : nodes_)
    if (now_ - state.heard > config_.silence) silent.push_back(node);
  if (silent.empty()) return;
  std::map<std::string, NodeId> last;  // connection of that name
  for (const auto& [node, state] : nodes_) last.insert_or_assign(state.name, node);
  for (auto node : silent) {
    const ConnectedNode& state = nodes_.at(node);
    const bool came_anew = last.at(state.name) != node;
    warn("node {} at {} was silent for {:.0f} ms{}", state.name, state.address, milliseconds(config_.silence),
         came_anew ? " over this connection, and has another one since" : "");
    lose_node(node, now_ - config_.silence);
    // Its ranks may be out by the time that it is heard again: it has to connect anew, and to introduce them.
    actions_.close.push_back(node);
  }
}

// What becomes of those who have been gone for too long. Where nobody who has the state is heard, they are waited for.
void Coordinator::settle_absent() {
  std::map<ReplicaId, std::string> absent;  // and why
  for (const auto& [id, replica] : replicas_)
    if (overdue(replica)) absent[id] = why_silent(replica);
  if (absent.empty()) return;
  const bool heard = hears_holder();
  std::string out;
  for (const auto& [id, why] : absent) {
    const MemberState* m = members_.find(id);
    if (m == nullptr || (m->catching_up && (!caught_up(*m) || last_complete(*m)))) continue;
    const bool last = !others_contribute(id);
    const bool goes = heard && (!last || take_back(Whom::connected) || promote_caught_up(Whom::connected));
    if (last && !goes) block_on(id, "it is silent");
    if (!goes) continue;
    suspend(id, why);
    out += fmt::format("{}{}", out.empty() ? "" : ", ", id);
  }
  if (!out.empty()) next_epoch(fmt::format("without replica {}: silent", out));
  if (!heard) return;
  for (const auto& [id, why] : absent) {
    const MemberState* m = members_.find(id);
    const SuspendedReplica* out_of_it = out_for_now(id);
    const bool may_come_back = out_of_it != nullptr && registration(id, out_of_it->incarnation) != nullptr;
    if (m != nullptr && m->catching_up && !caught_up(*m)) remove(id, why);
    else if (m == nullptr && has_contributors() && !may_come_back) drop_registration(id, why);
  }
}

// After a restart of this coordinator, or when it has taken the lead, members have `silence` to come back, or longer
// while others do. Where nobody who has the state is heard by then, all who may have it are waited for, and have that
// time once more when the first of them is.
void Coordinator::settle_recovery() {
  if (now_ < *recovering_until_) return;
  const bool somebody = std::any_of(members_.begin(), members_.end(), [&](const auto& m) {
    return !m.catching_up && is_lately(last_heard(m.replica, m.incarnation));
  });
  const bool found = !somebody && hears_holder() && (take_back(Whom::connected) || promote_caught_up(Whom::connected));
  if (!somebody && !found) {
    // Who only may have it is given up at an operator's word, after the time that a start has.
    const bool given_up = may_roll_back() && now_ - *recovering_until_ >= start_patience();
    bool waits = false;
    for (const auto& m : members_) {
      const bool has = !m.catching_up || m.complete;
      if (!has && (!may_be_complete(m) || given_up)) continue;
      waits = true;
      warn_once(fmt::format(
          "the job waits for replica {}: it has {}, and it {} the state of step {}{}", m.replica,
          is_back(m) && !has ? "yet to say where it stands" : "not come back", has ? "has" : "may have", committed_,
          has ? ""
              : fmt::format("; start the coordinator, or all of several, with --roll-back-to STEP@{}, STEP that of a "
                            "checkpoint, to go on without it",
                            steps_ever())));
    }
    if (waits || now_ - back_at_ < config_.silence / 4) return;  // who has just come says next where it stands
  }
  recovering_until_.reset();
  std::vector<ReplicaId> holders, joiners;
  for (const auto& m : members_)
    if (!is_back(m)) (m.catching_up && !m.complete ? joiners : holders).push_back(m.replica);
  for (auto id : holders) suspend(id, kNotBack);
  announce_all();
  if (!holders.empty()) next_epoch("without those that did not come back after a change or restart of the coordinator");
  else if (found) next_epoch("the last contributor had ended before those of before had come back");
  for (auto id : joiners) remove(id, kNotBack);
  if (members_.empty() || has_contributors()) return;
  if (!find_contributors()) lose_everybody();
  next_epoch("the last contributor had ended before those of before had come back");
}

// ---- out, and back

// Who has the state and is not known to be dead. Until the next commit nobody's state is newer.
void Coordinator::suspend(ReplicaId id, const std::string& reason) {
  const MemberState* m = members_.find(id);
  warn("replica {} is out: {}", id, reason);
  suspended_.push_back({.replica = id, .incarnation = m->incarnation, .reason = reason});
  members_.erase(id);
}

// Suspended contributors whose processes live, as far as is known.
bool Coordinator::take_back(Whom whom) {
  bool any = false;
  const auto replaced = [&](const SuspendedReplica& out) {  // another instance has its place
    return replicas_.contains(out.replica) && registration(out.replica, out.incarnation) == nullptr;
  };
  for (auto out = suspended_.begin(); out != suspended_.end();) {
    if (out->ended || replaced(*out) || (whom == Whom::connected && !present(out->replica, out->incarnation))) {
      ++out;
      continue;
    }
    note("replica {} is taken back: it has the state of step {}", out->replica, committed_);
    members_.add({.replica = out->replica, .incarnation = out->incarnation});
    out = suspended_.erase(out);
    any = true;
  }
  return any;
}

// Nobody else is left to contribute: joiners that have caught up hold the same state, and need not wait for the next
// step's boundary.
bool Coordinator::promote_caught_up(Whom whom) {
  bool any = false;
  for (auto& m : members_) {
    if (!m.catching_up || !caught_up(m)) continue;
    if (whom == Whom::connected && !present(m.replica, m.incarnation)) continue;
    note("replica {} has caught up and contributes after step {}, whose state it has", m.replica, committed_);
    m.catching_up = false;
    any = true;
  }
  return any;
}

// A step is being committed without them: now they are behind. Before the ledger's own commit.
void Coordinator::give_up_suspended() {
  for (const auto& out : std::exchange(suspended_, {})) {
    ledger_.hand_back(out.replica);
    if (registration(out.replica, out.incarnation) != nullptr)
      drop_registration(out.replica, fmt::format("{}, and the job went on without it", out.reason));
  }
}

// Its process is gone: out of the job, whether it is a member, suspended or only registered. The step under way is
// retried without it.
void Coordinator::remove(ReplicaId id, const std::string& reason, Parting parting) {
  // It has done its part and leaves. It stays a member: its other ranks may come back, and have yet to hear the end.
  if (finished()) {
    if (forget_registration(id)) note("replica {} has left the finished job: {}", id, reason);
    return;
  }
  if (SuspendedReplica* out = out_for_now(id)) out->ended = true;
  drop_registration(id, reason);
  if (members_.find(id) == nullptr) return;
  actions_.notes.push_back({fmt::format("replica {} is out: {}", id, reason), parting == Parting::lost});
  ledger_.hand_back(id);
  members_.erase(id);
  // After a restart a joiner may not have reported yet that it has caught up: settle_recovery() decides.
  const bool may_yet_report = recovering_until_ && !members_.empty();
  if (!has_contributors() && !find_contributors() && !may_yet_report) lose_everybody();
  next_epoch(fmt::format("without replica {}: {}", id, reason));
  end_recovery_if_all_are_back();  // those who are left may now be all who were waited for
  try_start();
}

// Of a process that an earlier coordinator had registered, maybe; or of one that is over already. Who comes back within
// the time that members have for that is judged by what it says itself, and tells whether this log is an older copy.
void Coordinator::keep_end(const proto::RankDown& down) {
  if (!down.ended() || down.job() != job_ || !is_of_holder(down)) return;
  proto::RankDown& last = ends_[RankPlace::of(down)];  // of several in this place, whichever is told of first
  const auto epoch = std::max(last.heard_epoch(), down.heard_epoch());
  const auto committed = std::max(last.heard_committed(), down.heard_committed());
  if (down.incarnation() >= last.incarnation()) last = down;
  last.set_heard_epoch(epoch);
  last.set_heard_committed(committed);
  end_recovery_if_all_are_back();
}

// No two have a place at once: the end of a later one is that of those before it, too.
bool Coordinator::is_of_holder(const proto::RankDown& down) const {
  if (down.rank() >= config_.ranks) return false;
  const ReplicaId id(down.replica());
  const auto ended = [&](Incarnation its) { return its.value <= down.incarnation(); };
  if (const auto here = replicas_.find(id);
      here != replicas_.end() && (!ended(here->second.incarnation) || here->second.ranks[down.rank()].registered))
    return false;  // another process has the place
  const MemberState* m = members_.find(id);
  return (m != nullptr && ended(m->incarnation)) || std::ranges::any_of(suspended_, [&](const auto& out) {
           return out.replica == id && !out.ended && ended(out.incarnation);
         });
}

void Coordinator::settle_ends() {
  for (const auto& [place, down] : std::exchange(ends_, {}))
    if (is_of_holder(down)) lose(down);
}

void Coordinator::lose(const proto::RankDown& ended) {
  remove(ReplicaId(ended.replica()),
         fmt::format("rank {}{}: {}", ended.rank(), ended.left() ? " has left" : "",
                     shortened(ended.reason(), kLongestReason)),
         ended.left() ? Parting::left : Parting::lost);
}

// Half a state is worth nothing without a source: who was catching up starts again, too.
void Coordinator::lose_everybody() {
  for (const auto& m : members_.take()) drop_registration(m.replica, "no contributor is left to catch up from");
  for (const auto& out : std::exchange(suspended_, {})) ledger_.hand_back(out.replica);
  warn("no process is left that has the state of step {}; the job waits for replicas{}", committed_,
       committed_ == Step{} ? ", which begin as at its start" : " that bring a checkpoint");
}

void Coordinator::next_epoch(const std::string& reason, Begun step) {
  begin_epoch(reason, step);
  plan_step();
  broadcast_plan();
  tell_prospect();
}

bool Coordinator::forget_registration(ReplicaId id) {
  const auto found = replicas_.find(id);
  if (found == replicas_.end()) return false;
  declarations_.unregister(found->second);
  replicas_.erase(found);
  return true;
}

void Coordinator::drop_registration(ReplicaId id, const std::string& reason) {
  auto found = replicas_.find(id);
  if (found == replicas_.end()) return;
  std::set<NodeId> told;  // also where its ranks may stand, though they were heard another way behind that
  for (const auto& rank : found->second.ranks)
    if (rank.connected_node) told.insert(rank.node);
  for (const auto& [node, state] : nodes_)
    if (std::ranges::any_of(state.moved,
                            [&](const auto& one) { return one.place.replica == id && rank_of(one) != nullptr; }))
      told.insert(node);
  for (const auto node : told) evict(node, id, found->second.incarnation, reason, job_);
  proto::ToNode gone;
  gone.mutable_peers()->add_gone(found->second.incarnation.value);
  forget_registration(id);
  send_all(std::move(gone));
}

// To its ranks behind this node: it is out, and is to start again.
void Coordinator::evict(NodeId node, ReplicaId replica, Incarnation incarnation, const std::string& reason,
                        std::uint64_t of_job) {
  proto::ToNode message;
  message.mutable_evicted()->set_replica(replica.value);
  message.mutable_evicted()->set_incarnation(incarnation.value);
  message.mutable_evicted()->set_reason(reason);
  message.mutable_evicted()->set_job(of_job);
  send(node, std::move(message));
}

// ---- helpers

// All of its ranks have registered since this coordinator started.
bool Coordinator::is_back(const MemberState& m) const {
  const ReplicaState* here = registration(m.replica, m.incarnation);
  return here != nullptr && fully_registered(*here);
}

// It is not, and nothing is to be heard of it any more: those of its ranks that have not registered have ended, by what
// daemons say, and had heard nothing that this log lacks.
bool Coordinator::has_ended(const MemberState& m) const {
  if (ends_.empty() || is_back(m)) return false;
  const ReplicaState* here = registration(m.replica, m.incarnation);
  for (std::uint32_t rank = 0; rank < config_.ranks; ++rank) {
    if (here != nullptr && here->ranks[rank].registered) continue;
    const auto end = ends_.find({m.replica, RankId(rank)});
    if (end == ends_.end() || end->second.incarnation() < m.incarnation.value || end->second.heard_epoch() == 0 ||
        end->second.heard_epoch() > epoch_.value || end->second.heard_committed() > most_committed_.value)
      return false;
  }
  return true;
}

// All of its ranks are connected now.
bool Coordinator::present(ReplicaId id, Incarnation incarnation) const {
  const ReplicaState* here = registration(id, incarnation);
  return here != nullptr && fully_registered(*here) &&
         std::all_of(here->ranks.begin(), here->ranks.end(), [](const RankState& rank) { return rank.connected_node; });
}

// One of its ranks has been gone for too long.
bool Coordinator::overdue(const ReplicaState& replica) const {
  return std::any_of(replica.ranks.begin(), replica.ranks.end(), [&](const RankState& rank) {
    return rank.registered && !rank.connected_node && !may_come_back(rank);
  });
}

// All of them may have been lost at once, because of this process, and what most say may wait to be read behind what
// others say: nobody is judged for that while they still come.
bool Coordinator::may_come_back(const RankState& rank) const {
  const bool others_come = now_ - back_at_ < config_.silence / 4;
  return now_ - rank.lost_at < (others_come ? deadlines::kOthersComeBack.of(config_.silence) : config_.silence);
}

// A rank that was registered before is there again. After a restart all have to come, and are judged as above.
void Coordinator::on_return() {
  back_at_ = now_;
  if (!recovering_until_) return;
  const Duration most = deadlines::kOthersComeBack.of(config_.silence) - config_.silence - recovery_prolonged_;
  const Duration more = std::clamp(now_ + config_.silence / 4 - *recovering_until_, Duration{}, most);
  *recovering_until_ += more;
  recovery_prolonged_ += more;
}

bool Coordinator::has_contributors() const {
  return std::any_of(members_.begin(), members_.end(), [](const auto& m) { return !m.catching_up; });
}

std::optional<ReplicaId> Coordinator::first_contributor() const {
  std::optional<ReplicaId> first;
  for (const auto& m : members_)
    if (!m.catching_up && (!first || m.replica < *first)) first = m.replica;
  return first;
}

// Somebody else is there to go on with.
bool Coordinator::others_contribute(ReplicaId replica) const {
  return std::any_of(members_.begin(), members_.end(),
                     [&](const MemberState& m) { return m.replica != replica && contributes_here(m); });
}

bool Coordinator::contributes_here(const MemberState& m) const {
  return !m.catching_up && present(m.replica, m.incarnation);
}

// Where nobody contributes any more: whoever else holds the state, if possible somebody who is there.
bool Coordinator::find_contributors() {
  for (auto whom : {Whom::connected, Whom::all})
    if (take_back(whom) || promote_caught_up(whom)) return true;
  return false;
}

void Coordinator::warn_once(std::string line) {
  if (warned_.insert(line).second) actions_.notes.push_back({std::move(line), true});
}

}  // namespace rejoin::membership
