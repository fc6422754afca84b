// Which samples are trained by whom: ranges of the endless sample stream, each trained exactly once.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "base/ids.h"
#include "base/result.h"

namespace rejoin::proto {
class Member;
}

namespace rejoin::membership {

struct SampleRange {
  std::uint64_t begin = 0, end = 0;
  std::uint64_t size() const { return end - begin; }
  bool operator==(const SampleRange&) const = default;
};
using Batch = std::vector<SampleRange>;  // disjoint, in order of assignment
Batch batch_of(const proto::Member& member);
std::uint64_t samples_of(const Batch& batch);

class Ledger {
 public:
  // Every contributor trains `batch` samples a step.
  explicit Ledger(std::uint64_t batch = 1) : batch_(batch) {}

  // Gives each replica that has no batch yet one for the step under way: first what was handed back, then new samples.
  void assign(const std::vector<ReplicaId>& contributors);
  // The replica does not finish the step: what it holds is handed out again.
  void hand_back(ReplicaId replica);
  // The step under way is committed: every batch held is trained.
  void commit(Step step);
  // Steps after `version` are void: their samples are handed out again.
  void roll_back(Step version);

  const Batch* batch_of(ReplicaId replica) const;
  const std::map<ReplicaId, Batch>& held() const { return held_; }
  const std::deque<SampleRange>& handed_back() const { return returned_; }  // and not out again yet

 private:
  Batch take();
  const std::uint64_t batch_;
  std::uint64_t next_ = 0;  // no sample from here on was ever given out
  std::deque<SampleRange> returned_;
  std::map<ReplicaId, Batch> held_;
  std::map<std::uint64_t, Batch> trained_;  // by step, for roll_back
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
