// Tells when a thread stands still that others wait for in ways that nothing else can end. Its own thread enters
// nothing that could stand still with it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "base/clock.h"
#include "base/result.h"

namespace rejoin {

class Watchdog {
 public:
  // `alarm` is called once, on the watchdog's thread, when turn() has not been called for `patience` during which
  // `matters` was true. Time in which this process did not run does not count.
  Watchdog(Duration patience, std::function<bool()> matters, std::function<void()> alarm);
  ~Watchdog();
  Result<> start();  // errors: `exhausted`, where the system gives no thread
  void turn() { turns_.fetch_add(1, std::memory_order_relaxed); }  // of the thread that is watched

 private:
  static constexpr int kLooks = 32;  // in that time
  void run();

  const Duration patience_;
  const std::function<bool()> matters_;
  const std::function<void()> alarm_;
  std::atomic<std::uint64_t> turns_{0};
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace rejoin
