// The owner is the trainer's side of the shared memory. It owns the memory ranges, copies pinned parts to the shadow
// buffer before an update, and sets the clock. The trainer's thread uses it.
#pragma once

#include "base/fd.h"
#include "device/device.h"
#include "local/offer.h"
#include "local/page.h"

namespace rejoin::local {

class Owner {
 public:
  // The weight and the moments of a tensor that the trainer has allocated itself.
  using Own = std::vector<std::span<std::byte>>;
  // Checks that the memory is as large as the tensor's columns, and that they may lie there.
  static Result<> check(const Tensor& tensor, const Own& own);

  // Allocates the shadow buffer and the state in the device's memory, the page in the host's, all such that the daemon
  // can share them. What it allocates of the state is zero. `own`, by tensor: columns that are there already, in the
  // device's memory, and stay there; none: to be allocated. Errors: `exhausted`; `invalid_argument`, `unreachable` for
  // memory that can't be shared; of the device.
  static Result<Owner> make(Manifest manifest, std::shared_ptr<device::Device> device = device::make_host(),
                            const std::vector<Own>& own = {});

  const Manifest& manifest() const { return manifest_; }
  // These return memory of the device: on a GPU the host must not touch it.
  std::span<std::byte> column(std::uint32_t tensor, std::uint32_t column) const;
  std::span<std::byte> column(const Part& part, std::uint32_t column) const;
  // Returns the memory of all columns, with what lies between them.
  std::vector<std::span<std::byte>> memory_ranges() const;
  // Returns these ranges and the shadow buffer: all of the device's memory that a daemon works on.
  std::vector<std::span<std::byte>> shared_memory() const;
  const std::shared_ptr<device::Device>& device() const { return device_; }
  Page& page() const { return *reinterpret_cast<Page*>(page_.data()); }
  // Makes the descriptors by which a daemon sees all this (offer.h). Any thread may call it. Errors: of the device.
  Result<std::vector<Fd>> offer() const;

  // Begins an update: from here to end_update() the trainer may change the state. This copies what the daemon has
  // pinned to the shadow buffer before it returns. Whatever was queued on the device to change the state before must be
  // done. Errors: of the device.
  Result<> begin_update();
  // Ends the update: the state is complete again, at `version`.
  void end_update(std::uint64_t version);
  // Sets the version at the start, before any daemon has seen the state.
  void set_version(std::uint64_t version);
  void set_phase(Phase phase) { page().phase.store(static_cast<std::uint32_t>(phase), std::memory_order_relaxed); }
  Clock clock() const { return Clock::unpack(page().clock.load()); }

 private:
  struct MemoryRange {
    std::span<std::byte> memory;                  // from the first column in it to the last
    std::vector<device::Allocation> allocations;  // that hold it, neighbours
  };
  explicit Owner(Manifest manifest) : manifest_(std::move(manifest)) {}
  Result<> location(const std::vector<Own>& own);
  Result<SharedMemory> share(const MemoryRange& memory_range) const;
  void ring();

  Manifest manifest_;
  Layout layout_;
  std::shared_ptr<device::Device> device_;
  device::Memory state_, shadow_;  // as far as they are allocated here
  std::vector<MemoryRange> memory_ranges_;
  MemoryRange shadow_range_;
  std::unique_ptr<device::Stream> stream_;  // for what is copied to the shadow buffer
  Fd page_fd_, doorbell_;
  Mapping page_;
};

}  // namespace rejoin::local
