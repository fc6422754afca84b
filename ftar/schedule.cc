#include "ftar/schedule.h"

#include <algorithm>
#include <bit>

#include "base/bytes.h"
#include "base/fail.h"

namespace rejoin::ftar {

namespace {

constexpr std::size_t kAlign = 64;  // segments and chunks begin at cache lines of the buffer
// Four chunks a segment let a round begin before the one before it has ended.
constexpr std::size_t kChunks = 4, kLeastChunk = 64 * KiB, kLeastOfHost = 128 * KiB;

}  // namespace

std::size_t tuned_chunk(std::size_t bytes, std::uint32_t contributors, std::size_t limit) {
  const std::size_t segment = bytes / std::max(contributors, 1u);
  return std::min(round_up(std::max(segment / kChunks, kLeastChunk), KiB), limit);
}

std::size_t tuned_host_chunk(std::size_t bytes, std::uint32_t contributors, std::size_t limit) {
  const std::size_t segment = bytes / std::max(contributors, 1u);
  const std::size_t chunks = std::clamp<std::size_t>(segment / kLeastOfHost, 1, kChunks);
  const std::size_t each = round_up(std::max(segment / chunks, kLeastChunk), KiB);
  return std::min({each, kMostOfHost, limit});
}

Doubling::Doubling(std::uint32_t contributors, std::uint32_t members, std::uint32_t position)
    : contributors_(contributors),
      members_(members),
      position_(position),
      core_(std::bit_floor(contributors)),
      rounds_(static_cast<std::uint32_t>(std::countr_zero(core_))) {
  REJOIN_CHECK(contributors >= 1 && members >= contributors && position < members);
}

std::optional<std::uint32_t> Doubling::sender(std::uint64_t place) const {
  if (!in_core()) return place == result() ? std::optional(proxy()) : std::nullopt;
  if (place == 0) return position_ + core_ < contributors_ ? std::optional(position_ + core_) : std::nullopt;
  return place <= rounds_ ? std::optional(position_ ^ (1u << (place - 1))) : std::nullopt;
}

std::vector<std::uint32_t> Doubling::beyond() const {
  std::vector<std::uint32_t> all;
  for (std::uint32_t bit = core_; position_ + bit < members_; bit *= 2)
    if (bit > position_) all.push_back(position_ + bit);
  return all;
}

std::uint32_t Doubling::number(std::uint32_t place, std::uint32_t of) const {
  if (place == 0) return of;
  std::uint32_t before = contributors_;
  for (std::uint32_t round = 1; round < place; ++round) before += core_ >> (round - 1);
  return place == result() ? before : before + (of >> (place - 1));
}

Schedule::Schedule(const Shape& shape) : shape_(shape) {
  REJOIN_CHECK(shape.contributors >= 1 && shape.members >= shape.contributors && shape.chunk_bytes > 0);
  segment_bytes_ = round_up((shape.bytes + shape.contributors - 1) / shape.contributors, kAlign);
  chunk_bytes_ = round_up(shape.chunk_bytes, kAlign);
  stride_ = static_cast<std::uint32_t>(std::max<std::size_t>(1, (segment_bytes_ + chunk_bytes_ - 1) / chunk_bytes_));
}

Range Schedule::segment(std::uint32_t s) const {
  const std::size_t begin = std::min(shape_.bytes, s * segment_bytes_);
  return {begin, std::min(shape_.bytes, begin + segment_bytes_) - begin};
}

std::uint32_t Schedule::chunks_of(std::uint32_t s) const {
  return static_cast<std::uint32_t>((segment(s).length + chunk_bytes_ - 1) / chunk_bytes_);
}

bool Schedule::valid(std::uint32_t chunk) const {
  return chunk / stride_ < segments() && chunk % stride_ < chunks_of(chunk / stride_);
}

Range Schedule::chunk(std::uint32_t id) const {
  const Range whole = segment(segment_of(id));
  const std::size_t begin = (id % stride_) * chunk_bytes_;
  return {whole.offset + begin, std::min(chunk_bytes_, whole.length - begin)};
}

std::uint32_t Schedule::all_chunks() const {
  std::uint32_t count = 0;
  for (std::uint32_t s = 0; s < segments(); ++s) count += chunks_of(s);
  return count;
}

std::vector<std::uint32_t> Schedule::reduce_scatter_sends(std::uint32_t p) const {
  const std::uint32_t n = shape_.contributors;
  std::vector<std::uint32_t> sends;
  for (std::uint32_t round = 0; round + 1 < n; ++round) {
    const std::uint32_t s = (p + 2 * n - 1 - round) % n;
    for (std::uint32_t i = 0; i < chunks_of(s); ++i) sends.push_back(chunk_id(s, i));
  }
  return sends;
}

std::uint32_t Schedule::receive_round(std::uint32_t p, std::uint32_t s) const {
  const std::uint32_t n = shape_.contributors;
  return (p + 2 * n - 2 - s) % n;
}

std::uint32_t Schedule::hops(Direction direction) const {
  const std::uint32_t all = shape_.members - 1;
  const std::uint32_t left = shape_.both_ways ? all / 2 : 0;
  return direction == Direction::left ? left : all - left;
}

std::vector<std::uint32_t> Schedule::all_gather_sends(std::uint32_t p, Direction direction) const {
  const std::uint32_t members = shape_.members;
  std::vector<std::uint32_t> sends;
  for (std::uint32_t distance = 0; distance < hops(direction); ++distance) {
    const std::uint32_t s =
        direction == Direction::right ? (p + members - distance) % members : (p + distance) % members;
    if (s >= segments()) continue;  // nothing starts at a member that catches up
    for (std::uint32_t i = 0; i < chunks_of(s); ++i) sends.push_back(chunk_id(s, i));
  }
  return sends;
}

bool Schedule::all_gather_receives(std::uint32_t p, std::uint32_t s, Direction direction) const {
  const std::uint32_t members = shape_.members;
  const std::uint32_t distance =
      direction == Direction::right ? (p + members - s) % members : (s + members - p) % members;
  return distance >= 1 && distance <= hops(direction);
}

}  // namespace rejoin::ftar
