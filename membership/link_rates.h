// How fast the links of a ring are, as those who write over them have measured it (base/coarse_rate.h), and which one
// is much slower than the others: a cable, a port or a NIC that is not what it should be. Nothing is decided by it.
//
// Ranks measure: each tells of its neighbours in the ring, and a replica's is that of the rank for which it is lowest.
#pragma once

#include <optional>
#include <vector>

#include "base/clock.h"
#include "base/coarse_rate.h"
#include "base/ids.h"
#include "control.pb.h"

namespace rejoin::membership {

// Of one process or replica, to others, by their incarnations.
class LinkRates {
 public:
  struct Link {
    std::uint64_t incarnation = 0;
    CoarseRate rate = 0;
    std::uint32_t rank = 0;  // whose link it is
    bool operator==(const Link&) const = default;
  };
  using Told = google::protobuf::RepeatedPtrField<proto::LinkRate>;
  LinkRates() = default;
  explicit LinkRates(const Told& told);  // without what makes no sense
  void to(Told* told) const;

  void keep_lower(const Link& one);
  void keep_lower(const LinkRates& other);  // of each peer
  std::optional<Link> of(std::uint64_t incarnation) const;
  bool operator==(const LinkRates&) const = default;

 private:
  std::vector<Link> links_;  // by incarnation
};

// From one member to the next, or to the one before.
struct RingLink {
  ReplicaId from, to;
  std::uint32_t rank = 0;
  CoarseRate rate = 0;
};

// Looks for the slowest link of a ring, where it is at most a quarter as fast as the median one, give or take what is
// lost by coarseness, and has been for so long; and is named until it is within one power of two of that.
class SlowLinkFinder {
 public:
  explicit SlowLinkFinder(Duration patience) : patience_(patience) {}
  struct Found {
    RingLink link;
    CoarseRate usual = 0;  // the median link
    Step since;
    TimePoint since_at{};
  };
  void look(const std::vector<RingLink>& links, Step step, TimePoint now);
  std::optional<Found> found() const { return named_ ? slowest_ : std::nullopt; }

 private:
  const Duration patience_;
  std::optional<Found> slowest_;
  bool named_ = false;
};

}  // namespace rejoin::membership
