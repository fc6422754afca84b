#include "catchup/planner.h"

#include <algorithm>

namespace rejoin::catchup {

Planner::Planner(std::uint32_t slices, std::uint32_t window)
    : total_(slices), widest_(window), window_(window), have_(slices) {
  for (std::uint32_t i = 0; i < slices; ++i) waiting_.push_back(i);
}

void Planner::on_present(std::uint32_t slice) {
  const auto at = std::lower_bound(waiting_.begin(), waiting_.end(), slice);  // nothing has been given out yet
  if (at == waiting_.end() || *at != slice) return;
  waiting_.erase(at);
  have_[slice] = true;
  ++arrived_;
}

void Planner::on_source_up(ReplicaId source) { sources_.try_emplace(source); }

void Planner::on_source_down(ReplicaId source) {
  auto gone = sources_.extract(source);
  if (gone.empty()) return;
  for (auto slice : gone.mapped().under_way) waiting_.push_front(slice);
}

std::vector<std::uint32_t> Planner::next(ReplicaId source, std::size_t sources) {
  std::vector<std::uint32_t> slices;
  if (waiting_.empty()) return slices;
  auto found = sources_.find(source);
  if (found == sources_.end()) return slices;
  std::size_t left = waiting_.size();
  for (const auto& [id, one] : sources_) left += one.under_way.size();
  const std::size_t among = std::max(sources, sources_.size()), share = (left + among - 1) / among;
  while (found->second.under_way.size() < std::min<std::size_t>(window_, share) && !waiting_.empty()) {
    slices.push_back(waiting_.front());
    found->second.under_way.insert(waiting_.front());
    waiting_.pop_front();
  }
  return slices;
}

bool Planner::on_arrived(ReplicaId source, std::uint32_t slice) {
  auto found = sources_.find(source);
  if (found == sources_.end() || found->second.under_way.erase(slice) == 0) return false;
  if (!have_[slice]) ++arrived_;
  have_[slice] = true;
  if (++arrived_since_ >= window_ && window_ < widest_) {
    ++window_;
    arrived_since_ = 0;
  }
  return true;
}

void Planner::narrow() {
  window_ = std::max(1u, window_ / 2);
  arrived_since_ = 0;
}

void Planner::on_again(std::uint32_t slice) {
  if (have_[slice]) --arrived_;
  have_[slice] = false;
  for (auto& [id, source] : sources_) source.under_way.erase(slice);
  waiting_.push_back(slice);
  ++refetched_;
}

}  // namespace rejoin::catchup
