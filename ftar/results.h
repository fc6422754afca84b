// Digests of what has been reduced: the same on all members of an epoch, unless a bit has flipped on its way. The
// communicator says, on its thread, what is to be digested; since a GPU may take long over it, whoever has the time
// then does that on any thread, while the outputs stay as they are.
#pragma once

#include <vector>

#include "base/ids.h"
#include "device/access.h"

namespace rejoin::ftar {

// Of all buckets together: they go in one message. Where there were more, a bucket is one segment.
constexpr std::size_t kMostSegments = 1 << 14;

// One segment of a bucket's result, with its digest and whom it came from, to find where members differ.
struct Segment {
  std::uint64_t digest = 0;
  ReplicaId from;  // this member, where it was added up or contributed here
};

// The results of all buckets' last all-reduces, from which digest() makes one digest.
struct Results {
  struct Bucket {
    std::uint64_t digest = 0;  // the digest of what is digested already
    std::size_t ranges = 0;    // how many of `ranges` are this bucket's; they follow those of the buckets before
  };
  std::vector<Bucket> buckets;
  std::vector<BytesView> ranges;
  // Returns a digest that is equal on all members of the epoch. Errors: those of the device.
  Result<std::uint64_t> digest(device::Access& access) const;
};

// For each bucket, the segments that the result of its last all-reduce is made of.
struct Origins {
  struct Range {
    std::size_t bucket = 0, segment = 0;  // the segment whose digest it goes into
  };
  std::vector<std::vector<Segment>> buckets;  // with the digests of what is digested already
  std::vector<BytesView> ranges;
  std::vector<Range> of;  // one for each of `ranges`
  // Digests the rest. Errors: those of the device.
  Result<std::vector<std::vector<Segment>>> digests(device::Access& access) const;
};

}  // namespace rejoin::ftar
