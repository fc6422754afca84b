#include "ftar/results.h"

#include <algorithm>

#include "base/digest.h"
#include "ftar/operation.h"

namespace rejoin::ftar {

Shape Communicator::shape_of(const Bucket& bucket) const {
  return {.bytes = bucket.bytes(),
          .element = size_of(bucket.spec.type),
          .contributors = contributors_,
          .members = static_cast<std::uint32_t>(ring_.size()),
          .chunk_bytes = bucket.chunk_bytes,
          .both_ways = options_.both_ways};
}

std::size_t Communicator::chunk_bytes(const Bucket& bucket) const {
  const bool host = chunking_ == Chunking::now && !options_.device && !pulled(bucket);
  const auto tuned = host ? tuned_host_chunk : tuned_chunk;
  return tuned(bucket.bytes(), contributors_, options_.chunk_bytes);
}

// Once: the step is repeated with what arrives then. A high bit of an element, whichever its type: a low one may vanish
// in rounding, and would make no difference.
bool Communicator::damage_if_due(Step step, std::span<std::byte> arrived) {
  if (step != options_.flip_bit_at || options_.flip_bit_at == Step{} || reducer_) return false;
  options_.flip_bit_at = {};
  arrived[std::min(arrived.size() / 16 * 8 + 7, arrived.size() - 1)] ^= std::byte{0x40};
  return true;
}

// As digests of them are combined.
std::vector<BytesView> Communicator::ranges_of(const Bucket& bucket) const {
  const BytesView all = bucket.spec.output;
  if (bucket.small) return {all};
  const Schedule schedule(shape_of(bucket));
  std::vector<BytesView> ranges;
  for (std::uint32_t chunk = 0; chunk < schedule.segments() * schedule.stride(); ++chunk)
    if (schedule.valid(chunk))
      ranges.push_back(all.subspan(schedule.chunk(chunk).offset, schedule.chunk(chunk).length));
  return ranges;
}

Results Communicator::results() const {
  Results results;
  for (const auto& bucket : buckets_) {
    auto& its = results.buckets.emplace_back();
    if (bucket.digest) {
      its.digest = *bucket.digest;
      continue;
    }
    const auto ranges = ranges_of(bucket);  // on a device
    its.ranges = ranges.size();
    results.ranges.insert(results.ranges.end(), ranges.begin(), ranges.end());
  }
  return results;
}

Result<std::uint64_t> Results::digest(device::Access& access) const {
  const auto digests = ranges.empty() ? Result<std::vector<std::uint64_t>>() : access.digests(ranges);
  if (!digests) return tl::unexpected(digests.error());
  auto next = digests->begin();
  std::uint64_t all = 0;
  for (const auto& bucket : buckets) {
    std::uint64_t its = bucket.digest;
    for (std::size_t i = 0; i < bucket.ranges; ++i) its = combine_digests(its, *next++);
    all = combine_digests(all, its);
  }
  return all;
}

Origins Communicator::origins() const {
  const auto members = static_cast<std::uint32_t>(ring_.size()), n = contributors_, p = position_;
  std::size_t all = 0;
  for (const auto& bucket : buckets_) all += doubled(bucket) ? doubling().sums() : n;
  const bool whole = all > kMostSegments;  // one segment for each bucket: the hop is not known
  Origins origins;
  const auto add = [&](std::size_t segment, BytesView range) {
    origins.ranges.push_back(range);
    origins.of.push_back({origins.buckets.size() - 1, segment});
  };
  for (const auto& bucket : buckets_) {
    auto& segments = origins.buckets.emplace_back();
    if (whole) {
      segments.assign(1, {0, self_.replica});
      for (const auto range : ranges_of(bucket)) add(0, range);
      continue;
    }
    if (direct(bucket)) {  // what everybody contributed, as it came here
      for (std::uint32_t c = 0; c < n; ++c) {
        const BytesView input = c == p ? bucket.contribution() : received(bucket, c);
        segments.push_back({rejoin::digest(input), ring_[c].member.replica});
      }
      continue;
    }
    if (doubled(bucket)) {  // sums as they came and went; those that did not pass here count as this member's
      const Doubling doubling = this->doubling();
      segments.assign(doubling.sums(), {0, self_.replica});
      const std::uint32_t result = doubling.number(doubling.result(), p);
      for (std::uint32_t place = 0; place <= doubling.result(); ++place) {
        if (place >= 1 && place <= doubling.rounds() && doubling.in_core())
          segments[doubling.number(place, p)].digest = bucket.offered[place];
        const auto from = doubling.sender(place);
        if (!from) continue;
        auto& segment = segments[doubling.number(place, *from)];
        segment.from = ring_[*from].member.replica;
        if (place != doubling.result()) segment.digest = rejoin::digest(received(bucket, place));
      }
      if (p < n && !doubling.in_core()) segments[p].digest = rejoin::digest(bucket.contribution());
      add(result, bucket.spec.output);
      continue;
    }
    const Schedule schedule(shape_of(bucket));
    for (std::uint32_t s = 0; s < n; ++s) {
      const Range range = schedule.segment(s);
      const bool from_left = schedule.all_gather_receives(p, s, Schedule::Direction::right);
      const std::uint32_t from = p == s || bucket.pulled ? s
                                 : from_left             ? (p + members - 1) % members
                                                         : (p + 1) % members;
      segments.push_back({0, ring_[from].member.replica});
      add(s, BytesView(bucket.spec.output).subspan(range.offset, range.length));
    }
  }
  return origins;
}

Result<std::vector<std::vector<Segment>>> Origins::digests(device::Access& access) const {
  const auto digests = ranges.empty() ? Result<std::vector<std::uint64_t>>() : access.digests(ranges);
  if (!digests) return tl::unexpected(digests.error());
  auto with = buckets;
  for (std::size_t i = 0; i < digests->size(); ++i) {
    Segment& segment = with[of[i].bucket][of[i].segment];
    segment.digest = combine_digests(segment.digest, (*digests)[i]);
  }
  return with;
}

}  // namespace rejoin::ftar
