// How a progress thread waits: spin a little, then let others run, then sleep until something can be polled. It learns
// from what comes of that: where spinning was in vain it spins less the next time, since whoever is waited for may need
// the core; where something came meanwhile, for at least twice as long as that took.
#pragma once

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <ctime>
#include <span>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "transport/transport.h"

#pragma GCC visibility push(default)
namespace rejoin::transport {

class Idle {
 public:
  struct Options {
    int spins = 2000;  // polls without result before yielding; small where processes share cores
    int yields = 200;  // yields before sleeping
    // It sleeps after so long whatever the counts: on a slow or crowded machine spinning would take the cores from
    // those who are waited for.
    Duration longest = std::chrono::microseconds(300);
  };
  Idle(Engine& engine, Options options) : engine_(engine), options_(options) {}
  explicit Idle(Engine& engine) : Idle(engine, Options{}) {}

  void reset() {  // something happened
    if (!slept_) pays_ = std::max(pays_, std::min(2 * idle_polls_, most()));
    idle_polls_ = 0;
    tired_ = slept_ = false;
  }

  // Call after a poll that brought nothing. Sleeps at most `limit`, and wakes when `others` (any may be -1) are
  // readable. `urgent`: an answer is expected soon, so spin; otherwise sleep at once.
  void wait(bool urgent, Duration limit, std::span<const int> others = {}) {
    if (++idle_polls_ == 1) {
      since_ = SteadyClock().now();
      tries_ = ++waits_ % kTries == 0;
    }
    if (idle_polls_ % 64 == 0) tired_ = tired_ || SteadyClock().now() - since_ > options_.longest;
    if (urgent && !tired_ && idle_polls_ <= (tries_ ? most() : pays_)) {
      if (idle_polls_ > options_.spins) ::sched_yield();
      return;
    }
    if (!engine_.arm()) return;
    if (urgent && !std::exchange(slept_, true) && !tries_) pays_ = std::max(pays_ * 3 / 4, std::min(pays_, kFew));
    waiting_.assign(1, {engine_.event_fd(), POLLIN, 0});
    for (int fd : others) waiting_.push_back({fd, POLLIN, 0});
    const auto ns = std::chrono::ceil<std::chrono::nanoseconds>(std::max(limit, Duration::zero())).count();
    const timespec longest{.tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000};
    ::ppoll(waiting_.data(), waiting_.size(), &longest, nullptr);
  }

 private:
  static constexpr int kFew = 32;         // polls, which cost less than to sleep
  static constexpr unsigned kTries = 16;  // every so manieth wait spins for as long as it may

  int most() const { return options_.spins + options_.yields; }  // polls and yields before it sleeps

  Engine& engine_;
  const Options options_;
  int pays_ = most();  // by what has come of them
  unsigned waits_ = 0;
  int idle_polls_ = 0;
  bool tries_ = false, tired_ = false, slept_ = false;
  TimePoint since_{};
  std::vector<pollfd> waiting_;
};

}  // namespace rejoin::transport

#pragma GCC visibility pop
