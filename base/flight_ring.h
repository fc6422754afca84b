// The memory of a flight recorder: the last events of a process, in rings that it writes to and somebody else reads,
// perhaps when the process is dead. See "Flight recorder" in docs/design-notes.md.
//
// Any thread writes, without a lock, an allocation or a system call but the clock's. An event takes one slot of 64
// bytes, and one more for each 48 bytes of what it says in words: six at most, or where it names an epoch's members,
// who may be a thousand, as many as the slot can count. A writer that stands still for so long that the others have
// gone once around may leave a slot that is half its own: every slot has a checksum, and readers drop it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/event_kinds.h"

namespace rejoin::flight {

using events::Kind;
using events::kRings;
using events::Numbers;

constexpr std::array<char, 8> kMagic{'R', 'J', 'F', 'L', 'I', 'G', 'H', 'T'};
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kHeaderBytes = 4096, kSlotBytes = 64, kSlotWords = kSlotBytes / 8;
constexpr std::size_t kTextBytes = 48, kMostText = 6 * kTextBytes, kMostMembersText = 255 * kTextBytes;

// The beginning of a recording. Numbers are of the machine that wrote it.
struct Header {
  std::array<char, 8> magic;
  std::uint32_t version, header_bytes;
  std::uint32_t slots[kRings];  // of each, in order; powers of two. The rings follow the header, one after the other
  std::uint32_t pid;
  std::int64_t opened_ns, opened_wall_ns;      // the same moment by CLOCK_MONOTONIC, and since 1970
  std::uint64_t clock;                         // whose CLOCK_MONOTONIC: the same on all processes that share it
  std::uint64_t job;                           // its id; 0: not heard yet
  char who[64], host[64];                      // text, ended by a zero
  alignas(64) std::uint64_t heads[kRings][8];  // [0]: slots that were ever written; the rest keeps them apart
};
static_assert(sizeof(Header) <= kHeaderBytes);

struct Sizes {
  std::uint32_t slots[kRings];
  constexpr std::size_t bytes() const {
    std::size_t all = kHeaderBytes;
    for (auto each : slots) all += each * kSlotBytes;
    return all;
  }
};
// Steps, signs of life, and what else happens. 50 events a second are kept for eleven minutes.
constexpr Sizes kSizes{{32768, 4096, 8192}};

// One slot's words: [0] its number from 1, [1] the time, [2] kind, slots of text, checksum; or text in all but [0],
// [2].
using Slot = std::array<std::uint64_t, kSlotWords>;
std::uint32_t checksum(const Slot& slot);

class Rings {
 public:
  // `memory`: sizes.bytes() of zeroes, aligned to 64 bytes, which outlives this. `header`: what describes the process.
  Rings(std::span<std::byte> memory, const Sizes& sizes, const Header& header);
  void put(Kind kind, std::int64_t at_ns, const Numbers& numbers, std::string_view text);
  void set_job(std::uint64_t job);

 private:
  using Word = std::atomic_ref<std::uint64_t>;
  void store(std::size_t ring, std::uint64_t index, Slot slot) const;
  Header* header_;
  std::array<std::uint64_t*, kRings> rings_{};
  std::array<std::uint64_t, kRings> masks_{};
};

}  // namespace rejoin::flight
