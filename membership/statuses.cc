#include "membership/statuses.h"

#include <algorithm>
#include <utility>

namespace rejoin::membership {

void Statuses::say(NodeId by, ConnectedRanks status, const RankSet& of, const RankSet& last) {
  for (auto& [said_by, status_of_others] : others_)
    if (said_by == by) status_of_others.ranks.remove(of);
  std::erase_if(others_, [](const auto& one) { return one.second.ranks.empty(); });
  status.ranks = of;
  status.ranks.remove(last);
  if (!status.ranks.empty()) others_.emplace_back(by, status);
  put(by, last, std::move(status));
}

bool Statuses::come(std::uint32_t rank, NodeId by) {
  const auto said = std::ranges::find_if(
      others_, [&](const auto& one) { return one.first == by && one.second.ranks.contains(rank); });
  if (said == others_.end()) return false;
  ConnectedRanks status = said->second;
  said->second.ranks.remove(RankSet(rank));
  if (said->second.ranks.empty()) others_.erase(said);
  put(by, RankSet(rank), std::move(status));
  return true;
}

void Statuses::forget(NodeId lost) {
  std::erase_if(others_, [&](const auto& one) { return one.first == lost; });
  std::ranges::replace(said_by_, lost, NodeId());
}

// In the place of what other connections have said of these ranks.
void Statuses::put(NodeId by, const RankSet& ranks, ConnectedRanks status) {
  if (ranks.empty()) return;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < current_.size(); ++i) {
    RankSet replaced = current_[i].ranks.common(ranks);
    current_[i].ranks.remove(replaced);
    if (!replaced.empty() && said_by_[i] != by && said_by_[i] != NodeId()) {
      others_.emplace_back(said_by_[i], current_[i]);
      others_.back().second.ranks = std::move(replaced);
    }
    if (current_[i].ranks.empty()) continue;
    if (kept != i) current_[kept] = std::move(current_[i]), said_by_[kept] = said_by_[i];
    ++kept;
  }
  current_.resize(kept);
  said_by_.resize(kept);
  status.ranks = ranks;
  current_.push_back(std::move(status));
  said_by_.push_back(by);
}

}  // namespace rejoin::membership
