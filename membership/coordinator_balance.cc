// How fast contributors compute, and what each gets of the samples where --balance-batches follows that.
#include <algorithm>

#include "membership/coordinator.h"

namespace rejoin::membership {

// All members, by the log, and besides them all that may be taken back, wait to be admitted or may take over the lead.
// What nobody else understands may then be used, and need not be given up at once for one of them.
bool Coordinator::all_may(Feature feature) const {
  if (!protocol_.may(feature) || !of_coordinators_.may(feature)) return false;
  const auto is_here = [&](const auto& one) { return registration(one.replica, one.incarnation) != nullptr; };
  if (!std::ranges::all_of(members_, is_here) || !std::ranges::all_of(suspended_, is_here)) return false;
  return std::ranges::all_of(replicas_, [&](const auto& one) { return may(one.second, feature); });
}

bool Coordinator::may(const ReplicaState& replica, Feature feature) const {
  return std::ranges::all_of(
      replica.ranks, [&](const RankState& rank) { return !rank.registered || versions_of(rank).spoken.may(feature); });
}

// Nobody has computed for longer than the step is under way. A little more is allowed: two clocks show it, and the
// trainer may have heard the plan before this coordinator had taken over.
std::uint64_t Coordinator::plausible(std::uint64_t compute_us, TimePoint now) const {
  const Duration under_way = now - under_way_since_;
  const auto most = (under_way + under_way / 8) / std::chrono::microseconds(1) + 1000;
  return compute_us <= static_cast<std::uint64_t>(std::max<std::int64_t>(0, most)) ? compute_us : 0;
}

// A step is being committed. One in which somebody came or went, or a trainer took its time, says nothing.
void Coordinator::measure(Step step, TimePoint now) {
  if (!settled_ || excused_) return;
  std::vector<Paces::Measured> contributors;
  for (const auto& m : members_) {
    const Batch* batch = ledger_.batch_of(m.replica);
    if (!m.catching_up && batch != nullptr)
      contributors.push_back({m.replica, m.incarnation, samples_of(*batch), m.computed.us()});
  }
  paces_.on_step(step, contributors, now);
}

std::vector<Paces::Straggler> Coordinator::stragglers() const {
  std::vector<Paces::Straggler> here;
  for (const auto& one : paces_.stragglers())
    if (std::ranges::any_of(members_, [&](const auto& m) { return m.replica == one.replica && !m.catching_up; }))
      here.push_back(one);
  return here;
}

// How the steps after the next one are to be shared from now on, where that changes with this commit: the plan that
// goes out with it then foretells what these hand out.
std::optional<Balance> Coordinator::change_of_balance(Step step) {
  const BalanceRule& rule = config_.balance;
  Balance now = ledger_.next_balance();
  if (!rule.on || !all_may(Feature::balance)) return now.in_force() ? std::optional(Balance{}) : std::nullopt;
  if (now.in_force() && std::pair(now.at_least, now.at_most) != std::pair(rule.at_least, rule.at_most)) {
    now.at_least = rule.at_least, now.at_most = rule.at_most;
    return now;
  }
  if (balanced_at_ && step.value < balanced_at_->value + rule.every) return std::nullopt;
  std::vector<Speed> speeds;
  for (const auto& m : members_) {
    if (m.catching_up) continue;
    const auto pace = paces_.of(m.replica);
    if (!pace) return std::nullopt;
    speeds.push_back({m.replica, *pace});
  }
  auto change = better(rule, ledger_.units(speeds.size()), speeds, now);
  if (!change) return std::nullopt;
  balanced_at_ = step;
  paces_.begin_again();
  std::string shares;
  for (const auto& [replica, share] : change->shares)
    shares += fmt::format("{}{}: {:.2f}", shares.empty() ? "" : ", ", replica, share * 1e-3);
  note("from step {} on replicas share the samples by how fast they are, each so many times an equal share: {}",
       step.value + 2, shares);
  return change;
}

}  // namespace rejoin::membership
