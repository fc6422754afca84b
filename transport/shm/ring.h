// A byte ring with one writer and one reader in different processes. The reader trusts nothing in it: positions and
// lengths are checked before use, and a header is copied out before it is looked at.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>

#include "base/bytes.h"

namespace rejoin::transport::shm {

constexpr std::size_t kRingBytes = 512 * KiB;  // a power of two; several messages of the largest size
constexpr std::uint32_t kWrap = 0xffffffff;    // a record length: go on at the start

constexpr std::uint64_t kGone = ~std::uint64_t{0};  // of recalls: the writer has taken everything back

struct Ring {
  alignas(64) std::atomic<std::uint64_t> written;   // bytes ever written; the writer's
  alignas(64) std::atomic<std::uint64_t> recalls;   // how often the writer has taken back memory that it let be read
  alignas(64) std::atomic<std::uint64_t> read;      // bytes ever read; the reader's
  alignas(64) std::atomic<std::uint32_t> sleeping;  // the reader wants its doorbell rung
  alignas(64) std::byte data[kRingBytes];
};

struct Channel {  // the shared memory of one connection
  Ring to_server, to_client;
};

class RingWriter {
 public:
  explicit RingWriter(Ring* ring = nullptr) : ring_(ring) {}

  // Appends a record of two parts; false where there is no room now.
  bool append(BytesView head, BytesView body) {
    const std::size_t size = round_up(8 + head.size() + body.size(), 8);
    if (size > kRingBytes / 2) return false;
    const std::size_t at = written_ % kRingBytes;
    const std::size_t to_end = kRingBytes - at;
    const std::size_t needed = to_end < size ? to_end + size : size;
    if (written_ + needed - known_read_ > kRingBytes) {
      known_read_ = ring_->read.load(std::memory_order_acquire);
      if (written_ + needed - known_read_ > kRingBytes) return false;
    }
    std::byte* place = ring_->data + at;
    if (to_end < size) {
      std::memcpy(place, &kWrap, sizeof kWrap);
      place = ring_->data;
    }
    const auto length = static_cast<std::uint32_t>(head.size() + body.size());
    std::memcpy(place, &length, sizeof length);
    std::memcpy(place + 8, head.data(), head.size());
    if (!body.empty()) std::memcpy(place + 8 + head.size(), body.data(), body.size());
    written_ += needed;
    ring_->written.store(written_);  // sequentially consistent: see take_sleeper()
    return true;
  }
  // After appending: whether the reader sleeps and must be woken. At most one wake-up a sleep.
  bool take_sleeper() {
    // Writer: written, then sleeping. Reader: sleeping, then written. In one total order, so that one of them sees the
    // other.
    return ring_->sleeping.load() != 0 && ring_->sleeping.exchange(0) != 0;
  }

  // Before memory is used again that the peer may be reading. Both sides' operations on the number change it, if only
  // by nothing, and are ordered by that: the peer has read before the memory is used, or it sees the new number.
  void recall() { ring_->recalls.fetch_add(1); }
  void recall_all() {
    if (ring_ != nullptr) ring_->recalls.exchange(kGone);
  }
  std::uint64_t recalls() const { return ring_->recalls.load(); }

 private:
  Ring* ring_;
  std::uint64_t written_ = 0, known_read_ = 0;
};

class RingReader {
 public:
  explicit RingReader(Ring* ring = nullptr) : ring_(ring) {}

  bool empty() const { return ring_->written.load() == read_; }
  bool broken() const { return broken_; }

  // The next record, in place: valid until pop(). The writer can still scribble on it, so copy what is checked.
  std::optional<BytesView> front() {
    for (;;) {
      const std::uint64_t available = ring_->written.load(std::memory_order_acquire) - read_;
      if (available == 0) return std::nullopt;
      const std::size_t at = read_ % kRingBytes;
      std::uint32_t length = 0;
      if (available <= kRingBytes && available >= 8) std::memcpy(&length, ring_->data + at, sizeof length);
      if (available <= kRingBytes && available >= 8 && length == kWrap && kRingBytes - at <= available) {
        read_ += kRingBytes - at;
        continue;
      }
      size_ = round_up(8 + std::uint64_t{length}, 8);
      if (available > kRingBytes || available < 8 || size_ > available || size_ > kRingBytes - at) {
        broken_ = true;
        return std::nullopt;
      }
      return BytesView(ring_->data + at + 8, length);
    }
  }
  void pop() {
    read_ += size_;
    ring_->read.store(read_, std::memory_order_release);
  }
  // After the writer's memory was read: see RingWriter::recall().
  std::uint64_t recalls() const { return ring_->recalls.fetch_add(0); }
  void announce_sleep(bool sleeping) { ring_->sleeping.store(sleeping ? 1 : 0); }

 private:
  Ring* ring_;
  std::uint64_t read_ = 0, size_ = 0;
  bool broken_ = false;
};

}  // namespace rejoin::transport::shm
