// Which samples are trained by whom: ranges of the endless sample stream, each trained exactly once.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "base/ids.h"
#include "membership/balance.h"
#include "membership/rank_set.h"

namespace rejoin::proto {
class Member;
class LogRecord_Snapshot_Ledger;
class Plan_Ahead;
}  // namespace rejoin::proto

namespace rejoin::membership {

using Batch = std::vector<SampleRange>;  // disjoint, in order of assignment
// Appends a range. One that goes on where the last of them ends becomes one with it.
template <typename Ranges>
void append(Ranges& to, const SampleRange& range) {
  if (!to.empty() && to.back().end == range.begin) to.back().end = range.end;
  else to.push_back(range);
}
Batch batch_of(const proto::Member& member);
std::uint64_t samples_of(const Batch& batch);

using Samples = RankSet;  // a set of any numbers
void add(Samples& samples, const Batch& batch);
// Sample numbers that a process reports are below this.
constexpr std::uint64_t kMostSamples = std::uint64_t{1} << 62;

// Says how many samples a step hands out.
struct Dealing {
  std::uint64_t batch = 1;  // for each contributor
  // For all contributors together, where that is constant and they share it; otherwise 0.
  std::uint64_t together = 0;
  // Contributors share, by a constant number or a balance, in multiples of this, which divides what is shared. What
  // can't be shared equally goes to the first of them, a unit each.
  std::uint64_t unit = 1;
  bool operator==(const Dealing&) const = default;
};

class Ledger {
 public:
  // For so many steps the ledger knows the samples of each. A job can be rolled back to an older one only with a
  // checkpoint that says what is trained. So a ledger is small however long the job runs.
  static constexpr std::uint64_t kStepsKept = 1 << 16;

  explicit Ledger(const Dealing& dealing = {}) : dealing_(dealing) {}
  explicit Ledger(std::uint64_t batch) : dealing_{.batch = batch} {}  // to each contributor

  // Gives each replica that has no batch yet one for the step under way: first what was handed back, then new samples.
  // Where contributors share(), these get what the others leave, at least a unit each.
  void assign(const std::vector<ReplicaId>& contributors);
  // Contributors share a number of samples, which their weights say: it is constant, or a balance is in force.
  bool shares() const { return dealing_.together > 0 || balance_.in_force(); }
  // That of the log that this ledger is taken up from. It divides what is shared.
  void set_unit(std::uint64_t unit) { dealing_.unit = unit; }
  std::uint64_t unit() const { return dealing_.unit; }
  // The steps after the one under way, or about to be assigned, are shared like this.
  void set_next(const Balance& balance) { next_balance_ = balance; }
  const Balance& balance() const { return balance_; }  // of the step under way
  const Balance& next_balance() const { return next_balance_ ? *next_balance_ : balance_; }
  bool balances() const { return balance_.in_force() || next_balance().in_force(); }  // now, or from the next step on
  // Returns how many units a step hands out to so many contributors.
  std::uint64_t units(std::uint64_t contributors) const {
    return (dealing_.together > 0 ? dealing_.together : dealing_.batch * contributors) / dealing_.unit;
  }

  // The replica does not finish the step: what it holds is handed out again, and its share of later steps is an equal
  // one. Where nobody holds anything any more all shares are equal.
  void hand_back(ReplicaId replica);
  // The step under way is committed: every batch held is trained.
  void commit(Step step);
  // Steps after `version` are void: their samples are handed out again. It must be one that trained_at() knows.
  // All that is not trained goes out from the lowest on, as after go_on_from().
  void roll_back(Step version);
  // Goes on from a checkpoint that another ledger's job has saved: in the state of `version` these samples are trained,
  // and no others. The gaps between them go out first.
  void go_on_from(Step version, const Samples& trained);

  // Return the samples that are trained in the steps up to the last one committed, or up to this one. Nothing where the
  // ledger does not reach: before the checkpoint that it went on from, and after the last step.
  const Samples& trained() const { return trained_; }
  std::optional<Samples> trained_at(Step version) const;

  // Write the ledger to a snapshot, and take it up from one whose committed step is `committed`.
  void to(proto::LogRecord_Snapshot_Ledger& snapshot) const;
  void take_up(const proto::LogRecord_Snapshot_Ledger& snapshot, Step committed);

  bool operator==(const Ledger&) const = default;

  const Batch* batch_of(ReplicaId replica) const;
  const std::map<ReplicaId, Batch>& held() const { return held_; }
  const std::deque<SampleRange>& handed_back() const { return returned_; }  // and not out again yet

  // Write to a plan, and read from one, what the next steps hand out if the same contributors train them. What the
  // replicas in `given_up` hold is handed back with the commit.
  void to(proto::Plan_Ahead& ahead, const std::vector<ReplicaId>& given_up = {}) const;
  static Ledger from(const proto::Plan_Ahead& ahead);

 private:
  Batch take(std::uint64_t missing);
  void share(const std::vector<ReplicaId>& contributors);
  void forget_balance() { balance_ = {}, next_balance_.reset(); }
  void hand_out_in_order();
  Dealing dealing_;
  Balance balance_;
  std::optional<Balance> next_balance_;
  std::uint64_t next_ = 0;  // no sample from here on is given out, or was in a step that counts
  std::deque<SampleRange> returned_;
  std::map<ReplicaId, Batch> held_;
  Step from_;                               // the checkpoint that it went on from, or 0; or the oldest step kept
  Step committed_;                          // the last step
  Samples trained_;                         // … up to which these are trained
  std::map<std::uint64_t, Samples> steps_;  // what each step after from_ has trained: few ranges, whoever held them
};

struct Audit {
  std::uint64_t samples = 0;  // given out and trained, up to the last one trained
  std::uint64_t once = 0;
  std::uint64_t lost = 0;      // never trained, though later ones were
  std::uint64_t repeated = 0;  // trained more than once
};
// Counts from what was committed, knowing nothing of how it was assigned.
Audit audit(const std::map<std::uint64_t, Batch>& trained_by_step);

}  // namespace rejoin::membership
