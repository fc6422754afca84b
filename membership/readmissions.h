// For how long a replica that is put out soon after each admission has to wait for the next one: ever longer. What
// keeps it from going on, as a network that loses long packets, may be there for long, and each time costs all others
// what it takes to find it out. Whose process has ended is not meant: its supervisor starts it again, and has pauses of
// its own. Pure; nothing here outlives a coordinator.
#pragma once

#include <algorithm>
#include <map>
#include <optional>

#include "base/clock.h"
#include "base/deadlines.h"
#include "base/ids.h"

namespace rejoin::membership {

class Readmissions {
 public:
  static constexpr std::uint64_t kSoon = 16;  // steps, or kSoonPutOut: whichever is longer

  struct Held {
    int times = 0;  // in a row
    Duration pause{};
  };

  explicit Readmissions(Duration silence) : silence_(silence) {}

  void on_admitted(ReplicaId replica, Step step, TimePoint now) {
    auto& one = all_[replica];
    one.admitted = step;
    one.admitted_at = now;
  }

  // Returns how long it has to wait, where it has to.
  std::optional<Held> on_put_out(ReplicaId replica, Step step, TimePoint now) {
    auto& one = all_[replica];
    const bool soon = one.admitted && (step.value < one.admitted->value + kSoon ||
                                       now - one.admitted_at < deadlines::kSoonPutOut.of(silence_));
    one.admitted.reset();
    one.times = soon ? one.times + 1 : 0;
    if (one.times < 2) return std::nullopt;  // once may be chance
    const Duration longest = deadlines::kLongestReadmission.of(silence_);
    Duration pause = deadlines::kFirstReadmission.of(silence_);
    for (int i = 2; i < one.times && pause < longest; ++i) pause *= 2;
    pause = std::min(pause, longest);
    one.until = now + pause;
    return Held{one.times, pause};
  }

  // Until when it has to; nothing: not any more.
  std::optional<TimePoint> until(ReplicaId replica, TimePoint now) const {
    const auto found = all_.find(replica);
    if (found == all_.end() || found->second.until <= now) return std::nullopt;
    return found->second.until;
  }

  // The last of these times, of all replicas.
  TimePoint last() const {
    TimePoint last{};
    for (const auto& [replica, one] : all_) last = std::max(last, one.until);
    return last;
  }

 private:
  struct One {
    std::optional<Step> admitted;  // since it was put out last
    TimePoint admitted_at{}, until{};
    int times = 0;
  };

  Duration silence_;
  std::map<ReplicaId, One> all_;
};

}  // namespace rejoin::membership
