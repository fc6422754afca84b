// The table keeps what each rank of a replica reports of a reduction: digests of what it reduced and of an audited part
// of its state.
#pragma once

#include <cstdint>
#include <vector>

#include "control.pb.h"
#include "membership/rank_set.h"

namespace rejoin::membership {

struct RankDigests {
  std::uint64_t reduced = 0, state = 0;  // 0: none was reported
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

  // These read the digests from a message and write them into one, for the message's ranks in ascending order. They
  // leave out ranks from `limit` on.
  void take(const proto::Reduced& reduced, std::uint64_t limit);
  void write_to(const RankSet& ranks, proto::Reduced& reduced) const;

 private:
  std::vector<RankDigests> by_rank_;
};

// What a registration says of the rank's last reduction, as the rank reported it.
proto::Reduced reduced_of(const proto::RankUp& up);

constexpr std::uint64_t kMostRanks = 1 << 16;  // of a replica

}  // namespace rejoin::membership
