// The trainer's side of the shared memory: it owns the segments, copies pinned parts aside before an update, and keeps
// the clock. Used by one thread at a time (the trainer's).
#pragma once

#include "base/fd.h"
#include "device/device.h"
#include "shm/offer.h"
#include "shm/page.h"

namespace rejoin::shm {

class Owner {
 public:
  // Of a tensor, in memory of the trainer's own: the weight and the moments.
  using Own = std::vector<std::span<std::byte>>;
  // Whether it is as large as the tensor's columns, and where they may lie.
  static Result<> check(const Tensor& tensor, const Own& own);

  // Allocates aside and the state in the device's memory, the page in the host's, all such that the daemon can share
  // them. What it allocates of the state is zero. `own`, by tensor: columns that are there already, in the device's
  // memory, and stay there; none: to be allocated. Errors: `exhausted`; `invalid_argument`, `unreachable` for memory
  // that can't be shared; of the device.
  static Result<Owner> make(Manifest manifest, std::shared_ptr<device::Device> device = device::make_host(),
                            const std::vector<Own>& own = {});

  const Manifest& manifest() const { return manifest_; }
  // Of the device: on a GPU, not to be touched by the host.
  std::span<std::byte> column(std::uint32_t tensor, std::uint32_t column) const;
  std::span<std::byte> column(const Part& part, std::uint32_t column) const;
  // All of it, with what lies between.
  std::vector<std::span<std::byte>> segments() const;
  // … and aside: all of the device's memory that a daemon works on.
  std::vector<std::span<std::byte>> shared_memory() const;
  const std::shared_ptr<device::Device>& device() const { return device_; }
  Page& page() const { return *reinterpret_cast<Page*>(page_.data()); }
  // What a daemon needs to see all this by (offer.h). Any thread. Errors: of the device.
  Result<std::vector<Fd>> offer() const;

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
  struct Segment {
    std::span<std::byte> memory;                  // from the first column in it to the last
    std::vector<device::Allocation> allocations;  // that hold it, neighbours
  };
  explicit Owner(Manifest manifest) : manifest_(std::move(manifest)) {}
  Result<> place(const std::vector<Own>& own);
  Result<SharedMemory> share(const Segment& segment) const;
  void ring();

  Manifest manifest_;
  Layout layout_;
  std::shared_ptr<device::Device> device_;
  device::Memory state_, aside_;  // as far as they are allocated here
  std::vector<Segment> segments_;
  Segment aside_segment_;
  std::unique_ptr<device::Stream> stream_;  // for what is copied aside
  Fd page_fd_, doorbell_;
  Mapping page_;
};

}  // namespace rejoin::shm
