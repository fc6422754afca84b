// What a communicator keeps of a bucket whose chunks may travel coded.
#pragma once

#include <optional>

#include "ftar/coding.h"
#include "ftar/feedback.h"

namespace rejoin::ftar {

struct BucketCoding {
  DataType type = DataType::float32;
  Feedback feedback;
  std::size_t room = 0;  // offset of its part of the room for coded chunks, where each has a place of its own

  // In how many bits, where nobody has said it: as few as lose less than the bound, by what the last steps have lost.
  coding::Width width = coding::Width::eight;
  std::uint32_t plain_for = 0;  // so many all-reduces, since even 8 bits have lost more
  std::optional<double> error;  // root mean square of what is lost, in relation to the values: of the last steps
  std::shared_ptr<coding::Loss> loss = std::make_shared<coding::Loss>();  // of the all-reduce under way

  // A block of the bucket has its place wherever the ring's chunks begin. Segments are a little apart, so that each
  // begins at a multiple of 16 bytes, and all chunks that are multiples of 1 KiB do: GPUs copy and code such faster.
  static constexpr std::size_t kAlign = 16;
  std::size_t place(const Schedule& schedule, std::uint32_t chunk) const {
    const std::uint32_t segment = schedule.segment_of(chunk);
    const std::size_t begin = schedule.segment(segment).offset;
    return room + round_up(most(type, begin), kAlign) + segment * kAlign +
           most(type, schedule.chunk(chunk).offset - begin);
  }
  static std::size_t room_for(DataType type, std::size_t bytes) {
    return round_up(most(type, bytes) + kAlign * (kMaxMembers + 1), 64);
  }
  static std::size_t most(DataType type, std::size_t bytes) {
    return coding::coded_bytes(type, bytes, coding::Width::eight);
  }
  // After an all-reduce: what it has lost; and, where nobody has said the width, that of the next one.
  void measure();
  void adapt(double bound);
};

// Whether a link that takes so many bytes a second takes less time with coding, clearly. `rate`: of the coder.
bool is_slow(double link, double rate, DataType type, coding::Width width);

}  // namespace rejoin::ftar
