// How fast contributors compute, and what each gets of the samples where --balance-batches follows that.
#include <algorithm>

#include "membership/coordinator.h"

namespace rejoin::membership {

namespace {

// What a step deals, which is within the bounds, where nothing of a step before is left over.
std::string text_of_shares(std::uint64_t units, std::uint64_t unit, const std::vector<Speed>& speeds,
                           const Balance& balance) {
  std::vector<ReplicaId> contributors;
  for (const auto& one : speeds) contributors.push_back(one.replica);
  const auto dealt = deal(units, contributors, balance);
  const auto [least, most] = std::ranges::minmax_element(dealt);
  const auto who = [&](auto one) { return contributors[static_cast<std::size_t>(one - dealt.begin())]; };
  return fmt::format("of {} in a step from {} (replica {}) to {} (replica {})", units * unit, *least * unit, who(least),
                     *most * unit, who(most));
}

}  // namespace

// All members, by the log, and besides them all that may be taken back or wait to be admitted, weigh their gradients,
// and all that may take over the lead read what is written of shares: so that these need not be given up at once for
// one.
bool Coordinator::all_may_balance() {
  if (!protocol_.may(Feature::balance) || !of_coordinators_.value_or(Spoken()).may(Feature::balance)) return false;
  const auto is_here = [&](const auto& one) { return registration(one.replica, one.incarnation) != nullptr; };
  const auto returns = [&](const SuspendedReplica& out) { return out.ended || is_here(out); };
  if (!std::ranges::all_of(members_, is_here) || !std::ranges::all_of(suspended_, returns)) return false;
  const auto not_it = std::ranges::find_if(replicas_, [&](const auto& one) { return !may_balance(one.second); });
  const bool all = not_it == replicas_.end();
  if (std::exchange(all_weigh_, all) && !all)
    note(
        "replicas share the samples equally, since replica {} is of an older release, or does not weigh its gradients: "
        "its trainer is to call use_weights() before join()",
        not_it->first);
  return all;
}

bool Coordinator::may_balance(const ReplicaState& replica) const {
  return std::ranges::all_of(replica.ranks, [&](const RankState& rank) {
    return !rank.registered || (rank.weighs && versions_of(rank).spoken.may(Feature::balance));
  });
}

// Nobody has computed for longer than the step is under way. A little more is allowed: two clocks show it, and the
// trainer may have heard the plan before this coordinator had taken over.
std::uint64_t Coordinator::plausible(std::uint64_t compute_us) const {
  const Duration under_way = now_ - under_way_since_;
  const auto most = (under_way + under_way / 8) / std::chrono::microseconds(1) + 1000;
  return compute_us <= static_cast<std::uint64_t>(std::max<std::int64_t>(0, most)) ? compute_us : 0;
}

// A step is being committed. One in which somebody came or went, or a trainer took its time, says nothing.
void Coordinator::measure(Step step) {
  std::vector<Paces::Measured> contributors;
  for (const auto& m : members_) {
    const Batch* batch = ledger_.batch_of(m.replica);
    if (!m.catching_up && batch != nullptr)
      contributors.push_back(
          {m.replica, m.incarnation, samples_of(*batch), settled_ && !excused_ ? m.computed.us() : 0});
  }
  paces_.on_step(step, contributors, now_);
}

std::vector<Paces::Straggler> Coordinator::stragglers() const {
  std::vector<Paces::Straggler> here;
  for (const auto& one : paces_.stragglers())
    if (std::ranges::any_of(members_, [&](const auto& m) { return m.replica == one.replica && !m.catching_up; }))
      here.push_back(one);
  return here;
}

// Sums go around the ring, and results both ways.
void Coordinator::look_for_slow_link() {
  std::vector<RingLink> links;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const ReplicaState* here = registration(members_[i].replica, members_[i].incarnation);
    if (here == nullptr) continue;
    LinkRates rates;
    for (const auto& status : here->statuses.current()) rates.keep_lower(status.rates);
    std::set neighbours{(i + 1) % members_.size(), (i + members_.size() - 1) % members_.size()};
    for (auto next : neighbours)
      if (const auto link = rates.of(members_[next].incarnation.value))
        links.push_back({members_[i].replica, members_[next].replica, link->rank, link->rate});
  }
  slow_link_.look(links, committed_, now_);
}

// How the steps after the next one are to be shared from now on, where that changes with this commit: the plan that
// goes out with it then foretells what these hand out.
std::optional<Balance> Coordinator::change_of_balance(Step step) {
  const BalanceRule& rule = config_.balance;
  Balance now = ledger_.next_balance();
  if (!rule.on || !all_may_balance()) return now.in_force() ? std::optional(Balance{}) : std::nullopt;
  if (now.in_force() && std::pair(now.at_least, now.at_most) != std::pair(rule.at_least, rule.at_most)) {
    now.at_least = rule.at_least, now.at_most = rule.at_most;
    return now;
  }
  if (balanced_at_ && *balanced_at_ <= step && step.value < balanced_at_->value + rule.every) return std::nullopt;
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
  note("from step {} on replicas share the samples by how fast they are: {}", step.value + 2,
       text_of_shares(ledger_.units(speeds.size()), ledger_.unit(), speeds, *change));
  return change;
}

}  // namespace rejoin::membership
