#include "membership/members.h"

#include <algorithm>
#include <utility>

namespace rejoin::membership {

const MemberState* Members::find(ReplicaId replica) const {
  const auto found = positions_.find(replica);
  return found == positions_.end() ? nullptr : &all_[found->second];
}

MemberState* Members::find(ReplicaId replica) { return const_cast<MemberState*>(std::as_const(*this).find(replica)); }

void Members::add(MemberState member) {
  positions_.emplace(member.replica, all_.size());
  missing_ += ranks_ - member.reduced.size();
  all_.push_back(std::move(member));
}

void Members::erase(ReplicaId replica) {
  const auto is_it = [&](const MemberState& member) { return member.replica == replica; };
  for (const auto& member : all_)
    if (is_it(member)) missing_ -= ranks_ - member.reduced.size();
  if (std::erase_if(all_, is_it) > 0) index();
}

std::vector<MemberState> Members::take() {
  positions_.clear();
  missing_ = 0;
  return std::exchange(all_, {});
}

void Members::order_by(const std::map<ReplicaId, std::size_t>& positions) {
  std::ranges::sort(all_, {}, [&](const MemberState& member) { return positions.at(member.replica); });
  index();
}

void Members::add_reduced(MemberState& member, const RankSet& ranks) {
  const std::uint64_t before = member.reduced.size();
  member.reduced.add(ranks);
  missing_ -= member.reduced.size() - before;
}

bool Members::all_reduced() const { return missing_ == 0; }

void Members::begin_step() {
  for (auto& member : all_) member.reduced.clear(), member.computed = {};
  missing_ = std::uint64_t{ranks_} * all_.size();
}

void Members::index() {
  positions_.clear();
  for (std::size_t i = 0; i < all_.size(); ++i) positions_.emplace(all_[i].replica, i);
}

}  // namespace rejoin::membership
