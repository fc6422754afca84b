// The daemon's side of a trainer's shared memory: mapped, checked, and read without trust. Pins hold parts at one
// version. Used by one thread.
#pragma once

#include <optional>

#include "base/fd.h"
#include "device/access.h"
#include "shm/page.h"

namespace rejoin::shm {

class Owner;

class View {
 public:
  // Takes the segments over. `refused` or `corrupt` where sizes, seals or layout are not as the manifest says. State
  // and aside are of the device.
  static Result<View> make(Manifest manifest, Fd state, Fd page, Fd aside, Fd doorbell,
                           std::shared_ptr<device::Device> device = device::make_host());
  // Of a trainer in this process: the simulator's, a bench's.
  static Result<View> of(const Owner& owner);

  const Manifest& manifest() const { return manifest_; }
  // Of the device: on a GPU, not to be touched by the host but through the functions below.
  std::span<std::byte> state() const { return state_.bytes; }
  std::span<std::byte> aside() const { return aside_.bytes; }
  device::MemoryKind kind() const { return device_->kind(); }
  // Bytes of the state or aside, to and from the host's memory, and their digest. Where the device fails, they are
  // nothing to rely on, and failure() says so from then on.
  void read(BytesView from, std::byte* to);
  void write(std::byte* to, BytesView from);
  std::uint64_t digest(BytesView of);
  std::uint64_t digest(const Part& part);  // as it is in the state
  std::uint64_t digest(std::span<const BytesView> columns);
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
  // Ends a hold if the bytes in the state were the held version's all the time until now; otherwise it goes on, and the
  // bytes are (or will be) aside.
  bool release_if_untouched(const Held& held);
  // Ends a hold. True where the bytes in the state were the held version's all the time until now.
  bool release(const Held& held);

 private:
  explicit View(Manifest manifest) : manifest_(std::move(manifest)) {}
  Page& page() const { return *reinterpret_cast<Page*>(page_.bytes.data()); }
  std::atomic<std::uint64_t>* words() const { return page().slice_words(); }

  void check(const Result<>& done) {
    if (!done && !failure_) failure_ = done.error();
  }
  std::uint64_t told(const Result<std::uint64_t>& digest) {
    if (!digest) check(tl::unexpected(digest.error()));
    return digest.value_or(0);
  }

  Manifest manifest_;
  std::shared_ptr<device::Device> device_;
  std::unique_ptr<device::Access> access_;
  device::Memory state_, aside_;
  device::Memory page_;  // of the host
  std::optional<Error> failure_;
  Fd doorbell_;
  std::size_t populated_ = 0;
  static_assert(kMaxPins <= 64);
  std::uint64_t taken_ = 0;        // bit per pin that is held by us
  std::uint64_t withdrawing_ = 0;  // given up while the trainer was copying it
};

// Digest of a held part at its version, from wherever its bytes are; nothing while they are being copied.
std::optional<std::uint64_t> digest_held(View& view, const View::Held& held);

}  // namespace rejoin::shm
