#include "membership/ahead.h"

#include <algorithm>

namespace rejoin::membership {

Ahead::Ahead(const proto::Plan& plan, ReplicaId replica) : replica_(replica) {
  if (!plan.has_ahead()) return;
  for (const auto& member : plan.members())
    if (!member.catching_up()) contributors_.push_back(ReplicaId(member.replica()));
  if (std::ranges::find(contributors_, replica) == contributors_.end()) contributors_.clear();
  ledger_ = Ledger::from(plan.ahead());
  more_ = plan.ahead().more();
}

std::vector<Batch> Ahead::batches(std::uint32_t steps) const {
  std::vector<Batch> batches;
  if (contributors_.empty()) return batches;
  Ledger ledger = ledger_;
  for (std::uint32_t i = 0; i < steps; ++i) {
    ledger.assign(contributors_);
    if (more_ && ledger.handed_back().empty()) return batches;  // what comes next is not known here
    batches.push_back(*ledger.batch_of(replica_));
    ledger.commit(Step(i + 1));
  }
  return batches;
}

}  // namespace rejoin::membership
