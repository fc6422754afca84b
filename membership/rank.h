// This is the step protocol as one rank sees it: the caller passes each plan in, and learns what it means for the step
// under way. It is pure: it has no thread and no clock.
//
// The messages, in order: the rank sends RankUp and gets Registered; a Plan that has it as a member begins its step; it
// sends Reduced; the next Plan commits the step, or names another epoch, in which the same step is done once more.
#pragma once

#include "base/ids.h"
#include "control.pb.h"
#include "membership/ledger.h"

namespace rejoin::membership {

constexpr std::size_t kMostCardBytes = 1024;  // RankUp.card

class Rank {
 public:
  explicit Rank(ReplicaId replica) : replica_(replica) {}

  // The coordinator has taken this rank. A plan that came before can't name the new incarnation, so it is forgotten;
  // the coordinator sends it again.
  void on_registered(Incarnation incarnation) {
    if (incarnation != incarnation_ && !in_ && !suspended_) plan_ = {};
    incarnation_ = incarnation;
  }

  enum class Meaning {
    nothing,    // stale, repeated, or not for us yet
    new_epoch,  // the step under way (or about to begin) runs in another epoch: enter it, reduce again
    committed,  // the step under way is decided: apply its update
    evicted,    // this incarnation is out of the job, and a step was committed without it
    finished,   // committed, and it was the last step
    cut_short,  // the job is finished with the step before the one under way: the coordinator has another --steps now
    over,       // the job was finished before this incarnation had a part in it
  };
  // `new_epoch` and `committed` can both hold: `committed` is returned, and epoch_changed() tells.
  Meaning on_plan(const proto::Plan& plan);
  bool epoch_changed() const { return epoch_changed_; }

  // The reduction of the step under way is complete here.
  void on_reduced() { reduced_ = true; }
  bool reduced() const { return reduced_; }

  Incarnation incarnation() const { return incarnation_; }
  Epoch epoch() const { return Epoch(plan_.epoch()); }
  Step step() const { return Step(plan_.step()); }
  Step committed() const { return Step(plan_.committed()); }
  bool member() const { return in_; }
  // Whether this incarnation is out of the epoch while nothing has been committed without it: it may be taken back.
  bool suspended() const { return suspended_; }
  bool contributes() const;
  std::uint32_t contributors() const;  // in this epoch
  bool has_contributors() const { return contributors() > 0; }
  // Whether this is the one contributor that all who have this plan take for the leading one.
  bool leads() const;
  Batch batch() const;
  // What this rank's gradients count in the mean, and those of all contributors together: their numbers of samples,
  // where the plan gives weights.
  std::uint64_t weight() const;
  std::uint64_t weights() const;
  const proto::Plan& plan() const { return plan_; }
  const proto::Member* self() const;

 private:
  ReplicaId replica_;
  Incarnation incarnation_;
  proto::Plan plan_;
  bool in_ = false;         // a member in the latest plan
  bool suspended_ = false;  // … or named there as one that may come back
  bool was_in_ = false;     // a member ever
  bool reduced_ = false;    // of (epoch, step)
  bool epoch_changed_ = false;
};

}  // namespace rejoin::membership
