// The members of an epoch, and what each of them has done of the step under way. To find one, and to ask whether all
// have reduced, takes no longer where they are many: the coordinator does both for each report of a step.
#pragma once

#include <map>
#include <vector>

#include "base/ids.h"
#include "membership/paces.h"
#include "membership/rank_set.h"

namespace rejoin::membership {

struct MemberState {
  ReplicaId replica;
  Incarnation incarnation;
  bool catching_up = false;
  bool complete = false;  // it has caught up, and the log says so
  RankSet reduced;        // of its ranks, for the step under way
  ComputeTime computed;   // of that step
};

// In the order in which they stand in the plan. Each is there once. What a member has reduced is changed here alone.
class Members {
 public:
  explicit Members(std::uint32_t ranks) : ranks_(ranks) {}  // of each replica

  const std::vector<MemberState>& all() const { return all_; }
  auto begin() const { return all_.begin(); }
  auto end() const { return all_.end(); }
  auto begin() { return all_.begin(); }
  auto end() { return all_.end(); }
  bool empty() const { return all_.empty(); }
  std::size_t size() const { return all_.size(); }
  const MemberState& operator[](std::size_t position) const { return all_[position]; }

  // Nothing where it is no member. Valid until members come, go or are ordered.
  MemberState* find(ReplicaId replica);
  const MemberState* find(ReplicaId replica) const;

  void add(MemberState member);
  void erase(ReplicaId replica);
  std::vector<MemberState> take();  // none are left
  void order_by(const std::map<ReplicaId, std::size_t>& positions);

  void add_reduced(MemberState& member, const RankSet& ranks);
  bool all_reduced() const;  // on all of their ranks
  void begin_step();         // which nobody has reduced

 private:
  void index();

  std::uint32_t ranks_;
  std::vector<MemberState> all_;
  std::map<ReplicaId, std::size_t> positions_;
  std::uint64_t missing_ = 0;  // ranks of members that have yet to reduce the step under way
};

}  // namespace rejoin::membership
