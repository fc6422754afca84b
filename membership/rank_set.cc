#include "membership/rank_set.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "control.pb.h"

namespace rejoin::membership {

// Whoever sent it may have put them in any order: they are sorted once, not inserted one by one.
RankSet::RankSet(const Ranges& ranges, std::uint64_t limit) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> all;
  all.reserve(static_cast<std::size_t>(ranges.size()));
  for (const auto& range : ranges)
    if (const std::uint64_t end = std::min(range.end(), limit); range.begin() < end)
      all.emplace_back(range.begin(), end);
  std::ranges::sort(all);
  join(all);
}

void RankSet::to(Ranges* ranges) const {
  for (const auto& [begin, end] : ranges_) {
    auto& range = *ranges->Add();
    range.set_begin(begin);
    range.set_end(end);
  }
}

void RankSet::add(std::uint64_t begin, std::uint64_t end) {
  if (begin >= end) return;
  // The first that ends at or behind `begin`: it and its successors up to `end` become one.
  auto first = std::lower_bound(ranges_.begin(), ranges_.end(), begin,
                                [](const auto& range, std::uint64_t at) { return range.second < at; });
  auto last = first;
  for (; last != ranges_.end() && last->first <= end; ++last) {
    begin = std::min(begin, last->first);
    end = std::max(end, last->second);
  }
  if (first == last) {
    ranges_.insert(first, {begin, end});
    return;
  }
  *first = {begin, end};
  ranges_.erase(first + 1, last);
}

void RankSet::add(const RankSet& other) {
  if (other.ranges_.size() == 1) return add(other.ranges_[0].first, other.ranges_[0].second);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> all;
  all.reserve(ranges_.size() + other.ranges_.size());
  std::ranges::merge(ranges_, other.ranges_, std::back_inserter(all));
  join(all);
}

// Of ascending ranges: those that touch or overlap become one.
void RankSet::join(const std::vector<std::pair<std::uint64_t, std::uint64_t>>& ascending) {
  ranges_.clear();
  for (const auto& [begin, end] : ascending)
    if (ranges_.empty() || ranges_.back().second < begin) ranges_.emplace_back(begin, end);
    else ranges_.back().second = std::max(ranges_.back().second, end);
}

void RankSet::remove(const RankSet& other) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> left;
  auto hole = other.ranges_.begin();
  for (auto [begin, end] : ranges_) {
    while (hole != other.ranges_.end() && hole->second <= begin) ++hole;
    for (auto at = hole; at != other.ranges_.end() && at->first < end; ++at) {
      if (begin < at->first) left.emplace_back(begin, at->first);
      begin = at->second;
    }
    if (begin < end) left.emplace_back(begin, end);
  }
  ranges_ = std::move(left);
}

std::uint64_t RankSet::size() const {
  std::uint64_t count = 0;
  for (const auto& [begin, end] : ranges_) count += end - begin;
  return count;
}

bool RankSet::contains(std::uint64_t rank) const {
  const auto at = std::upper_bound(ranges_.begin(), ranges_.end(), rank,
                                   [](std::uint64_t number, const auto& range) { return number < range.second; });
  return at != ranges_.end() && at->first <= rank;
}

bool RankSet::includes(const RankSet& other) const {
  return std::all_of(other.ranges_.begin(), other.ranges_.end(), [&](const auto& wanted) {
    const auto at = std::upper_bound(ranges_.begin(), ranges_.end(), wanted.first,
                                     [](std::uint64_t number, const auto& range) { return number < range.second; });
    return at != ranges_.end() && at->first <= wanted.first && wanted.second <= at->second;
  });
}

RankSet RankSet::common(const RankSet& other) const {
  RankSet only_here = *this, both = *this;
  only_here.remove(other);
  both.remove(only_here);
  return both;
}

std::string RankSet::text() const {
  std::string text;
  for (const auto& [begin, end] : ranges_)
    text += fmt::format("{}{}{}", text.empty() ? "" : ", ", begin, end == begin + 1 ? "" : fmt::format("-{}", end - 1));
  return text;
}

}  // namespace rejoin::membership
