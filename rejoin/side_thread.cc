#include "rejoin/side_thread.h"

#include <pthread.h>

#include "base/start_thread.h"

namespace rejoin {

Result<> SideThread::start() {
  return start_thread(thread_, [this] { loop(); });
}

SideThread::~SideThread() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void SideThread::run(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
  }
  changed_.notify_all();
}

void SideThread::loop() {
  (void)::pthread_setname_np(::pthread_self(), "rejoin-audit");
  for (;;) {
    std::function<void()> next;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || !work_.empty(); });
      if (stop_) return;
      next = std::move(work_.front());
      work_.pop_front();
    }
    next();
    signal_eventfd(ended_);
  }
}

}  // namespace rejoin
