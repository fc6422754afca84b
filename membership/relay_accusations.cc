// What a relay passes on of accusations: of which ranks, and how often.
#include <set>

#include "membership/relay.h"

namespace rejoin::membership {

// That one lost another counts at once; of waiting ranks the first of each kind speaks for all of the replica, until it
// has the connection that it lacked. A wait that lasts too long is said once, which the coordinator keeps. What is said
// of one that does not yet, or of a replica by itself, is worth something there for a quarter of a silence: it is
// passed on again and again, of any rank that says it.
bool Relay::passes_on(const proto::Accusation& accusation, TimePoint now) {
  if (accusation.epoch() != plan_.first) return false;
  if (accusation.suspect() == accusation.replica()) {
    const auto [before, first] = of_themselves_.try_emplace({accusation.replica(), accusation.excused()}, now);
    if (!first && now - before->second < silence_ / 16) return false;
    before->second = now;
    return true;
  }
  const RankSet rank(accusation.rank());
  const bool connected =
      !accusation.lost() && !accusation.unconnected() && hear_others_than(accusation.replica(), rank);
  const auto [said, first] = accused_.try_emplace(
      {accusation.replica(), accusation.suspect(), accusation.only_waiting(), accusation.unconnected()});
  auto& [ranks, last] = said->second;
  // A rank says it each sixteenth of a silence, as a rule: every second time.
  const bool again = accusation.only_waiting() && now - last >= silence_ * 3 / 32;
  if (!first && !connected && !accusation.lost() && !again) return false;
  ranks.add(rank);
  last = now;
  return true;
}

// A rank that waits for what others do has all connections. Where its word that it lacked one has gone up, those who
// lack that one still, or wait for that member, are heard again, but who is known to lack it. False: these ranks have
// said nothing of the kind.
bool Relay::hear_others_than(std::uint32_t replica, const RankSet& connected) {
  std::set<std::uint32_t> lacked;
  const auto begin = accused_.lower_bound({replica, 0, false, false});
  auto end = begin;
  for (; end != accused_.end() && std::get<0>(end->first) == replica; ++end) {
    if (!std::get<3>(end->first) || end->second.ranks.common(connected).empty()) continue;
    end->second.ranks.remove(connected);
    lacked.insert(std::get<1>(end->first));
  }
  for (auto one = begin; one != end;) {
    const bool is_lacked = std::get<3>(one->first) && !one->second.ranks.empty();
    one = lacked.contains(std::get<1>(one->first)) && !is_lacked ? accused_.erase(one) : std::next(one);
  }
  return !lacked.empty();
}

}  // namespace rejoin::membership
