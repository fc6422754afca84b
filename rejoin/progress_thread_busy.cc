// What the trainer is busy with: see "Busy" in docs/design-notes.md. On the trainer's thread.
#include "base/bytes.h"
#include "base/fail.h"
#include "rejoin/progress_thread.h"

namespace rejoin {

Result<ProgressThread::Busy> ProgressThread::check_busy(std::chrono::milliseconds limit, std::string_view reason,
                                                        bool computes) {
  constexpr std::chrono::milliseconds longest = std::chrono::hours(24 * 7);
  constexpr std::size_t longest_reason = 200;
  if (reason.empty() || reason.size() > longest_reason)
    return rejoin::fail(ErrorCode::invalid_argument, "busy() for a reason of {} bytes; there must be 1 to {}",
                        reason.size(), longest_reason);
  std::string what = printable(reason, longest_reason);
  if (limit.count() < 1 || limit > longest)
    return rejoin::fail(
        ErrorCode::invalid_argument,
        "busy() with '{}' for up to {} ms; there must be 1 to {}: it is how long the others would wait for one that "
        "hangs",
        what, limit.count(), longest.count());
  return Busy{limit, std::move(what), computes};
}

Result<> ProgressThread::busy(const Busy& busy) {
  const TimePoint now = clock_.now();
  return occupy(
      Driver::Occupation{.reason = busy.reason, .since = now, .until = now + busy.limit, .computes = busy.computes});
}

Result<> ProgressThread::done() { return occupy(std::nullopt); }

Result<> ProgressThread::occupy(std::optional<Driver::Occupation> occupation) {
  if (auto why = elsewhere()) return tl::unexpected(std::move(*why));
  const std::lock_guard lock(mutex_);
  occupation_ = std::move(occupation);
  occupation_changed_ = true;
  occupied_at_ = clock_.now();
  if (auto why = ended()) return tl::unexpected(std::move(*why));
  signal_eventfd(wake_);
  return {};
}

}  // namespace rejoin
