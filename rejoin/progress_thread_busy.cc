// What the trainer is busy with: see "Busy" in docs/design-notes.md. On the trainer's thread.
#include "rejoin/progress_thread.h"

namespace rejoin {

Result<> ProgressThread::busy(std::chrono::milliseconds limit, std::string reason) {
  const TimePoint now = clock_.now();
  return occupy(Driver::Occupation{.reason = std::move(reason), .since = now, .until = now + limit});
}

Result<> ProgressThread::done() { return occupy(std::nullopt); }

Result<> ProgressThread::occupy(std::optional<Driver::Occupation> occupation) {
  const std::lock_guard lock(mutex_);
  occupation_ = std::move(occupation);
  occupation_changed_ = true;
  if (auto why = ended()) return tl::unexpected(std::move(*why));
  signal_eventfd(wake_);
  return {};
}

}  // namespace rejoin
