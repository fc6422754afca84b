#include "membership/rank.h"

#include <algorithm>

namespace rejoin::membership {

const proto::Member* Rank::self() const {
  for (const auto& member : plan_.members())
    if (member.replica() == replica_.value && member.incarnation() == incarnation_.value) return &member;
  return nullptr;
}

bool Rank::contributes() const {
  const auto* me = self();
  return me != nullptr && !me->catching_up();
}

std::uint32_t Rank::contributors() const {
  return static_cast<std::uint32_t>(
      std::count_if(plan_.members().begin(), plan_.members().end(), [](const auto& m) { return !m.catching_up(); }));
}

bool Rank::leads() const {
  if (plan_.has_leader()) return contributes() && plan_.leader() == replica_.value;
  return contributes() && std::none_of(plan_.members().begin(), plan_.members().end(),
                                       [&](const auto& m) { return !m.catching_up() && m.replica() < replica_.value; });
}

Batch Rank::batch() const {
  const auto* me = self();
  return me != nullptr ? batch_of(*me) : Batch{};
}

std::uint64_t Rank::weight() const {
  const auto* me = self();
  return me != nullptr ? std::max<std::uint64_t>(1, me->weight()) : 1;
}

std::uint64_t Rank::weights() const {
  std::uint64_t all = 0;
  for (const auto& member : plan_.members())
    if (!member.catching_up()) all += std::max<std::uint64_t>(1, member.weight());
  return all;
}

Rank::Meaning Rank::on_plan(const proto::Plan& plan) {
  epoch_changed_ = false;
  // Plans come from one coordinator over one ordered path, but a restarted one repeats its last, and may say that
  // the job is finished with it.
  const std::pair known(plan_.epoch(), plan_.committed()), said(plan.epoch(), plan.committed());
  const bool repeated = plan_.epoch() != 0 && said <= known;
  if (repeated && (said != known || !plan.finished() || plan_.finished())) return Meaning::nothing;
  const bool was_in = in_, was_part = in_ || suspended_;
  const std::uint64_t step_before = plan_.step(), epoch_before = plan_.epoch();
  plan_ = plan;
  in_ = self() != nullptr;
  suspended_ = !in_ && std::any_of(plan.suspended().begin(), plan.suspended().end(), [&](const auto& m) {
    return m.replica() == replica_.value && m.incarnation() == incarnation_.value;
  });
  was_in_ = was_in_ || in_ || suspended_;
  if (plan.finished() && !was_part && incarnation_ != Incarnation{}) return Meaning::over;
  if (!in_ && !suspended_) return was_in_ ? Meaning::evicted : Meaning::nothing;
  epoch_changed_ = in_ && (plan.epoch() != epoch_before || !was_in);
  // Who is suspended was a member of the epoch in which the last step was committed.
  const bool decided = was_part && plan.committed() >= step_before;
  if (was_part && plan.finished() && !decided) return Meaning::cut_short;
  if (epoch_changed_ || decided) reduced_ = false;
  if (decided) return plan.finished() ? Meaning::finished : Meaning::committed;
  return epoch_changed_ ? Meaning::new_epoch : Meaning::nothing;
}

}  // namespace rejoin::membership
