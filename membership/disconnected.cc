#include "membership/disconnected.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/fail.h"
#include "base/text.h"

namespace rejoin::membership {

void on_connected(std::map<Edge, Accusation>& accusations, ReplicaId replica, const RankSet& ranks) {
  for (auto at = accusations.lower_bound({replica, {}}); at != accusations.end() && at->first.from == replica; ++at) {
    Accusation& about = at->second;
    const RankSet now = about.unconnected.common(ranks);
    if (now.empty()) continue;
    about.unconnected.remove(now);
    if (!about.lost) std::erase_if(about.counting, [&](const auto& one) { return now.contains(one.first); });
  }
}

Disconnected::Disconnected(const std::map<Edge, Accusation>& accusations, const Members& members, TimePoint now,
                           Duration patience)
    : accusations_(accusations), members_(members) {
  for (const auto& [edge, about] : accusations) {
    untold_ |= about.untold;
    const bool holds = about.of_connection() && (about.counts() || now - about.heard <= patience);
    if (edge.from == edge.to || !holds) continue;
    if (members.find(edge.from) == nullptr || members.find(edge.to) == nullptr) continue;
    all_[edge.from].insert(edge.to);
    all_[edge.to].insert(edge.from);
    stands_ |= about.counts() && now - about.since() >= patience;
  }
}

int Disconnected::lacks(ReplicaId member) const {
  const auto found = all_.find(member);
  return found == all_.end() ? 0 : static_cast<int>(found->second.size());
}

std::tuple<int, int, int> Disconnected::weight(ReplicaId member, const std::map<Edge, int>& mended) const {
  const auto& others = all_.at(member);
  const auto alone = std::ranges::count_if(others, [&](ReplicaId other) { return all_.at(other).size() == 1; });
  const auto out = std::ranges::count_if(mended, [&](const auto& pair) {
    const auto& [low, high] = pair.first;
    return (low == member && members_.find(high) == nullptr) || (high == member && members_.find(low) == nullptr);
  });
  return {lacks(member), static_cast<int>(alone), static_cast<int>(out)};
}

std::string Disconnected::why(ReplicaId member) const {
  std::tuple<int, bool> most{};
  std::string words;
  for (const auto& [edge, about] : accusations_) {
    const bool of_it = edge.to == member;
    if (!about.of_connection() || edge.from == edge.to || (!of_it && edge.from != member)) continue;
    if (!all_.at(member).contains(of_it ? edge.from : edge.to)) continue;
    const std::tuple tells(explains(about.lost, about.found, true), of_it);
    if (tells <= most) continue;
    most = tells;
    if (about.lost)
      words = of_it ? fmt::format("replica {} lost it: {}", edge.from, about.what)
                    : fmt::format("it lost replica {}: {}", edge.to, about.what);
    else
      words = of_it ? fmt::format("replica {} waits for a connection with it", edge.from)
                    : fmt::format("it waits for a connection with replica {}", edge.to);
  }
  RankSet others;
  for (auto other : all_.at(member)) others.insert(other.value);
  if (others.size() == 1) return words;
  return fmt::format("replicas {} have no connection with it: {}", shortened(others.text(), 80), words);
}

}  // namespace rejoin::membership
