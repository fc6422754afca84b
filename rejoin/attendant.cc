#include "rejoin/attendant.h"

#include "base/log.h"

namespace rejoin {

namespace {
constexpr auto kLook = std::chrono::milliseconds(200);  // at a kernel that nobody launches: it may have died
}  // namespace

Attendant::Attendant(std::shared_ptr<device::Reducer> reducer)
    : reducer_(std::move(reducer)), thread_([this] { run(); }) {}

Attendant::~Attendant() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  called_.notify_all();
  thread_.join();
}

void Attendant::call() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(call_, true)) return;
  }
  called_.notify_all();
}

void Attendant::run() {
  for (bool failed = false;;) {
    {
      std::unique_lock lock(mutex_);
      called_.wait_for(lock, kLook, [&] { return call_ || stop_; });
      if (stop_) return;
      call_ = false;
    }
    // The reducer gives the error to whoever gives it work.
    if (auto attended = reducer_->attend(); !attended && !std::exchange(failed, true))
      spdlog::error("the kernel that adds: {}", attended.error().message);
  }
}

}  // namespace rejoin
