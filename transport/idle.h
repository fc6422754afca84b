// How a progress thread waits: spin a little, then let others run, then sleep until something can be polled. It spins
// no longer where others need its core.
#pragma once

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <ctime>
#include <span>
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

  void reset() { idle_polls_ = 0, given_away_ = 0, tired_ = false; }  // something happened

  // Call after a poll that brought nothing. Sleeps at most `limit`, and wakes when `others` (any may be -1) are
  // readable. `urgent`: an answer is expected soon, so spin; otherwise sleep at once.
  void wait(bool urgent, Duration limit, std::span<const int> others = {}) {
    if (++idle_polls_ == 1) since_ = SteadyClock().now();
    if (idle_polls_ % 64 == 0) tired_ = tired_ || SteadyClock().now() - since_ > options_.longest;
    if (urgent && !tired_ && idle_polls_ <= options_.spins + options_.yields) {
      if (idle_polls_ > options_.spins || crowded_ || idle_polls_ % kBetweenYields == 0) yield();
      return;
    }
    if (!engine_.arm()) return;
    waiting_.assign(1, {engine_.event_fd(), POLLIN, 0});
    for (int fd : others) waiting_.push_back({fd, POLLIN, 0});
    const auto ns = std::chrono::ceil<std::chrono::nanoseconds>(std::max(limit, Duration::zero())).count();
    const timespec longest{.tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000};
    ::ppoll(waiting_.data(), waiting_.size(), &longest, nullptr);
  }

 private:
  static constexpr int kBetweenYields = 50;  // spins
  static constexpr int kGivenAway = 8;  // yields after which others have needed the core for so long that it sleeps
  static constexpr Duration kAlone = std::chrono::microseconds(3);  // takes a yield for which nobody has waited

  // Where others wait for this core, and he who is waited for may be one of them, it is theirs.
  void yield() {
    const TimePoint before = SteadyClock().now();
    ::sched_yield();
    crowded_ = SteadyClock().now() - before > kAlone;
    if (crowded_ && ++given_away_ > kGivenAway) tired_ = true;
  }

  Engine& engine_;
  const Options options_;
  int idle_polls_ = 0;
  int given_away_ = 0;
  bool tired_ = false, crowded_ = false;
  TimePoint since_{};
  std::vector<pollfd> waiting_;
};

}  // namespace rejoin::transport

#pragma GCC visibility pop
