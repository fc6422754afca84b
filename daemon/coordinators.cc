#include "daemon/coordinators.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "base/fail.h"
#include "daemon/log_notes.h"

namespace rejoin::daemon {

namespace {
constexpr auto kOfAnotherJob = "is of another job than this node: is its --job or --store another's, or the address?";
constexpr auto kDecidesAlone =
    "decides alone (--store file): --connect takes its address only, or give it the --store of the others";
constexpr auto kNoneLeads = "says that it leads";
constexpr auto kStalled =
    "the coordinators' store does not take what it decides: no step is committed until it does; look at its status, "
    "and at etcd";
}  // namespace

Coordinators::Coordinators(asio::io_context& io, const std::string& addresses, const std::string& name,
                           const JobKeys& keys, std::chrono::milliseconds silence,
                           std::function<void(proto::LeaderView&)> hosts, Upstream::Handlers handlers)
    : handlers_(std::move(handlers)), tracker_(name, silence, split(addresses, ',').size(), std::move(hosts)) {
  const auto now = [] { return SteadyClock().now(); };
  const auto each = split(addresses, ',');
  for (std::size_t i = 0; i < each.size(); ++i)
    all_.push_back(std::make_unique<Upstream>(
        io, each[i], keys, silence,
        Upstream::Handlers{.up = [this, i, now] { carry_out(tracker_.on_connected(i, now())); },
                           .message =
                               [this, i, now](const proto::ToNode& message) {
                                 carry_out(tracker_.on_message(i, message, now()), &message);
                               },
                           .down = [this, i, now] { carry_out(tracker_.on_disconnected(i, now())); },
                           .over = handlers_.over,
                           .rejected = handlers_.rejected},
        each.size() > 1));
}

void Coordinators::connect() {
  for (auto& one : all_) one->connect();
}

void Coordinators::send(const proto::FromNode& message) {
  if (leader_) all_[*leader_]->send(message);
}

void Coordinators::finish(std::function<void()> over) { all_[leader_.value_or(0)]->finish(std::move(over)); }

void Coordinators::check(TimePoint heard) {
  if (leader_) all_[*leader_]->check(heard);
}

void Coordinators::tick(TimePoint now) {
  carry_out(tracker_.on_tick(now));
  for (auto& one : all_) one->tick(now);
}

void Coordinators::carry_out(Actions actions, const proto::ToNode* message) {
  REJOIN_CHECK(!busy_ || message == nullptr, "a message came within a message");
  Step step{std::move(actions), tracker_.leader()};
  if (busy_) return steps_.push_back(std::move(step));
  busy_ = true;
  carry_out(step, message);
  for (; !steps_.empty(); steps_.pop_front()) carry_out(Step(std::move(steps_.front())), nullptr);
  busy_ = false;
}

void Coordinators::carry_out(const Step& step, const proto::ToNode* message) {
  const Actions& actions = step.actions;
  log_notes(actions.notes);
  for (const auto one : actions.alone) {
    const std::string line = fmt::format("the coordinator at {} {}", all_[one]->address(), kDecidesAlone);
    log_notes({{line, true, line}});  // it may come and go
  }
  if (actions.leaderless) {
    const auto why = why_none_leads();
    log_notes(
        {{fmt::format(
              "none of the coordinators {}{}", why,
              why != kNoneLeads ? "" : ": waiting for one to take over, or for one that was started with --store"),
          true}});
  }
  for (const auto& [to, one] : actions.send) all_[to]->send(one);
  if (actions.down) {
    leader_.reset();
    handlers_.down();
  }
  if (actions.up) {
    leader_ = step.leader;
    all_[*leader_]->stay();
    handlers_.up();
  }
  if (actions.pass && message != nullptr) handlers_.message(*message);
  if (actions.elsewhere) look_elsewhere();
  for (auto silent : actions.close) all_[silent]->connect_anew("it was silent");
}

// Each name of a list stands for one coordinator: where two have been answered at one address, one of them was wrong
// when it was looked up.
void Coordinators::look_elsewhere() {
  for (const auto& one : all_)
    if (all_.size() == 1 || std::ranges::any_of(all_, [&](const auto& other) {
          return other != one && other->up() && one->up() && other->ends().there == one->ends().there;
        }))
      one->look_elsewhere();
}

// As a standby says it of another one that is not reached here; otherwise empty.
std::string Coordinators::leads_elsewhere() const {
  constexpr std::size_t longest = 256;
  const auto knows = tracker_.knows_leader();
  if (!knows) return {};
  const auto& says = tracker_.says(*knows);
  // It led, before it was started again or lost its store.
  for (std::size_t i = 0; i < all_.size(); ++i)
    if (tracker_.stands_by(i) && (says.address() == all_[i]->address() || says.address() == all_[i]->ends().there))
      return {};
  return fmt::format(
      "{} says that {} does, in term {}: add that one to --connect where it is missing; otherwise look at it, at the "
      "way to it, and at etcd",
      all_[*knows]->address(), printable(says.address(), longest), says.term());
}

// With what stands in the way to those that are not connected.
std::string Coordinators::why_none_leads() const {
  std::string lost;
  for (const auto& one : all_)
    if (!one->up() && !one->why_lost().empty())
      lost += fmt::format("{}{}: {}", lost.empty() ? "" : "; ", one->address(), one->why_lost());
  if (std::ranges::none_of(all_, [](const auto& one) { return one->up(); }))
    return fmt::format("is reached{}{}", lost.empty() ? "" : ": ", lost);
  const auto elsewhere = leads_elsewhere();
  return fmt::format("{}{}{}{}{}", kNoneLeads, elsewhere.empty() ? "" : "; ", elsewhere,
                     lost.empty() ? "" : "; not reached: ", lost);
}

nlohmann::json Coordinators::status(bool connected) const {
  if (all_.size() == 1) {
    auto one = all_.front()->status(connected);
    if (connected && tracker_.stalled()) one["reason"] = kStalled;
    if (connected || !all_.front()->up()) return one;
    const auto elsewhere = leads_elsewhere();
    one["reason"] = tracker_.is_of_another_job(0) ? kOfAnotherJob
                    : elsewhere.empty()           ? "it does not lead, and no other one is known here"
                                                  : "it does not lead; " + elsewhere;
    return one;
  }
  nlohmann::json all = nlohmann::json::array();
  std::string addresses;
  std::string other, alone;  // addresses
  for (std::size_t i = 0; i < all_.size(); ++i) {
    const auto& one = *all_[i];
    auto& its = all.emplace_back(one.status(one.up()));
    addresses += (addresses.empty() ? "" : ",") + one.address();
    if (tracker_.decides_alone(i)) {
      alone = one.address();
      its["reason"] = kDecidesAlone;
    }
    if (!tracker_.is_of_another_job(i)) continue;
    other = one.address();
    its["reason"] = kOfAnotherJob;
  }
  const auto refuses = std::ranges::find_if(all_, [](const auto& one) { return !one->refusal().empty(); });
  if (leader_ && tracker_.stalled()) all[*leader_]["reason"] = kStalled;
  const std::string none =
      refuses != all_.end() ? fmt::format("{}: {}", (*refuses)->address(), (*refuses)->refusal())
      : !other.empty() ? fmt::format("none of them says that it leads this node's job; {} {}", other, kOfAnotherJob)
      : !alone.empty() ? fmt::format("{} {}", alone, kDecidesAlone)
                       : "none of them " + why_none_leads();
  const std::string leader = leader_ ? all_[*leader_]->address() : "";
  return {{"address", leader_ ? leader : addresses},
          {"connected", connected},
          {"reason", !connected           ? none
                     : tracker_.stalled() ? kStalled
                                          : ""},
          {"leader", {{"address", leader}, {"term", tracker_.term()}}},
          {"all", std::move(all)}};
}

}  // namespace rejoin::daemon
