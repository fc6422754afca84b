// Tells from outside for how long a thread has stood still, by a number that it counts up as it turns.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/seldom.h"

namespace rejoin::daemon {

class Standstill {
 public:
  // The caller looks every now and then: for how long the number has been the same, where that is more than five
  // silences; otherwise 0. Time in which the caller itself did not run does not count.
  Duration look(std::uint64_t turns, TimePoint now, Duration silence) {
    constexpr int silences = 5;
    const Duration paused = now - std::exchange(looked_at_, now);
    if (turns != std::exchange(turns_, turns)) moved_at_ = now;
    if (paused > silence) moved_at_ = std::min(moved_at_ + paused, now);
    return now - moved_at_ > silences * silence ? now - moved_at_ : Duration{};
  }
  bool may_tell(TimePoint now) { return told_.may_say(now).has_value(); }

 private:
  std::uint64_t turns_ = ~std::uint64_t{0};
  TimePoint moved_at_{}, looked_at_{};
  Seldom told_{std::chrono::minutes(1)};
};

// What to say of it (node_threads.cc), and what to do. Who serves a GPU's memory is in the trainer's process, whose
// number is 0 where it is not known.
std::string why_it_stands(const std::string& thread, Duration still);
std::string why_it_stands_for_a_gpu(pid_t trainer, Duration still);

}  // namespace rejoin::daemon
