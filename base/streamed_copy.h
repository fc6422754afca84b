// Copying what nobody will read soon: past the caches, so that a store need not first fetch the line that it fills.
#pragma once

#include <emmintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace rejoin {

// As memcpy. When it has returned, the bytes are ordered before what this thread stores next.
inline void streamed_copy(std::byte* to, const std::byte* from, std::size_t length) {
  constexpr std::size_t kLine = 64;
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
  _mm_sfence();
  std::memcpy(to + done, from + done, length - done);
}

}  // namespace rejoin
