// The daemon's side of a trainer's shared memory: mapped, checked, and read without trust. Pins hold parts at one
// version. Used by one thread.
#pragma once

#include <optional>

#include "base/fd.h"
#include "device/access.h"
#include "shm/offer.h"
#include "shm/page.h"

namespace rejoin::shm {

class Owner;

class View {
 public:
  // Takes over what a trainer offers (offer.h): state and aside are of the device. `refused` or `corrupt` where sizes
  // or seals are not as the offer says, `mismatch` for another version's page.
  static Result<View> make(std::vector<Fd> offer, std::shared_ptr<device::Device> device = device::make_host());
  // Of a trainer in this process: the simulator's, a bench's.
  static Result<View> of(const Owner& owner);

  const Manifest& manifest() const { return manifest_; }
  const Layout& layout() const { return layout_; }
  Place place(const Part& part, std::uint32_t column) const { return layout_.place(manifest_, part, column); }
  // Of the device: on a GPU, not to be touched by the host but through the functions below.
  const std::vector<std::span<std::byte>>& segments() const { return segments_; }  // of the layout
  std::span<std::byte> column(const Part& part, std::uint32_t column) const;       // in the state
  std::span<std::byte> aside() const { return aside_.bytes; }
  // How a NIC gets at a segment, or aside, where the trainer said so.
  std::optional<device::DmaBuf> dma_buf(std::size_t segment) const {
    return of(state_buffers_[segment], segments_[segment]);
  }
  std::optional<device::DmaBuf> aside_dma_buf() const { return of(aside_buffer_, aside_.bytes); }
  device::MemoryKind kind() const { return device_->kind(); }
  // Bytes of the state or aside, to and from the host's memory, and their digest. Where the device fails, they are
  // nothing to rely on, and failure() says so from then on.
  void read(BytesView from, std::byte* to);
  void write(std::byte* to, BytesView from);
  std::uint64_t digest(BytesView of);
  // After a NIC has written into the state, and before any of it is read or called arrived.
  void flush_remote_writes() { check(device_->flush_remote_writes()); }
  std::vector<std::uint64_t> digests(std::span<const Columns> parts);
  // How many parts' digests are best asked for at once: on the host one, so that what is then sent is in the cache; on
  // a GPU, where asking costs as much as the digest of many, as many as there are.
  std::size_t digests_at_once() const { return kind() == device::MemoryKind::host ? 1 : kMaxPins; }
  const std::optional<Error>& failure() const { return failure_; }
  const Fd& doorbell() const { return doorbell_; }
  // Maps the next piece of the state for real, so that the stream does not stop at every page; false when all is done.
  bool populate_some();
  // Asks to be rung at the next change of clock or pin; look again after it, before sleeping.
  void wait_for_change() { page().daemon_waits.store(1); }

  Clock clock() const { return Clock::unpack(page().clock.load()); }
  Phase phase() const { return static_cast<Phase>(page().phase.load(std::memory_order_relaxed)); }
  std::uint64_t heartbeat() const { return page().heartbeat.load(std::memory_order_relaxed); }
  std::uint64_t copied_aside() const { return page().copied_aside.load(std::memory_order_relaxed); }

  SliceWord slice(std::uint32_t i) const { return SliceWord::unpack(words()[i].load()); }
  // Daemon's transitions. False where the library has changed the slice meanwhile.
  bool set_slice(std::uint32_t i, SliceWord expected, SliceWord next);

  // For the daemon after this one: a proof needs sources, and they may be gone by then.
  bool whole() const { return page().whole.load() != 0; }
  void set_whole() { page().whole.store(1); }

  // ---- pins
  struct Held {
    std::uint32_t pin = 0;
    std::uint32_t part = 0;
  };
  std::uint32_t free_pins() const;
  // Holds these parts at one version, the state's as it is now. Nothing where too few pins are free or an update got in
  // between: try again after the next change.
  std::optional<std::pair<std::uint64_t, std::vector<Held>>> hold(const std::vector<std::uint32_t>& parts);
  // Where the part's bytes at the held version are: in the state, or packed at aside(). `copying`: neither yet.
  enum class Where { state, aside, copying };
  Where where(const Held& held) const;
  std::uint64_t aside_offset(const Held& held) const { return held.pin * kPartBytes; }
  // One column of it, in the state or aside.
  BytesView column(const Held& held, std::uint32_t column, bool aside) const;
  Columns columns(const Part& part) const;  // in the state
  // Ends a hold if the bytes in the state were the held version's all the time until now; otherwise it goes on, and the
  // bytes are (or will be) aside.
  bool release_if_untouched(const Held& held);
  // Ends a hold. True where the bytes in the state were the held version's all the time until now.
  bool release(const Held& held);

 private:
  View(Manifest manifest, Layout layout) : manifest_(std::move(manifest)), layout_(std::move(layout)) {}
  Result<> import(Offer& offer);
  using DmaBuffer = std::optional<device::Device::Exported>;
  static std::optional<device::DmaBuf> of(const DmaBuffer& buffer, std::span<std::byte> memory) {
    if (!buffer) return std::nullopt;
    return device::DmaBuf{.fd = buffer->fd.get(), .offset = buffer->offset, .memory = memory};
  }
  Page& page() const { return *reinterpret_cast<Page*>(page_.bytes.data()); }
  std::atomic<std::uint64_t>* words() const { return page().slice_words(); }

  void check(const Result<>& done) {
    if (!done && !failure_) failure_ = done.error();
  }

  Manifest manifest_;
  Layout layout_;
  std::shared_ptr<device::Device> device_;
  std::unique_ptr<device::Access> access_;
  std::vector<device::Memory> state_;
  std::vector<std::span<std::byte>> segments_;
  device::Memory aside_;
  std::vector<DmaBuffer> state_buffers_;
  DmaBuffer aside_buffer_;
  device::Memory page_;  // of the host
  std::optional<Error> failure_;
  Fd doorbell_;
  std::size_t populated_segments_ = 0, populated_ = 0;  // whole ones; bytes of the next
  static_assert(kMaxPins <= 64);
  std::uint64_t taken_ = 0;        // bit per pin that is held by us
  std::uint64_t withdrawing_ = 0;  // given up while the trainer was copying it
};

// Digests of held parts at their version, from wherever their bytes are; nothing while they are being copied.
std::vector<std::optional<std::uint64_t>> digests_held(View& view, std::span<const View::Held> held);
// Adds the digests that are missing, and ends the holds that have theirs. True when all have.
bool settle_held(View& view, std::span<const View::Held> held, std::span<std::optional<std::uint64_t>> digests);

}  // namespace rejoin::shm
