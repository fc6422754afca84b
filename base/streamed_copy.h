// Copying what nobody will read soon: past the caches, so that a store need not first fetch the line that it fills.
#pragma once

#include <emmintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/bytes.h"

namespace rejoin {

// Static, so that what is compiled for wider vectors serves nobody else.

// As memcpy. Its bytes are ordered before what this thread stores only after a fence.
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
    const auto* source = reinterpret_cast<const __m128i*>(from + done);
    auto* target = reinterpret_cast<__m128i*>(to + done);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1), c = _mm_loadu_si128(source + 2),
                  d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(to + done, from + done, length - done);
}

// As memcpy. When it has returned, the bytes are ordered before what this thread stores next.
static inline void streamed_copy(std::byte* to, BytesView from) {
  streamed_copy_unordered(to, from);
  _mm_sfence();
}

}  // namespace rejoin
