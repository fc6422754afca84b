// What each rank of a replica reports of an exchange: digests of what it reduced and of an audited part of its state.
#pragma once

#include <cstdint>
#include <vector>

#include "control.pb.h"
#include "membership/rank_set.h"

namespace rejoin::membership {

struct RankDigests {
  std::uint64_t reduced = 0, state = 0;  // 0: it said nothing
  bool operator==(const RankDigests&) const = default;
};

class DigestTable {
 public:
  void put(std::uint32_t rank, RankDigests digests) {
    if (rank >= by_rank_.size()) by_rank_.resize(rank + 1);
    by_rank_[rank] = digests;
  }
  RankDigests of(std::uint32_t rank) const { return rank < by_rank_.size() ? by_rank_[rank] : RankDigests{}; }
  void clear() { by_rank_.clear(); }

  // From a message and into one, for its ranks in ascending order; ranks from `limit` on are left out.
  void take(const proto::Exchanged& exchanged, std::uint64_t limit);
  void tell(const RankSet& ranks, proto::Exchanged& exchanged) const;

 private:
  std::vector<RankDigests> by_rank_;
};

// What a registration says of the rank's last exchange, as the rank reported it.
proto::Exchanged exchanged_of(const proto::RankUp& up);

constexpr std::uint64_t kMostRanks = 1 << 16;  // of a replica

}  // namespace rejoin::membership
