#include "rejoin/watchdog.h"

#include "base/start_thread.h"

namespace rejoin {

Watchdog::Watchdog(Duration patience, std::function<bool()> matters, std::function<void()> alarm)
    : patience_(patience), matters_(std::move(matters)), alarm_(std::move(alarm)) {}

Result<> Watchdog::start() {
  return start_thread(thread_, [this] { run(); });
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopped_.notify_all();
  if (thread_.joinable()) thread_.join();
}

// Looks are counted, not time: a process that was stopped has looked as little as the thread has turned.
void Watchdog::run() {
  std::unique_lock lock(mutex_);
  int in_vain = 0;
  for (std::uint64_t seen = turns_; !stop_;) {
    if (stopped_.wait_for(lock, patience_ / kLooks, [&] { return stop_; })) return;
    const std::uint64_t now = turns_;
    in_vain = now == seen && matters_() ? in_vain + 1 : 0;
    seen = now;
    if (in_vain < kLooks) continue;
    return alarm_();
  }
}

}  // namespace rejoin
