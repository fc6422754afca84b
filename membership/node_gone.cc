// What becomes of ranks that were here. That a process has ended is said to each coordinator until nobody waits for it
// any more: the way to the one that decides may have been away just then, or that one is another since.
#include <fmt/format.h>

#include <algorithm>

#include "membership/node.h"
#include "membership/process.h"

namespace rejoin::membership {

Node::Gone Node::gone_for(RankConnection rank, const proto::RankUp& newcomer) const {
  const auto found = ranks_.find(rank);
  if (found == ranks_.end()) return Gone::ended;
  const proto::RankUp& older = found->second.up;
  if (older.instance() == newcomer.instance()) return Gone::replaced;
  const bool comparable = older.incarnation() == 0 || older.job() == newcomer.job();
  return comparable && older.incarnation() < newcomer.incarnation() ? Gone::silent : Gone::ended;
}

Node::Actions Node::on_rank_gone(RankConnection connection, const std::string& reason, Gone how) {
  Actions actions;
  const bool ended = how == Gone::ended || how == Gone::left;
  if (ended)
    if (const auto silent = silent_.extract(connection); !silent.empty()) {
      tell_gone(silent.mapped(), reason, how, actions);
      return actions;
    }
  auto gone = ranks_.extract(connection);
  if (gone.empty()) return actions;
  const proto::RankUp& up = gone.mapped().up;
  statuses_.erase(status_key(up));
  if (how == Gone::replaced) return actions;
  tell_gone(up, reason, how, actions);
  if (!ended) silent_[connection] = up;
  // The others of its replica may have waited for it alone.
  for (const auto& [id, rank] : ranks_) {
    if (!are_one_replica(rank, gone.mapped())) continue;
    if (rank.up.reduced_epoch() != 0) gather(rank, actions);
    report_status(rank, actions);
    break;
  }
  return actions;
}

void Node::tell_gone(const proto::RankUp& up, const std::string& reason, Gone how, Actions& actions) {
  proto::FromNode message;
  auto& down = *message.mutable_rank_down();
  down.set_replica(up.replica());
  down.set_rank(up.rank());
  down.set_instance(up.instance());
  down.set_reason(reason);
  down.set_ended(how == Gone::ended || how == Gone::left);
  down.set_left(how == Gone::left);
  down.set_incarnation(up.incarnation());
  down.set_job(up.job());
  down.set_heard_epoch(up.heard_epoch());
  down.set_heard_committed(up.heard_committed());
  actions.notes.push_back(
      {fmt::format("replica {} rank {}{}: {}", down.replica(), down.rank(), down.left() ? " has left" : "", reason),
       how != Gone::left && !plan_.finished()});
  if (down.ended() && down.incarnation() != 0) keep_end(down);
  if (coordinator_up_) actions.to_coordinator.push_back(std::move(message));
}

// Of those of before in its place somebody may have yet to hear of the one that is, or may be, a member; of another
// job's nobody here knows, and the last of them are kept.
void Node::keep_end(const proto::RankDown& down) {
  constexpr std::ptrdiff_t most_of_others = 8;
  std::erase_if(ended_, [&](const Ended& one) {
    return same_place(one.down, down) && !of_another_job(one.down.job(), plan_.job()) &&
           one.down.heard_epoch() <= plan_.epoch() && !is_named(one.down);
  });
  const auto is_other = [&](const Ended& one) {
    return same_place(one.down, down) && of_another_job(one.down.job(), down.job());
  };
  if (std::ranges::count_if(ended_, is_other) > most_of_others) ended_.erase(std::ranges::find_if(ended_, is_other));
  ended_.push_back({.down = down});
}

bool Node::is_named(const proto::RankDown& down) const {
  const auto is_it = [&](const auto& one) { return one.incarnation() == down.incarnation(); };
  return std::ranges::any_of(plan_.members(), is_it) || std::ranges::any_of(plan_.suspended(), is_it);
}

// A new plan. Who is out may be wanted back until a step is committed without it. Where the log was put back to an
// older copy, others may be called what these were.
void Node::forget_ended() {
  for (auto& one : ended_)
    if (of_another_job(one.down.job(), plan_.job())) continue;
    else if (is_named(one.down)) one.out_since.reset();
    else if (!one.out_since) one.out_since = plan_.committed();
  std::erase_if(ended_, [&](const Ended& one) {
    if (of_another_job(one.down.job(), plan_.job())) return false;
    return plan_.finished() || plan_.epoch() < one.down.heard_epoch() ||
           (one.out_since && plan_.committed() > *one.out_since);
  });
}

}  // namespace rejoin::membership
