// What a replica will probably train in the next steps: the coordinator's ledger goes on as it is, with the
// contributors of now. Any change of members makes it wrong, so that it is good for fetching data before it is asked
// for, and for nothing else.
#pragma once

#include <cstdint>
#include <vector>

#include "control.pb.h"
#include "membership/ledger.h"

namespace rejoin::membership {

class Ahead {
 public:
  // Of nobody: batches() has none.
  Ahead() = default;
  // As this plan says of the replica; nothing where it does not contribute.
  Ahead(const proto::Plan& plan, ReplicaId replica);
  // In the steps after the plan's, in order: `steps` of them, fewer where the plan does not reach so far.
  std::vector<Batch> batches(std::uint32_t steps) const;

 private:
  ReplicaId replica_;
  std::vector<ReplicaId> contributors_;  // in the plan's order
  Ledger ledger_;
  bool more_ = false;  // of what was handed back, than the plan tells
};

}  // namespace rejoin::membership
