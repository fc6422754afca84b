#include "membership/leader_tracker.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "base/deadlines.h"
#include "membership/greeting.h"
#include "membership/node.h"
#include "membership/process.h"

namespace rejoin::membership {

LeaderTracker::LeaderTracker(std::string name, Duration silence, std::size_t coordinators,
                             std::function<void(proto::LeaderView&)> hosts)
    : name_(std::move(name)),
      silence_(silence),
      hosts_(std::move(hosts)),
      pause_detector_(silence),
      coordinators_(coordinators) {}

LeaderTracker::Actions LeaderTracker::on_connected(std::size_t coordinator, TimePoint now) {
  Actions actions;
  now_ = now;
  auto& reached = coordinators_[coordinator];
  reached = {.connected = true, .since = now, .heard = now, .spoken = reached.spoken};
  if (coordinators_.size() == 1) {
    leader_ = coordinator;
    supposed_ = true;
    stalled_ = silent_ = false;
    actions.up = true;
    return actions;
  }
  auto& [to, hello] = actions.send.emplace_back();
  to = coordinator;
  *hello.mutable_hello() = hello_of(name_, silence_);
  return actions;
}

LeaderTracker::Actions LeaderTracker::on_disconnected(std::size_t coordinator, TimePoint now) {
  Actions actions;
  now_ = now;
  auto& gone = coordinators_[coordinator];
  gone = {.spoken = gone.spoken};
  if (leader_ != coordinator) return actions;
  lose_leader(actions);
  // Where two connections lead to one coordinator, or a store was set back, another one has said so before.
  weigh_all(actions);
  report(actions, false);
  return actions;
}

LeaderTracker::Actions LeaderTracker::on_message(std::size_t from, const proto::ToNode& message, TimePoint now) {
  Actions actions;
  now_ = now;
  coordinators_[from].heard = now;
  if (leader_ == from) silent_ = false;
  if (message.has_leads()) on_leads(from, message.leads(), actions);
  else actions.pass = leader_ == from;
  if (!message.has_leads() && !message.has_welcome()) supposed_ = false;
  Coordinator& one = coordinators_[from];
  if (message.has_welcome()) on_welcome(one, message.welcome());
  else if (one.asked != TimePoint{} && !one.says && !std::exchange(one.alone, true)) actions.alone.push_back(from);
  report(actions, false);
  return actions;
}

// It comes first, from who says it at all.
void LeaderTracker::on_welcome(Coordinator& from, const proto::NodeWelcome& welcome) const {
  from.welcomed = true;
  std::vector<Note> said_by_node;  // … of the one that leads
  from.pace = pace_of(name_, silence_, welcome, said_by_node);
  from.spoken = Spoken::with({welcome.oldest(), welcome.newest()});
}

void LeaderTracker::on_leads(std::size_t from, const proto::Leads& leads, Actions& actions) {
  Coordinator& one = coordinators_[from];
  const auto before = std::exchange(one.says, leads);
  one.alone = false;
  if (!one.welcomed) one.spoken = Spoken();
  // There is no other leader to wait for.
  if (coordinators_.size() == 1 && !of_ranks_) keep_to(leads.job(), actions);
  weigh(from, !before, actions);
  if (leader_ == from) stalled_ = leads.stalled();
  if (!(before && before->leads() && before->job() == leads.job())) tell_of_another_job(from, actions);
  if (!before || (!is_of_another_job(from) && leads.term() < term_)) send_view(from, actions);
}

void LeaderTracker::tell_of_another_job(std::size_t coordinator, Actions& actions) const {
  const auto& says = coordinators_[coordinator].says;
  if (!is_of_another_job(coordinator) || !says->leads()) return;
  actions.notes.push_back({fmt::format("the coordinator at {} leads job {:016x}, and this node keeps to job {:016x}: "
                                       "it is not followed. Is its --job or --store another job's, or its address?",
                                       says->address(), says->job(), job_),
                           true});
}

bool LeaderTracker::is_of_another_job(std::size_t coordinator) const {
  const auto& says = coordinators_[coordinator].says;
  return says && of_another_job(job_, says->job());
}

// What a coordinator has said last. `first`: the ranks here have not been introduced to it under another term.
void LeaderTracker::weigh(std::size_t from, bool first, Actions& actions) {
  const proto::Leads& leads = *coordinators_[from].says;
  // Where this node or a standby does not know its job, and the other one does, the standby's term may be another
  // one's.
  const bool counts = !is_of_another_job(from) && (leads.leads() || (job_ != 0) == (leads.job() != 0));
  const bool newer = counts && leads.term() > term_;
  if (counts) term_ = std::max(term_, leads.term());
  const bool lead = counts && leads.leads() && leads.term() == term_;
  if (leader_ && (leader_ == from ? !lead : newer)) lose_leader(actions);  // it leads no more, whatever it says
  if (!lead) return;
  led_term_ = term_;
  supposed_ = false;
  // Of several connections on which one term is led, the one that was first is as good as another.
  if (leader_ == from ? newer && !first : !leader_ || silent_) {
    actions.down |= leader_.has_value();
    actions.up = true;
    leader_ = from;
    stalled_ = leads.stalled();
    silent_ = false;
    actions.notes.push_back({fmt::format("the coordinator at {} leads in term {}", leads.address(), term_)});
  }
  if (leader_ == from && !of_ranks_) keep_to(leads.job(), actions);
}

void LeaderTracker::weigh_all(Actions& actions) {
  for (std::size_t i = 0; i < coordinators_.size(); ++i)
    if (coordinators_[i].says) weigh(i, true, actions);
}

void LeaderTracker::lose_leader(Actions& actions) {
  leader_.reset();
  if (!std::exchange(supposed_, false) || leaderless_since_ == TimePoint{}) {
    leaderless_since_ = now_;
    leaderless_told_ = {};
  }
  actions.down |= !std::exchange(actions.up, false);
}

bool LeaderTracker::stands_by(std::size_t coordinator) const {
  const auto& says = coordinators_[coordinator].says;
  return says && !says->leads();
}

std::optional<std::size_t> LeaderTracker::knows_leader() const {
  std::optional<std::size_t> best;
  for (std::size_t i = 0; !leader_ && i < coordinators_.size(); ++i) {
    const auto& its = coordinators_[i].says;
    if (!stands_by(i) || its->address().empty() || is_of_another_job(i)) continue;
    if (!best || its->term() > coordinators_[*best].says->term()) best = i;
  }
  return best;
}

// Those who stand by take over within less than the first pause. Later it grows with the time that nobody has led.
void LeaderTracker::miss_leader(Actions& actions) {
  const Duration leaderless = now_ - leaderless_since_;
  const Duration pause = std::clamp<Duration>(leaderless / 4, deadlines::kElsewhere.of(silence_),
                                              deadlines::kLongestElsewhere.of(silence_));
  const bool one = coordinators_.size() == 1;
  const bool answers = std::ranges::any_of(coordinators_, [](const auto& each) { return each.says.has_value(); });
  if (answers && leaderless >= pause && now_ - looked_elsewhere_ >= pause) {
    actions.elsewhere = true;
    looked_elsewhere_ = now_;
  }
  // That the only one is not there is told by who calls it.
  if (leaderless <= silence_ || (one && !answers)) return;
  constexpr auto again = std::chrono::minutes(1);
  const auto knows = knows_leader();
  const std::uint64_t term = knows ? says(*knows).term() : 0;
  if (leaderless_told_ != TimePoint{} && now_ - leaderless_told_ < again && term <= told_term_) return;
  if (leaderless_told_ == TimePoint{}) told_term_ = 0;
  leaderless_told_ = now_;
  told_term_ = std::max(told_term_, term);
  actions.leaderless = true;
}

// What was heard of terms before is of another job.
void LeaderTracker::keep_to(std::uint64_t job, Actions& actions) {
  if (job == 0 || job == job_) return;
  if (std::exchange(job_, job) != 0) term_ = led_term_ = 0;
  if (leader_ && is_of_another_job(*leader_)) lose_leader(actions);
  weigh_all(actions);
  for (std::size_t i = 0; i < coordinators_.size(); ++i) tell_of_another_job(i, actions);
}

// Nobody here has a part in it, and it may be over.
void LeaderTracker::give_job_up(Actions& actions) {
  if (leader_ || of_ranks_ || now_ - leaderless_since_ <= 2 * silence_) return;
  for (std::size_t i = 0; i < coordinators_.size() && !leader_; ++i)
    if (is_of_another_job(i) && coordinators_[i].says->leads()) keep_to(coordinators_[i].says->job(), actions);
}

// One of several answers the greeting with whether it leads, and views with the same. Another one says nothing unless
// it is asked, and takes a node for silent that says nothing: it gets heartbeats, as the leader does. What it answers
// comes behind what it would have said of leading.
void LeaderTracker::ask_for_signs(Actions& actions) {
  for (std::size_t i = 0; coordinators_.size() > 1 && i < coordinators_.size(); ++i) {
    Coordinator& one = coordinators_[i];
    if (!one.connected || !one.welcomed || one.says || now_ - std::max(one.since, one.asked) < one.pace) continue;
    one.asked = now_;
    actions.send.emplace_back(i, proto::FromNode()).second.mutable_heartbeat();
  }
}

void LeaderTracker::send_view(std::size_t to, Actions& actions) {
  proto::FromNode message;
  *message.mutable_leader_view() = view_;
  actions.send.emplace_back(to, std::move(message));
}

// What this node hears of the leader, to all that ask; at once where it has changed. The ranks behind it may be many:
// they are looked at when it is `due`.
void LeaderTracker::report(Actions& actions, bool due) {
  const auto wants_views = [](const Coordinator& one) { return one.connected && one.says; };
  if (std::none_of(coordinators_.begin(), coordinators_.end(), wants_views)) return;
  const auto stalled = [this] { return leader_ && stalled_ && !silent_; };
  if (!due &&
      std::tuple(job_, term_, led_term_, !hears_leader(), stalled(), lowest_spoken()) ==
          std::tuple(view_.job(), view_.term(), view_.led_term(), view_.lost(), view_.stalled(), view_.coordinators()))
    return;
  const bool was_lost = view_.lost();
  view_.Clear();
  view_.set_job(job_);
  hosts_(view_);
  of_ranks_ = view_.job() != 0;
  keep_to(view_.job(), actions);
  view_.set_job(job_);
  view_.set_term(term_);
  view_.set_led_term(led_term_);
  view_.set_lost(!hears_leader());
  view_.set_stalled(stalled());
  view_.set_coordinators(lowest_spoken());
  if (was_lost && !view_.lost()) hears_since_ = now_;
  std::erase_if(actions.send, [](const auto& one) { return one.second.has_leader_view(); });
  for (std::size_t i = 0; i < coordinators_.size(); ++i)
    if (wants_views(coordinators_[i])) send_view(i, actions);
}

// Of those that this node has ever reached; 0: of none.
std::uint32_t LeaderTracker::lowest_spoken() const {
  std::uint32_t lowest = 0;
  for (const auto& one : coordinators_)
    if (one.spoken && (lowest == 0 || one.spoken->version() < lowest)) lowest = one.spoken->version();
  return lowest;
}

LeaderTracker::Actions LeaderTracker::on_tick(TimePoint now) {
  Actions actions;
  now_ = now;
  if (const Duration pause = pause_detector_.on_tick(now); pause > Duration{})
    for (auto& one : coordinators_) forgive(one.heard, pause, now);
  if (pause_detector_.settling(now)) return actions;
  silent_ = leader_ && coordinators_[*leader_].says &&
            now - coordinators_[*leader_].heard > deadlines::kTakeover.of(silence_);
  for (std::size_t i = 0; i < coordinators_.size(); ++i)
    if (leader_ != i && coordinators_[i].connected && now - coordinators_[i].heard > silence_)
      actions.close.push_back(i);
  const bool due = now - reported_ >= silence_ / 8;
  if (due) reported_ = now;
  report(actions, due);
  ask_for_signs(actions);
  give_job_up(actions);
  if (leaderless_since_ == TimePoint{}) leaderless_since_ = now;
  if (!leader_) miss_leader(actions);
  return actions;
}

}  // namespace rejoin::membership
