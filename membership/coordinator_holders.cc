// Who holds the state of the last committed step, or may: nothing goes on without them. See "State survives" in
// docs/design-notes.md.
#include <fmt/format.h>

#include <algorithm>

#include "base/deadlines.h"
#include "membership/coordinator.h"

namespace rejoin::membership {

// After this coordinator's restart: a joiner that may have caught up before, for all that has been heard since.
bool Coordinator::may_be_complete(const MemberState& m) const {
  if (!recovering_until_ || !m.catching_up) return false;
  if (m.complete) return true;
  const ReplicaState* here = registration(m.replica, m.incarnation);
  if (here == nullptr) return true;
  RankSet behind;  // ranks that have sent a status, and in it not that they have caught up
  for (const auto& status : here->statuses.current()) behind.add(status.ranks);
  const bool all_have_said = behind.size() == config_.ranks;
  behind.remove(here->caught_up);
  if (all_have_said || !behind.empty()) return false;
  // What a daemon says of its ranks it says right behind their registration, unless it stands still in between. Then it
  // is found silent first.
  return !present(m.replica, m.incarnation) || now_ - back_at_ < deadlines::kOthersComeBack.of(config_.silence);
}

// A joiner that has caught up, and no contributor is there: who knows whether one will be again.
bool Coordinator::last_complete(const MemberState& m) const { return caught_up(m) && !others_contribute(m.replica); }

std::vector<ReplicaId> Coordinator::blocked_on() const {
  std::vector<ReplicaId> held;
  if (finished()) return held;
  for (const auto& m : members_)
    if ((!m.catching_up || (!has_contributors() && may_be_complete(m))) && !present(m.replica, m.incarnation) &&
        !others_contribute(m.replica))
      held.push_back(m.replica);
  return held;
}

// When something of it was last heard, if all of it is there.
TimePoint Coordinator::last_heard(ReplicaId id, Incarnation incarnation) const {
  TimePoint last{};
  if (!present(id, incarnation)) return last;
  for (const auto& rank : registration(id, incarnation)->ranks)
    if (const auto node = nodes_.find(rank.node); node != nodes_.end()) last = std::max(last, node->second.heard);
  return last;
}

// When anybody who has the state was; to the tick.
TimePoint Coordinator::holder_last_heard() const {
  TimePoint last{};
  const auto lately = [&] { return now_ - last <= config_.silence / 16; };
  for (const auto& m : members_)
    if (!lately() && (!m.catching_up || caught_up(m))) last = std::max(last, last_heard(m.replica, m.incarnation));
  for (const auto& out : suspended_)
    if (!lately() && !out.ended) last = std::max(last, last_heard(out.replica, out.incarnation));
  return last;
}

// So lately that it has not fallen silent since.
bool Coordinator::is_lately(TimePoint heard) const {
  return heard != TimePoint{} && now_ - heard <= ConnectedNode::longest_gap(config_.silence);
}

// Where nobody is, it may be the way to this coordinator that is broken, and who was found silent first is no more lost
// than who will be next.
bool Coordinator::hears_holder() const { return is_lately(holder_last_heard()); }

// The time in which nobody was heard who has the state, beyond what lies between heartbeats, is nobody's silence. Where
// that was a whole silence, all others have one from now on, and longer while ranks still come, whatever they have used
// up of either. A shorter one is taken off theirs alone: who is heard with such gaps for long keeps nobody else in.
void Coordinator::forgive_what_nobody_was_heard_in() {
  if (members_.empty()) holder_heard_ = now_;
  const TimePoint last = holder_last_heard();
  const Duration gap = last - holder_heard_;
  holder_heard_ = std::max(holder_heard_, last);
  if (gap <= ConnectedNode::longest_gap(config_.silence)) return;
  if (gap < config_.silence) return forgive_all(gap - ConnectedNode::longest_gap(config_.silence));
  for (auto& [node, state] : nodes_) state.hear(now_, config_.silence);
  forgive_all(now_.time_since_epoch());
  nobody_was_heard_ = true;
  const bool waits = std::any_of(members_.begin(), members_.end(), [&](const auto& m) { return !is_back(m); });
  if (!recovering_until_ || !waits) return;
  recovering_until_ = std::max(*recovering_until_, now_ + config_.silence);
  recovery_prolonged_ = {};
}

// The last one that has the state is not put out.
void Coordinator::block_on(ReplicaId id, const std::string& why) {
  warn_once(
      fmt::format("the job waits for replica {}: {}, and nobody else has the state of step {}", id, why, committed_));
}

// By the log; who is out for now has it, too: nothing was committed since.
bool Coordinator::another_holds(ReplicaId replica) const {
  return std::ranges::any_of(members_,
                             [&](const auto& m) { return m.replica != replica && (!m.catching_up || m.complete); }) ||
         std::ranges::any_of(suspended_, [&](const auto& out) { return out.replica != replica && !out.ended; });
}

}  // namespace rejoin::membership
