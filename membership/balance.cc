#include "membership/balance.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "control.pb.h"

namespace rejoin::membership {

std::uint32_t Balance::share_of(ReplicaId replica) const {
  const auto found = shares.find(replica);
  return found == shares.end() ? kEqualShare : found->second;
}

void Balance::to(proto::Balance& balance) const {
  balance.set_at_least(at_least);
  balance.set_at_most(at_most);
  for (const auto& [replica, share] : shares) {
    auto& one = *balance.add_shares();
    one.set_replica(replica.value);
    one.set_share(share);
  }
}

// Whatever it says, it can be dealt by.
Balance Balance::from(const proto::Balance& balance) {
  Balance of;
  if (balance.at_most() == 0) return of;
  of.at_least = std::min(balance.at_least(), kEqualShare);
  of.at_most = std::clamp(balance.at_most(), kEqualShare, kMostOfShares);
  for (const auto& one : balance.shares())
    of.shares[ReplicaId(one.replica())] = std::clamp<std::uint32_t>(one.share(), 1, kMostOfShares);
  return of;
}

// In proportion; those that this gives too much get the most that they may have, or those that it gives too little the
// least, whichever is more of the whole; and again, among the others. Numbers stay below 2⁶³: there are at most 2³¹
// units, 1,024 contributors, and 16,000 to a share.
std::vector<std::uint64_t> deal(std::uint64_t units, const std::vector<ReplicaId>& contributors,
                                const Balance& balance) {
  const std::uint64_t count = contributors.size();
  std::vector<std::uint64_t> dealt(count);
  if (count == 0) return dealt;
  units = std::max(units, count);
  const std::uint64_t least = std::max<std::uint64_t>(1, units * balance.at_least / (count * kEqualShare)),
                      most = std::max((units + count - 1) / count, units * balance.at_most / (count * kEqualShare));
  std::uint64_t rest = units, shares = 0;
  std::vector<std::uint64_t> share;
  std::vector<std::size_t> open(count);
  std::iota(open.begin(), open.end(), 0);
  for (auto replica : contributors) shares += share.emplace_back(balance.share_of(replica));
  for (;;) {
    std::uint64_t above = 0, below = 0;
    for (auto i : open) {
      if (rest * share[i] > most * shares) above += rest * share[i] - most * shares;
      if (rest * share[i] < least * shares) below += least * shares - rest * share[i];
    }
    if (above == 0 && below == 0) break;
    const bool cut = above >= below;
    const std::uint64_t rest_now = rest, shares_now = shares;
    std::erase_if(open, [&](std::size_t i) {
      const bool out = cut ? rest_now * share[i] > most * shares_now : rest_now * share[i] < least * shares_now;
      if (!out) return false;
      dealt[i] = cut ? most : least;
      rest -= dealt[i];
      shares -= share[i];
      return true;
    });
  }
  std::uint64_t left = rest;
  for (auto i : open) left -= dealt[i] = rest * share[i] / shares;
  std::ranges::stable_sort(open, std::ranges::greater{}, [&](std::size_t i) { return rest * share[i] % shares; });
  for (std::size_t i = 0; i < left && i < open.size(); ++i) ++dealt[open[i]];
  return dealt;
}

std::optional<Balance> better(const BalanceRule& rule, std::uint64_t units, const std::vector<Speed>& speeds,
                              const Balance& now) {
  if (speeds.empty()) return std::nullopt;
  double all = 0;
  std::vector<ReplicaId> contributors;
  const auto time = [](const Speed& of) { return static_cast<double>(std::max<std::uint64_t>(1, of.time)); };
  for (const auto& one : speeds) {
    all += 1 / time(one);
    contributors.push_back(one.replica);
  }
  Balance then{.at_least = rule.at_least, .at_most = rule.at_most, .shares = {}};
  for (const auto& one : speeds) {
    const double share = static_cast<double>(speeds.size() * kEqualShare) / (time(one) * all);
    then.shares[one.replica] =
        static_cast<std::uint32_t>(std::clamp(std::round(share), 1.0, static_cast<double>(kMostOfShares)));
  }
  const auto longest = [&](const Balance& balance) {
    const auto dealt = deal(units, contributors, balance);
    double most = 0;
    for (std::size_t i = 0; i < dealt.size(); ++i)
      most = std::max(most, static_cast<double>(dealt[i]) * time(speeds[i]));
    return most;
  };
  const Balance equal{.at_least = kEqualShare, .at_most = kEqualShare, .shares = {}};
  if (longest(then) * (1000 + rule.gain) > longest(now.in_force() ? now : equal) * 1000) return std::nullopt;
  return then;
}

}  // namespace rejoin::membership
