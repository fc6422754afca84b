// A wish to end, uttered once by any thread or a signal's handler, and seen by whoever waits in a session.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "base/fd.h"
#include "base/no_cancel.h"

namespace rejoin {

class Interrupt {
 public:
  explicit Interrupt(Fd eventfd) : eventfd_(std::move(eventfd)) {}

  // Async-signal-safe: a store, and a write to an eventfd, which a child of fork() shares with its parent, and leaves
  // to it. For good.
  void raise() noexcept {
    raised_.store(true);
    if (::getpid() != process_) return;
    const NoCancel no_cancel;
    const int before = errno;
    const std::uint64_t one = 1;
    // It can't fail but where the counter is full, and then the reader knows already.
    [[maybe_unused]] const auto written = ::write(eventfd_.get(), &one, sizeof one);
    errno = before;
  }
  bool raised() const noexcept { return raised_.load(); }
  const Fd& eventfd() const { return eventfd_; }  // readable from then on

 private:
  static_assert(std::atomic<bool>::is_always_lock_free);
  const pid_t process_ = ::getpid();
  const Fd eventfd_;
  std::atomic<bool> raised_ = false;
};

}  // namespace rejoin
