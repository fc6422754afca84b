// The trainer's side of the shared memory: it owns the segments, copies pinned parts aside before an update, and keeps
// the clock. Used by one thread at a time (the trainer's).
#pragma once

#include "base/fd.h"
#include "device/device.h"
#include "shm/page.h"

namespace rejoin::shm {

class Owner {
 public:
  // Allocates state and aside in the device's memory, the page in the host's, all such that the daemon can share them.
  // The state is zero. Errors: `exhausted`; of the device.
  static Result<Owner> make(Manifest manifest, std::shared_ptr<device::Device> device = device::make_host());

  const Manifest& manifest() const { return manifest_; }
  // Of the device: on a GPU, not to be touched by the host.
  std::span<std::byte> state() const { return state_.memory.bytes.first(manifest_.state_bytes()); }
  const std::shared_ptr<device::Device>& device() const { return device_; }
  Page& page() const { return *reinterpret_cast<Page*>(page_.data()); }
  const Fd& state_fd() const { return state_.handle; }
  const Fd& page_fd() const { return page_fd_; }
  const Fd& aside_fd() const { return aside_.handle; }
  const Fd& doorbell() const { return doorbell_; }  // rung for the daemon

  // From here to end_update() the state may change; what the daemon holds is copied aside before this returns. What was
  // queued on the device to change the state before must be done. Errors: of the device.
  Result<> begin_update();
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
  std::shared_ptr<device::Device> device_;
  device::Device::Shared state_, aside_;
  std::unique_ptr<device::Stream> stream_;  // for what is copied aside
  Fd page_fd_, doorbell_;
  Mapping page_;
};

}  // namespace rejoin::shm
