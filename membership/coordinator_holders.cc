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
