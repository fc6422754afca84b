// Says what a replica will probably train in the next steps, if the coordinator's ledger goes on with the present
// contributors. Any change of members makes it wrong, so it is good for fetching data ahead and for nothing else.
#pragma once

#include <cstdint>
#include <vector>

#include "control.pb.h"
#include "membership/ledger.h"

namespace rejoin::membership {

class Ahead {
 public:
  // Makes one of nobody, which has no batches.
  Ahead() = default;
  // Takes what this plan says of the replica; nothing where the replica does not contribute.
  Ahead(const proto::Plan& plan, ReplicaId replica);
  // Returns the batches of `steps` steps after the plan's, in order; fewer where the plan does not reach so far.
  std::vector<Batch> batches(std::uint32_t steps) const;

 private:
  ReplicaId replica_;
  std::vector<ReplicaId> contributors_;  // in the plan's order
  Ledger ledger_;
  bool more_ = false;  // more was handed back than the plan has
};

}  // namespace rejoin::membership
