#include "rejoin/kernel_launcher.h"

#include <pthread.h>

#include "base/log.h"
#include "base/start_thread.h"

namespace rejoin {

namespace {
constexpr auto kLook = std::chrono::milliseconds(200);  // at a kernel that may have died
}  // namespace

KernelLauncher::KernelLauncher(std::shared_ptr<device::Reducer> reducer) : reducer_(std::move(reducer)) {}

Result<> KernelLauncher::start() {
  reducer_->call_launcher_by([this] { call(); });
  return start_thread(thread_, [this] { run(); });
}

KernelLauncher::~KernelLauncher() {
  reducer_->call_launcher_by({});
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  called_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void KernelLauncher::call() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(call_, true)) return;
  }
  called_.notify_all();
}

void KernelLauncher::run() {
  (void)::pthread_setname_np(::pthread_self(), "rejoin-launch");  // for people, and for the driver of software
  for (bool failed = false;;) {
    {
      std::unique_lock lock(mutex_);
      called_.wait_for(lock, kLook, [&] { return call_ || stop_; });
      if (stop_) return;
      call_ = false;
    }
    // The reducer gives the error to whoever gives it work.
    if (auto launched = reducer_->launch_if_wanted(); !launched && !std::exchange(failed, true))
      logger().error("the kernel that adds: {}", launched.error().message);
  }
}

}  // namespace rejoin
