// Copying what nobody will read soon: past the caches, so that a store need not first fetch the line that it fills.
#pragma once

#if defined(__x86_64__)
#include <emmintrin.h>
#else
#include <atomic>
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/bytes.h"

namespace rejoin {

// Static, so that what is compiled for wider vectors serves nobody else.

using Lanes [[gnu::vector_size(16)]] = float;

static inline Lanes load_lanes(const std::byte* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

// `to` is a multiple of 16. Stores of another CPU's kind are ordinary ones.
static inline void store_streamed(std::byte* to, Lanes first, Lanes second) {
#if defined(__x86_64__)
  _mm_stream_ps(reinterpret_cast<float*>(to), first);
  _mm_stream_ps(reinterpret_cast<float*>(to) + 4, second);
#elif defined(__aarch64__)
  asm volatile("stnp %q1, %q2, [%0]" ::"r"(to), "w"(first), "w"(second) : "memory");
#else
  std::memcpy(to, &first, sizeof first);
  std::memcpy(to + sizeof first, &second, sizeof second);
#endif
}

// What this thread has stored so is ordered before what it stores next.
static inline void order_streamed() {
#if defined(__x86_64__)
  _mm_sfence();
#else
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

// As memcpy. Its bytes are ordered before what this thread stores only after order_streamed().
static inline void streamed_copy_unordered(std::byte* to, BytesView bytes) {
  constexpr std::size_t kLine = 64;
  const std::byte* from = bytes.data();
  const std::size_t length = bytes.size();
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  if (length < head + kLine) {
    std::memcpy(to, from, length);
    return;
  }
  std::memcpy(to, from, head);
  std::size_t done = head;
  for (; done + kLine <= length; done += kLine) {
    const std::byte* source = from + done;
    const Lanes a = load_lanes(source), b = load_lanes(source + 16), c = load_lanes(source + 32),
                d = load_lanes(source + 48);
    store_streamed(to + done, a, b);
    store_streamed(to + done + 32, c, d);
  }
  std::memcpy(to + done, from + done, length - done);
}

// As memcpy. When it has returned, the bytes are ordered before what this thread stores next.
static inline void streamed_copy(std::byte* to, BytesView from) {
  streamed_copy_unordered(to, from);
  order_streamed();
}

}  // namespace rejoin
