// What all processes of the simulated cluster have in common. One can be stopped for a while (SIGSTOP, a suspended
// machine, a write to a slow disk) and go on: what comes meanwhile waits, and then it does what it was about to do.
#pragma once

#include <deque>
#include <functional>

#include "sim/random.h"
#include "transport/transport.h"

namespace rejoin::sim {

using Rails = std::vector<const transport::Engine*>;  // of the fabric

struct Process {
  Process(std::uint64_t number, std::uint32_t at, Random chance) : instance(number), machine(at), random(chance) {}
  virtual ~Process() = default;
  virtual void run() {}     // woken: there is something to poll
  virtual void tick() = 0;  // its timer, which is set again when this returns
  virtual void on_resumed() {}
  virtual Duration until_run() {  // since it was woken
    return random.between(std::chrono::microseconds(1), std::chrono::microseconds(20));
  }

  // Of the release before, in a job of two of them: it says and hears nothing of what came with this one.
  bool is_older(bool mixed) const { return mixed && instance % 8 == 0; }

  const std::uint64_t instance;
  const std::uint32_t machine;  // whose clock it reads
  Random random;                // its own
  Rails rails;                  // its network, over which nothing goes while it is stopped
  bool woken = false;           // at most one call is under way
  bool stopped = false, ended = false;
  TimePoint stopped_until{};
  // While stopped, and right after: what came, in order, and whether the timer has run out meanwhile, which its event
  // loop finds after so many of them.
  std::deque<std::function<void()>> queued;
  std::deque<std::function<void()>> unsent;  // what it was about to send
  std::uint64_t stops_after = 0;             // so many messages, for so long; 0: nobody has said so
  Duration stops_for{};
  bool tick_due = false;
  std::uint64_t tick_after = 0;
};

}  // namespace rejoin::sim
