#include "base/flight_ring.h"

#include <algorithm>
#include <cstring>

#include "base/fail.h"

namespace rejoin::flight {

namespace {

// Odd, one for each word, so that the words' products are added up side by side.
constexpr std::uint64_t kFactors[kSlotWords] = {0x9e3779b97f4a7c15, 0xc2b2ae3d27d4eb4f, 0x165667b19e3779f9,
                                                0x27d4eb2f165667c5, 0x85ebca77c2b2ae63, 0xff51afd7ed558ccd,
                                                0xc4ceb9fe1a85ec53, 0x2545f4914f6cdd1d};

constexpr std::uint64_t head_word(Kind kind, std::size_t text_slots) {
  return static_cast<std::uint64_t>(kind) | (text_slots << 16);
}

}  // namespace

std::uint32_t checksum(const Slot& slot) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < kSlotWords; ++i) sum += (i == 2 ? slot[i] & 0xffffffff : slot[i]) * kFactors[i];
  return static_cast<std::uint32_t>(sum >> 32) ^ static_cast<std::uint32_t>(sum);
}

Rings::Rings(std::span<std::byte> memory, const Sizes& sizes, const Header& header) {
  REJOIN_CHECK(memory.size() >= sizes.bytes(), "a flight recorder of {} bytes has {}", sizes.bytes(), memory.size());
  header_ = new (memory.data()) Header(header);
  auto* next = reinterpret_cast<std::uint64_t*>(memory.data() + kHeaderBytes);
  for (std::size_t i = 0; i < kRings; ++i) {
    REJOIN_CHECK(sizes.slots[i] > 0 && (sizes.slots[i] & (sizes.slots[i] - 1)) == 0, "no power of two");
    header_->slots[i] = sizes.slots[i];
    rings_[i] = next;
    masks_[i] = sizes.slots[i] - 1;
    next += std::size_t{sizes.slots[i]} * kSlotWords;
  }
  header_->version = kVersion;
  header_->header_bytes = kHeaderBytes;
  header_->magic = kMagic;
}

// The number comes last, so that of a writer that was killed here the slot's checksum does not fit.
void Rings::store(std::size_t ring, std::uint64_t index, Slot slot) const {
  slot[0] = index + 1;
  slot[2] |= std::uint64_t{checksum(slot)} << 32;
  std::uint64_t* const words = rings_[ring] + (index & masks_[ring]) * kSlotWords;
  for (std::size_t i = 1; i < kSlotWords; ++i) Word(words[i]).store(slot[i], std::memory_order_relaxed);
  Word(words[0]).store(slot[0], std::memory_order_release);
}

void Rings::put(Kind kind, std::int64_t at_ns, const Numbers& numbers, std::string_view text) {
  text = text.substr(0, events::names_members(kind) ? kMostMembersText : kMostText);
  const std::size_t text_slots = (text.size() + kTextBytes - 1) / kTextBytes;
  const auto ring = static_cast<std::size_t>(events::traits(kind).ring);
  std::uint64_t index = Word(header_->heads[ring][0]).fetch_add(1 + text_slots, std::memory_order_relaxed);
  store(ring, index,
        {0, static_cast<std::uint64_t>(at_ns), head_word(kind, text_slots),
         numbers.replica | (std::uint64_t{numbers.number} << 32), numbers.epoch, numbers.step, numbers.a, numbers.b});
  for (; !text.empty(); text.remove_prefix(std::min(text.size(), kTextBytes))) {
    std::uint64_t words[kTextBytes / 8] = {};
    std::memcpy(words, text.data(), std::min(text.size(), kTextBytes));
    store(ring, ++index,
          {0, words[0], head_word(Kind::text, std::min(text.size(), kTextBytes)), words[1], words[2], words[3],
           words[4], words[5]});
  }
}

void Rings::set_job(std::uint64_t job) { Word(header_->job).store(job, std::memory_order_relaxed); }

}  // namespace rejoin::flight
