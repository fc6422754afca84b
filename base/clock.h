// Time comes in as a parameter, so that the simulator can own it.
#pragma once

#include <chrono>

#pragma GCC visibility push(default)
namespace rejoin {

using Duration = std::chrono::nanoseconds;
// CLOCK_MONOTONIC: the same for all processes of a node, so that their traces line up.
using TimePoint = std::chrono::time_point<std::chrono::steady_clock, Duration>;

class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimePoint now() const = 0;
};

class SteadyClock final : public Clock {
 public:
  TimePoint now() const override { return std::chrono::steady_clock::now(); }
};

// Moved by hand (tests) or by the simulator.
class VirtualClock final : public Clock {
 public:
  TimePoint now() const override { return now_; }
  void advance(Duration by) { now_ += by; }
  void set(TimePoint to) { now_ = to; }

 private:
  TimePoint now_{};
};

inline double milliseconds(Duration d) { return std::chrono::duration<double, std::milli>(d).count(); }
inline double seconds(Duration d) { return std::chrono::duration<double>(d).count(); }

}  // namespace rejoin

#pragma GCC visibility pop
