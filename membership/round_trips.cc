#include "membership/round_trips.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "base/mix.h"

namespace rejoin::membership {

RoundTrips::RoundTrips(const Told& told) {
  for (const auto& one : told) {
    if (one.length() < kNear || one.length() > kLongestRoundTrip) continue;
    const auto length = static_cast<RoundTripLength>(one.length());
    RoundTrips its;
    its.at(length) = Incarnations(one.incarnations(), ~std::uint64_t{0});
    its.forget_empty();
    keep_longer(its);
  }
  if (size() > 2 * kMostMeasured) by_length_.clear();  // a replica's ranks may tell of different ones
}

void RoundTrips::to(Told* told) const {
  for (const auto& [length, incarnations] : by_length_) {
    auto& one = *told->Add();
    one.set_length(length);
    incarnations.to(one.mutable_incarnations());
  }
}

Incarnations& RoundTrips::at(RoundTripLength length) {
  const auto place = std::ranges::lower_bound(by_length_, length, {}, [](const auto& one) { return one.first; });
  if (place != by_length_.end() && place->first == length) return place->second;
  return by_length_.insert(place, {length, {}})->second;
}

void RoundTrips::forget_empty() {
  std::erase_if(by_length_, [](const auto& one) { return one.second.empty(); });
}

void RoundTrips::put(std::uint64_t incarnation, RoundTripLength length) {
  Incarnations it;
  it.insert(incarnation);
  for (auto& [other, incarnations] : by_length_) incarnations.remove(it);
  at(length).add(it);
  forget_empty();
}

void RoundTrips::keep_longer(const RoundTrips& other) {
  for (const auto& [length, incarnations] : other.by_length_) at(length).add(incarnations);
  Incarnations longer;
  for (auto one = by_length_.rbegin(); one != by_length_.rend(); ++one) {
    one->second.remove(longer);
    longer.add(one->second);
  }
  forget_empty();
}

std::uint64_t RoundTrips::size() const {
  std::uint64_t all = 0;
  for (const auto& [length, incarnations] : by_length_) all += incarnations.size();
  return all;
}

// By chance, but the same for both, and who tells of fewer tells of some of the others': half of kMostMeasured on
// average, so that nobody has more.
bool is_told(std::uint64_t one, std::uint64_t other, std::size_t connections) {
  if (connections <= kMostMeasured) return true;
  const std::uint64_t both = std::min(one, other) * 0x9e3779b97f4a7c15 + std::max(one, other);
  return mixed(both) < ~std::uint64_t{0} / connections * (kMostMeasured / 2);
}

std::vector<Way> ways_between(const std::vector<Measured>& members) {
  std::vector<std::pair<std::uint64_t, std::uint32_t>> positions;
  for (std::uint32_t i = 0; i < members.size(); ++i) positions.emplace_back(members[i].incarnation, i);
  std::ranges::sort(positions);
  std::vector<Way> ways;
  for (std::uint32_t i = 0; i < members.size(); ++i) {
    if (members[i].told == nullptr) continue;
    for (const auto& [length, incarnations] : members[i].told->by_length())
      for (const auto& [begin, end] : incarnations.ranges())
        for (auto at = std::ranges::lower_bound(positions, std::pair(begin, std::uint32_t{0}));
             at != positions.end() && at->first < end; ++at)
          if (at->second != i) ways.push_back({std::min(i, at->second), std::max(i, at->second), length});
  }
  const auto key = [](const Way& way) { return std::tuple(way.one, way.other, way.length); };
  std::ranges::sort(ways, {}, key);
  const auto same = [](const Way& a, const Way& b) { return a.one == b.one && a.other == b.other; };
  ways.erase(std::unique(ways.begin(), ways.end(), same), ways.end());
  return ways;
}

// The shortest ways first, as Kruskal does. What is connected so far, and now gets its first way out, is complete.
Neighbourhoods neighbourhoods(std::size_t members, std::vector<Way> ways) {
  struct Part {
    std::vector<std::uint32_t> members;
    RoundTripLength longest = 0;  // of the ways that connect it
  };
  std::vector<Part> parts(members);
  std::vector<std::uint32_t> part_of(members);
  std::iota(part_of.begin(), part_of.end(), 0);
  for (std::uint32_t i = 0; i < members; ++i) parts[i].members = {i};
  std::ranges::stable_sort(ways, {}, &Way::length);
  Neighbourhoods found;
  for (auto way = ways.begin(); way != ways.end();) {
    const RoundTripLength length = way->length;
    const auto end = std::ranges::upper_bound(way, ways.end(), length, {}, &Way::length);
    std::vector<std::uint32_t> left;
    for (auto one = way; one != end; ++one)
      if (part_of[one->one] != part_of[one->other]) left.insert(left.end(), {part_of[one->one], part_of[one->other]});
    std::ranges::sort(left);
    left.erase(std::unique(left.begin(), left.end()), left.end());
    for (auto part : left)
      if (parts[part].members.size() > 1 && much_longer(length, parts[part].longest))
        found.push_back(parts[part].members);
    for (; way != end; ++way) {
      auto from = part_of[way->one], into = part_of[way->other];
      if (from == into) continue;
      if (parts[from].members.size() > parts[into].members.size()) std::swap(from, into);
      for (auto member : parts[from].members) part_of[member] = into;
      auto& joined = parts[into].members;
      joined.insert(joined.end(), parts[from].members.begin(), parts[from].members.end());
      parts[from].members.clear();
      parts[into].longest = length;
    }
  }
  for (auto& one : found) std::ranges::sort(one);
  return found;
}

std::vector<std::uint32_t> together(std::size_t members, const Neighbourhoods& neighbourhoods) {
  std::vector<std::uint32_t> as_they_stand(members);
  std::iota(as_they_stand.begin(), as_they_stand.end(), 0);
  // Where the first of each neighbourhood stands that a member is in, of the widest first, and itself.
  std::vector<std::vector<std::uint32_t>> places(members);
  for (auto one = neighbourhoods.rbegin(); one != neighbourhoods.rend(); ++one)
    for (auto member : *one) places[member].push_back(one->front());
  for (std::uint32_t i = 0; i < members; ++i) places[i].push_back(i);
  auto order = as_they_stand;
  std::ranges::sort(
      order, {}, [&](std::uint32_t member) -> const auto& { return places[member]; });
  return crossings(order, neighbourhoods) < crossings(as_they_stand, neighbourhoods) ? order : as_they_stand;
}

std::uint64_t crossings(const std::vector<std::uint32_t>& order, const Neighbourhoods& neighbourhoods) {
  std::uint64_t count = 0;
  std::vector<bool> inside;
  for (const auto& one : neighbourhoods) {
    inside.assign(order.size(), false);
    for (auto member : one) inside[member] = true;
    for (std::size_t i = 0; i < order.size(); ++i)
      count += inside[order[i]] != inside[order[(i + 1) % order.size()]] ? 1 : 0;
  }
  return count;
}

}  // namespace rejoin::membership
