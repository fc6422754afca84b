// What the trainer is busy with: see "Busy" in docs/design-notes.md. On the trainer's thread.
#include "rejoin/progress_thread.h"

namespace rejoin {

Result<> ProgressThread::busy(std::chrono::milliseconds limit, std::string reason) {
  const TimePoint now = clock_.now();
  const std::lock_guard lock(mutex_);
  occupation_ = Driver::Occupation{.reason = std::move(reason), .since = now, .until = now + limit};
  occupation_changed_ = true;
  if (auto why = ended()) return tl::unexpected(std::move(*why));
  signal_eventfd(wake_);
  return {};
}

Result<> ProgressThread::done() {
  const std::lock_guard lock(mutex_);
  occupation_.reset();
  occupation_changed_ = true;
  if (auto why = ended()) return tl::unexpected(std::move(*why));
  signal_eventfd(wake_);
  return {};
}

}  // namespace rejoin
