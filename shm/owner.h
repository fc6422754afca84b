// The trainer's side of the shared memory: it owns the segments, copies pinned parts aside before an update, and keeps
// the clock. Used by one thread at a time (the trainer's).
#pragma once

#include "base/fd.h"
#include "shm/page.h"

namespace rejoin::shm {

class Owner {
 public:
  // Allocates state, page and aside as sealed memfds. Errors: `exhausted`.
  static Result<Owner> make(Manifest manifest);

  const Manifest& manifest() const { return manifest_; }
  std::span<std::byte> state() const { return state_.span().first(manifest_.state_bytes()); }
  Page& page() const { return *reinterpret_cast<Page*>(page_.data()); }
  const Fd& state_fd() const { return state_fd_; }
  const Fd& page_fd() const { return page_fd_; }
  const Fd& aside_fd() const { return aside_fd_; }
  const Fd& doorbell() const { return doorbell_; }  // rung for the daemon

  // From here to end_update() the state may change; what the daemon holds is copied aside before this returns.
  void begin_update();
  // The state is whole again, at `version`.
  void end_update(std::uint64_t version);
  // At the start: the state is at `version`, nothing has been promised to anyone.
  void set_version(std::uint64_t version);
  void set_phase(Phase phase) { page().phase.store(static_cast<std::uint32_t>(phase), std::memory_order_relaxed); }
  Clock clock() const { return Clock::unpack(page().clock.load()); }

 private:
  explicit Owner(Manifest manifest) : manifest_(std::move(manifest)) {}
  void ring();

  Manifest manifest_;
  Fd state_fd_, page_fd_, aside_fd_, doorbell_;
  Mapping state_, page_, aside_;
};

}  // namespace rejoin::shm
