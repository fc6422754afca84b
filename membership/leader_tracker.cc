#include "membership/leader_tracker.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "base/deadlines.h"
#include "membership/greeting.h"
#include "membership/node.h"

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
  leader_.reset();
  leaderless_since_ = now;
  actions.down = true;
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
  if (message.has_welcome()) on_welcome(coordinators_[from], message.welcome());
  if (!leader_ && actions.down) leaderless_since_ = now;
  report(actions, false);
  return actions;
}

// It comes first, from who says it at all.
void LeaderTracker::on_welcome(Coordinator& from, const proto::NodeWelcome& welcome) {
  from.welcomed = true;
  from.spoken = Spoken::with({welcome.oldest(), welcome.newest()});
}

void LeaderTracker::on_leads(std::size_t from, const proto::Leads& leads, Actions& actions) {
  const bool first = !std::exchange(coordinators_[from].one_of_several, true);
  if (!coordinators_[from].welcomed) coordinators_[from].spoken = Spoken();
  const bool newer = leads.term() > term_;
  term_ = std::max(term_, leads.term());
  const bool lead = leads.leads() && leads.term() == term_;
  if (leader_ && (leader_ == from ? !lead : newer)) {  // it leads no more, whatever it says
    leader_.reset();
    actions.down = true;
  }
  if (lead) led_term_ = term_;
  if (lead && (leader_ != from || (newer && !first))) {
    actions.down |= leader_.has_value();
    actions.up = true;
    leader_ = from;
    silent_ = false;
    leaderless_reported_ = false;
    actions.notes.push_back({fmt::format("the coordinator at {} leads in term {}", leads.address(), term_)});
  }
  if (leader_ == from) stalled_ = leads.stalled();
  if (first || leads.term() < term_) send_view(from, actions);
}

std::optional<std::size_t> LeaderTracker::decides_alone() const {
  for (std::size_t i = 0; coordinators_.size() > 1 && i < coordinators_.size(); ++i)
    if (coordinators_[i].connected && coordinators_[i].welcomed && !coordinators_[i].one_of_several &&
        now_ - coordinators_[i].since > silence_ / 4)
      return i;
  return std::nullopt;
}

void LeaderTracker::send_view(std::size_t to, Actions& actions) {
  proto::FromNode message;
  *message.mutable_leader_view() = view_;
  actions.send.emplace_back(to, std::move(message));
}

// What this node hears of the leader, to all that ask; at once where it has changed. The ranks behind it may be many:
// they are looked at when it is `due`.
void LeaderTracker::report(Actions& actions, bool due) {
  const auto wants_views = [](const Coordinator& one) { return one.connected && one.one_of_several; };
  if (std::none_of(coordinators_.begin(), coordinators_.end(), wants_views)) return;
  const bool lost = !hears_leader();
  const bool stalled = leader_ && stalled_ && !silent_;
  if (!due && std::tuple(term_, led_term_, lost, stalled, lowest_spoken()) ==
                  std::tuple(view_.term(), view_.led_term(), view_.lost(), view_.stalled(), view_.coordinators()))
    return;
  if (view_.lost() && !lost) hears_since_ = now_;
  view_.Clear();
  view_.set_term(term_);
  view_.set_led_term(led_term_);
  view_.set_lost(lost);
  view_.set_stalled(stalled);
  view_.set_coordinators(lowest_spoken());
  hosts_(view_);
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
  silent_ = leader_ && coordinators_[*leader_].one_of_several &&
            now - coordinators_[*leader_].heard > deadlines::kTakeover.of(silence_);
  for (std::size_t i = 0; i < coordinators_.size(); ++i)
    if (leader_ != i && coordinators_[i].connected && now - coordinators_[i].heard > silence_)
      actions.close.push_back(i);
  const bool due = now - reported_ >= silence_ / 8;
  if (due) reported_ = now;
  report(actions, due);
  if (leaderless_since_ == TimePoint{}) leaderless_since_ = now;
  if (!leader_ && coordinators_.size() > 1 && now - leaderless_since_ > silence_ &&
      !std::exchange(leaderless_reported_, true))
    actions.notes.push_back(
        {"none of the coordinators says that it leads: waiting for one to take over, or for one "
         "that was started with --store",
         true});
  return actions;
}

}  // namespace rejoin::membership
