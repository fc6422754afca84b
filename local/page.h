// The page that a trainer shares with its node's daemon, beside the state itself. See "Copy-on-write" in
// docs/design-notes.md for why the orders of access below are enough.
//
// Who writes what: the trainer's library writes clock, phase, pins' steps to copying and copied, slices' steps to
// current and abandoned, and daemon_waits back to 0. The daemon writes pins' fields and their steps to pending and
// free, slices' steps to requested, to arrived and back to absent, daemon_waits to 1, and complete. Either side checks
// what it reads: a wrong index or range is an error, never an access.
#pragma once

#include <atomic>
#include <cstdint>

#include "local/manifest.h"

namespace rejoin::local {

constexpr std::uint64_t kPageMagic = 0x3031474150'4e4a52;
constexpr std::uint32_t kLayoutVersion = 7, kOldestLayout = 7;  // that trainers write; that daemons read from

// Version of the state, and whether an update is changing it now.
struct Clock {
  std::uint64_t version = 0;
  bool updating = false;  // towards version + 1
  std::uint64_t packed() const { return version << 1 | (updating ? 1 : 0); }
  static Clock unpack(std::uint64_t bits) { return {bits >> 1, (bits & 1) != 0}; }
  bool operator==(const Clock&) const = default;
};

enum class Phase : std::uint32_t { compute, reduce, update };

// A part that the daemon pins at one version: as long as its copy is pending, the trainer copies it to the shadow
// buffer before changing it.
enum class PinState : std::uint32_t { free, pending, copying, copied };
struct Pin {
  std::atomic<PinState> state;
  std::uint32_t part;  // index in the manifest; written before `pending`
};

// Catching up, by slice.
enum class SliceState : std::uint8_t {
  absent,
  requested,  // its gradients are kept from now on
  arrived,    // in place, at `version`
  current,    // brought up to date: `version` is the state's
  abandoned,  // kept gradients ran over their budget; to be asked for again
};
struct SliceStatus {
  SliceState state = SliceState::absent;
  std::uint64_t value = 0;         // arrived, current: the version; requested: the source's replica number + 1; else 0
  std::uint64_t version() const {  // 0: it has none yet
    return state == SliceState::arrived || state == SliceState::current ? value : 0;
  }
  static constexpr std::uint64_t kVersions = std::uint64_t{1} << 56;  // that there is room for
  static SliceStatus requested(std::uint32_t source) { return {SliceState::requested, source + 1ull}; }
  bool requested_from(std::uint32_t source) const { return state == SliceState::requested && value == source + 1ull; }
  std::uint64_t packed() const { return value << 8 | static_cast<std::uint8_t>(state); }
  static SliceStatus unpack(std::uint64_t bits) { return {static_cast<SliceState>(bits & 0xff), bits >> 8}; }
};

struct Page {
  std::uint64_t magic;
  std::uint32_t layout;
  std::uint32_t slices;                                 // entries that follow the struct
  alignas(64) std::atomic<std::uint64_t> clock;         // Clock::packed
  std::atomic<std::uint32_t> phase;                     // Phase; for pacing only
  std::uint64_t unused[3];                              // keeps the layout
  alignas(64) std::atomic<std::uint32_t> daemon_waits;  // ring the doorbell at the next change of clock or pin
  std::atomic<std::uint32_t> complete;  // 1: a daemon has had all of the state verified; its slices are kept current
  alignas(64) Pin pins[kMaxPins];
  // std::atomic<std::uint64_t> slice_statuses[slices] follow
  std::atomic<std::uint64_t>* slice_statuses() { return reinterpret_cast<std::atomic<std::uint64_t>*>(this + 1); }
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<PinState>::is_always_lock_free);

constexpr std::size_t page_bytes(std::uint32_t slices) {
  return round_up(sizeof(Page) + std::size_t{slices} * 8, 4096);
}
constexpr std::size_t shadow_bytes() { return kMaxPins * kPartBytes; }

}  // namespace rejoin::local
