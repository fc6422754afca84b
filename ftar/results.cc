// Digests of what has been reduced: the same on all members of an epoch, unless a bit has flipped on its way.
#include <algorithm>

#include "base/digest.h"
#include "ftar/operation.h"

namespace rejoin::ftar {

namespace {

constexpr std::size_t kMostSegments = 1 << 15;  // of all buckets together: they go in one message

}  // namespace

Shape Communicator::shape_of(const Bucket& bucket) const {
  return {.bytes = bucket.bytes(),
          .element = size_of(bucket.spec.type),
          .contributors = contributors_,
          .members = static_cast<std::uint32_t>(ring_.size()),
          .chunk_bytes = tuned_chunk(bucket.bytes(), contributors_, options_.chunk_bytes),
          .both_ways = options_.both_ways};
}

// Once: the step is repeated with what arrives then. A high bit of an element, whichever its type: a low one may vanish
// in rounding, and would make no difference.
void Communicator::damage_if_due(Step step, std::span<std::byte> arrived) {
  if (step != options_.flip_bit_at || options_.flip_bit_at == Step{} || reducer_) return;
  options_.flip_bit_at = {};
  arrived[std::min(arrived.size() / 16 * 8 + 7, arrived.size() - 1)] ^= std::byte{0x40};
}

// As digests of them are combined.
std::vector<BytesView> Communicator::ranges_of(const Bucket& bucket) const {
  const BytesView all = bucket.spec.output;
  if (direct(bucket)) return {all};
  const Schedule schedule(shape_of(bucket));
  std::vector<BytesView> ranges;
  for (std::uint32_t chunk = 0; chunk < schedule.segments() * schedule.stride(); ++chunk)
    if (schedule.valid(chunk))
      ranges.push_back(all.subspan(schedule.chunk(chunk).offset, schedule.chunk(chunk).length));
  return ranges;
}

Result<std::uint64_t> Communicator::results_digest() {
  // What has no digest yet is on a device: one launch for all of it.
  std::vector<BytesView> ranges;
  std::vector<std::size_t> counts;
  for (const auto& bucket : buckets_) {
    counts.push_back(0);
    if (bucket.digest) continue;
    const auto its = ranges_of(bucket);
    counts.back() = its.size();
    ranges.insert(ranges.end(), its.begin(), its.end());
  }
  const auto digests = ranges.empty() ? Result<std::vector<std::uint64_t>>() : access_->digests(ranges);
  if (!digests) return tl::unexpected(digests.error());
  auto next = digests->begin();
  std::uint64_t all = 0;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    std::uint64_t its = buckets_[b].digest.value_or(0);
    for (std::size_t i = 0; i < counts[b]; ++i) its = combine_digests(its, *next++);
    all = combine_digests(all, its);
  }
  return all;
}

Result<std::vector<std::vector<Segment>>> Communicator::inspect_results() {
  const auto members = static_cast<std::uint32_t>(ring_.size()), n = contributors_, p = position_;
  const bool whole = buckets_.size() * n > kMostSegments;  // one segment for each bucket: the hop is not known
  std::vector<std::vector<Segment>> results;
  for (const auto& bucket : buckets_) {
    auto& segments = results.emplace_back();
    if (direct(bucket)) {  // what everybody contributed, as it came here
      for (std::uint32_t c = 0; c < n; ++c) {
        BytesView input = direct_input(bucket.index, bucket.step, c);
        if (c == p) input = reducer_ ? BytesView(bucket.own) : BytesView(bucket.spec.input);
        segments.push_back({digest(input), ring_[c].member.replica});
      }
      continue;
    }
    const Schedule schedule(shape_of(bucket));
    std::vector<BytesView> ranges;
    for (std::uint32_t s = 0; s < n; ++s) {
      const Range range = schedule.segment(s);
      const bool from_left = schedule.all_gather_receives(p, s, Schedule::Direction::right);
      const std::uint32_t from = p == s ? p : from_left ? (p + members - 1) % members : (p + 1) % members;
      ranges.push_back(BytesView(bucket.spec.output).subspan(range.offset, range.length));
      segments.push_back({0, ring_[from].member.replica});
    }
    if (whole) {
      ranges = ranges_of(bucket);
      segments.assign(1, {0, self_.replica});
    }
    const auto digests = access_->digests(ranges);
    if (!digests) return tl::unexpected(digests.error());
    for (std::size_t i = 0; i < digests->size(); ++i) {
      Segment& segment = segments[whole ? 0 : i];
      segment.digest = combine_digests(segment.digest, (*digests)[i]);
    }
  }
  return results;
}

}  // namespace rejoin::ftar
