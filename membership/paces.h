// How fast each contributor computes, by what the reports of the last steps say, and who is slower than the others.
// Pure; nothing here outlives a coordinator: the next one measures anew.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"

namespace rejoin::membership {

// The longest time that one of a replica's ranks says it has computed in a step; not known as soon as one says nothing.
class ComputeTime {
 public:
  void add(std::uint64_t us) {
    if (us == 0) known_ = false;
    us_ = us > us_ ? us : us_;
  }
  std::uint64_t us() const { return known_ ? us_ : 0; }  // 0: not known

 private:
  std::uint64_t us_ = 0;
  bool known_ = true;
};

class Paces {
 public:
  static constexpr std::size_t kWindow = 8;  // steps
  // A straggler takes so much longer for a sample than the median contributor, in thousandths; and is one until it
  // takes less than the second.
  static constexpr std::uint64_t kStraggles = 1250, kNoMore = 1125;
  // It takes so many µs longer for all its samples, too; and at least half as many for as long as it is one. What is
  // less may be the system's scheduler, and holds nobody up.
  static constexpr double kLeastUs = 1000;

  struct Measured {
    ReplicaId replica;
    Incarnation incarnation;
    std::uint64_t samples = 0, compute_us = 0;
  };
  struct Straggler {
    ReplicaId replica;
    std::uint64_t slower = 0;  // its time for a sample in relation to the median contributor's, in thousandths
    Step since;
    TimePoint since_at{};
  };

  // The contributors of a step that is committed, in which nobody came, went or was disturbed. Whoever is not among
  // them is forgotten. A step of which one says nothing says nothing of anybody; after four windows of such
  // steps nothing is known any more.
  void on_step(Step step, const std::vector<Measured>& contributors, TimePoint now);
  // Measures anew, since shares have changed; who straggles does so until that is known to be over.
  void begin_again() { windows_.clear(); }

  // Picoseconds for a sample: the median of the last steps; nothing before there are so many.
  std::optional<std::uint64_t> of(ReplicaId replica) const;
  const std::vector<Straggler>& stragglers() const { return stragglers_; }  // the slowest first

 private:
  struct Window {
    Incarnation incarnation;
    std::array<std::uint64_t, kWindow> times{};
    std::uint64_t steps = 0;
  };
  void find_stragglers(Step step, const std::vector<Measured>& contributors, TimePoint now);
  std::map<ReplicaId, Window> windows_;
  std::vector<Straggler> stragglers_;
  std::uint64_t unmeasured_ = 0;  // steps, the last ones
};

}  // namespace rejoin::membership
