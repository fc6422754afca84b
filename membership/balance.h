// Says how contributors share a step's samples by how fast each of them is: what a share is, how samples are dealt by
// shares, and when it pays to change them. It is pure: the coordinator writes each change down (Committed.balance), so
// that whoever reads its log deals alike.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/ids.h"

namespace rejoin::proto {
class Balance;
}

namespace rejoin::membership {

// What an operator has asked for. Fractions are thousandths of an equal share.
struct BalanceRule {
  bool on = false;
  std::uint32_t at_least = 500, at_most = 1500;
  std::uint64_t every = 16;  // the least number of steps from one change to the next
  // A change is worth it where the step's longest computation gets shorter by so many thousandths.
  std::uint32_t gain = 30;
};

constexpr std::uint32_t kEqualShare = 1000, kMostOfShares = 16 * kEqualShare;

struct Balance {
  std::uint32_t at_least = 0, at_most = 0;
  std::map<ReplicaId, std::uint32_t> shares;  // who is not among them has kEqualShare

  bool in_force() const { return at_most > 0; }  // otherwise all get the same, as if nobody were measured
  std::uint32_t share_of(ReplicaId replica) const;
  bool operator==(const Balance&) const = default;
  void to(proto::Balance& balance) const;
  static Balance from(const proto::Balance& balance);
};

// Deals `units` to the contributors by their shares: each gets no less and no more than the balance
// allows, rounded in its favour where an equal share is no whole number; at least one. What can't be dealt in
// proportion goes to those who lack the most, and of those to the first. The sum is `units`, or one for each where
// there are fewer.
std::vector<std::uint64_t> deal(std::uint64_t units, const std::vector<ReplicaId>& contributors,
                                const Balance& balance);

// A contributor with the time that it takes for a sample, in any unit that is the same for all.
struct Speed {
  ReplicaId replica;
  std::uint64_t time = 1;
};
// Returns the balance that suits contributors of these speeds, if it is worth a change from `now`.
std::optional<Balance> better(const BalanceRule& rule, std::uint64_t units, const std::vector<Speed>& speeds,
                              const Balance& now);

}  // namespace rejoin::membership
