// Digests of what has been reduced: the same on all members of an epoch, unless a bit has flipped on its way. The
// communicator says, on its thread, what is to be digested; since a GPU may take long over it, whoever has the time
// then does that on any thread, while the outputs stay as they are.
#pragma once

#include <vector>

#include "base/ids.h"
#include "device/access.h"

namespace rejoin::ftar {

// What a bucket's result is made of, to find where members differ: each segment's digest, and who it came from.
struct Segment {
  std::uint64_t digest = 0;
  ReplicaId from;  // this member: added up or contributed here
};

// Of the results of all buckets' last all-reduces.
struct Results {
  struct Bucket {
    std::uint64_t digest = 0;  // of what is digested already
    std::size_t ranges = 0;    // the next so many are its
  };
  std::vector<Bucket> buckets;
  std::vector<BytesView> ranges;
  // Equal on all members of their epoch. Errors: of the device.
  Result<std::uint64_t> digest(device::Access& access) const;
};

// By bucket, what its last all-reduce is made of.
struct Origins {
  struct Range {
    std::size_t bucket = 0, segment = 0;  // whose digest it goes into
  };
  std::vector<std::vector<Segment>> buckets;  // with the digests of what is digested already
  std::vector<BytesView> ranges;
  std::vector<Range> of;  // each of them
  // Errors: of the device.
  Result<std::vector<std::vector<Segment>>> digests(device::Access& access) const;
};

}  // namespace rejoin::ftar
