// The view is the daemon's side of a trainer's shared memory. It maps the memory, checks it, and reads it without
// trust. It pins parts of the state at one version. One thread uses it.
#pragma once

#include <optional>

#include "base/fd.h"
#include "device/access.h"
#include "local/offer.h"
#include "local/page.h"

namespace rejoin::local {

class Owner;

class View {
 public:
  // Takes over what a trainer offers (offer.h): the state and the shadow buffer are of the device. `refused` or
  // `corrupt` where sizes or seals are not as the offer says, `mismatch` for another version's page.
  static Result<View> make(std::vector<Fd> offer, std::shared_ptr<device::Device> device = device::make_host());
  // Makes the view of a trainer in this process, for the simulator and benchmarks.
  static Result<View> of(const Owner& owner);

  const Manifest& manifest() const { return manifest_; }
  ColumnLocation location(const Part& part, std::uint32_t column) const {
    return layout_.location(manifest_, part, column);
  }
  // Of the device: on a GPU, not to be touched by the host but through the functions below.
  const std::vector<std::span<std::byte>>& memory_ranges() const { return memory_ranges_; }  // of the layout
  std::span<std::byte> column(const Part& part, std::uint32_t column) const;                 // in the state
  std::span<std::byte> shadow() const { return shadow_.bytes; }
  // Returns how a NIC gets at a memory range, or the shadow buffer; nothing where the trainer has offered no dma-buf.
  std::optional<device::DmaBuf> dma_buf(std::size_t memory_range) const {
    return of(state_buffers_[memory_range], memory_ranges_[memory_range]);
  }
  std::optional<device::DmaBuf> shadow_dma_buf() const { return of(shadow_buffer_, shadow_.bytes); }
  device::MemoryKind kind() const { return device_->kind(); }
  // These copy bytes of the state or the shadow buffer to and from the host's memory, and take their digest. If the
  // device fails, the results are nothing to rely on, and failure() returns the error from then on.
  void read(BytesView from, std::byte* to);
  void write(std::byte* to, BytesView from);
  std::uint64_t digest(BytesView of);
  // The caller calls this after a NIC has written into the state, before it reads any of it or marks it arrived.
  void flush_remote_writes() { check(device_->flush_remote_writes()); }
  std::vector<std::uint64_t> digests(std::span<const Columns> parts);
  // Returns for how many parts digests are best asked at once: on the host one, so that what is sent next is in the
  // cache; on a GPU as many as there are, because a request costs as much as the digests of many.
  std::size_t digests_at_once() const { return kind() == device::MemoryKind::host ? 1 : kMaxPins; }
  const std::optional<Error>& failure() const { return failure_; }
  const Fd& doorbell() const { return doorbell_; }
  // Maps the next range of the state for real, so that the stream does not stop at every page; false when all is done.
  bool populate_some();
  // Silences the doorbell and asks the trainer to ring it at the next change of clock or pin. The caller looks at both
  // once more after it, before it sleeps. What can't be silenced is a failure().
  void wait_for_change();

  Clock clock() const { return Clock::unpack(page().clock.load()); }
  Phase phase() const { return static_cast<Phase>(page().phase.load(std::memory_order_relaxed)); }

  SliceStatus slice(std::uint32_t i) const { return SliceStatus::unpack(statuses()[i].load()); }
  // Makes one of the daemon's transitions. Returns false where the trainer's library has changed the slice meanwhile.
  bool set_slice(std::uint32_t i, SliceStatus expected, SliceStatus next);

  // Whether a daemon has verified all of the state. It stands in the page for the daemon after this one, since
  // verifying needs sources, and they may be gone by then.
  bool complete() const { return page().complete.load() != 0; }
  void set_complete() { page().complete.store(1); }

  // ---- pins
  struct Pinned {
    std::uint32_t pin = 0;
    std::uint32_t part = 0;
  };
  std::uint32_t free_pins() const;
  // Pins these parts at the version that the state has now, and returns that version. Returns nothing where too few
  // pins are free or an update got in between; the caller tries again after the next change.
  std::optional<std::pair<std::uint64_t, std::vector<Pinned>>> pin(const std::vector<std::uint32_t>& parts);
  // The place of a part's bytes at the pinned version: in the state, or packed in shadow(); while the trainer copies
  // them (`copying`) they can be read at neither.
  enum class Where { state, shadow, copying };
  Where where(const Pinned& pinned) const;
  std::uint64_t shadow_offset(const Pinned& pinned) const { return pinned.pin * kPartBytes; }
  // One column of it, in the state or the shadow buffer.
  BytesView column(const Pinned& pinned, std::uint32_t column, bool shadow) const;
  Columns columns(const Part& part) const;  // in the state
  // Ends a pin if the bytes in the state were those of the pinned version all the time until now, and returns true.
  // Otherwise the pin stays, and the trainer has copied the bytes to the shadow buffer or is copying them.
  bool release_if_untouched(const Pinned& pinned);
  // Ends a pin. Returns true where the bytes in the state were those of the pinned version all the time until now.
  bool release(const Pinned& pinned);

 private:
  View(Manifest manifest, Layout layout) : manifest_(std::move(manifest)), layout_(std::move(layout)) {}
  Result<> import(Offer& offer);
  using DmaBuffer = std::optional<device::Device::Exported>;
  static std::optional<device::DmaBuf> of(const DmaBuffer& buffer, std::span<std::byte> memory) {
    if (!buffer) return std::nullopt;
    return device::DmaBuf{.fd = buffer->fd.get(), .offset = buffer->offset, .memory = memory};
  }
  Page& page() const { return *reinterpret_cast<Page*>(page_.bytes.data()); }
  std::atomic<std::uint64_t>* statuses() const { return page().slice_statuses(); }

  void check(const Result<>& done) {
    if (!done && !failure_) failure_ = done.error();
  }

  Manifest manifest_;
  Layout layout_;
  std::shared_ptr<device::Device> device_;
  std::unique_ptr<device::Access> access_;
  std::vector<device::Memory> state_;
  std::vector<std::span<std::byte>> memory_ranges_;
  device::Memory shadow_;
  std::vector<DmaBuffer> state_buffers_;
  DmaBuffer shadow_buffer_;
  device::Memory page_;  // of the host
  std::optional<Error> failure_;
  Fd doorbell_;
  std::size_t populated_ranges_ = 0, populated_ = 0;  // whole ones; bytes of the next
  static_assert(kMaxPins <= 64);
  std::uint64_t taken_ = 0;        // bit per pin that is taken by us
  std::uint64_t withdrawing_ = 0;  // given up while the trainer was copying it
};

// Takes the digests of pinned parts at their version, wherever their bytes are; none of a part that is being copied.
std::vector<std::optional<std::uint64_t>> pinned_digests(View& view, std::span<const View::Pinned> pinned);
// Takes the digests that are missing, and ends the pin of each part that has one. Returns true when all have one.
bool settle_pins(View& view, std::span<const View::Pinned> pinned, std::span<std::optional<std::uint64_t>> digests);

}  // namespace rejoin::local
