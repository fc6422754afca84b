// Registers memory once and keeps it registered: pinning pages costs far more than the transfer of a small buffer.
// For callers that are handed buffers they don't own (a trainer's tensors, NCCL's): ask for a range, use it, give it
// back; the registration stays for the next time, until room is needed or the memory goes away.
//
// A range that is given back stays reachable for peers that know its key, until it is evicted or invalidated. Where
// that matters (memory that must be closed to peers), register with the engine itself.
//
// Thread: the engine's.
#pragma once

#include <list>
#include <map>
#include <unordered_map>
#include <vector>

#include "transport/transport.h"

namespace rejoin::transport {

class RegistrationCache {
 public:
  struct Options {
    std::uint64_t max_bytes = 16 * GiB;  // registered at any time, in use or not
    std::size_t page = 4 * KiB;          // ranges are widened to whole pages, so that neighbours share a registration
  };
  struct Lease {
    RegionId region;
    std::uint64_t offset = 0;  // of the range in the region
  };
  struct Counts {
    std::uint64_t hits = 0, misses = 0, evictions = 0, bytes = 0;
  };

  RegistrationCache(Engine& engine, Options options) : engine_(engine), options_(options) {}
  explicit RegistrationCache(Engine& engine) : RegistrationCache(engine, Options{}) {}
  ~RegistrationCache();

  // A region that covers the range, which is not empty, with just this access. Errors: `exhausted` where everything
  // registered is in use and this would pass the bound; the engine's own.
  Result<Lease> acquire(std::span<std::byte> range, MemoryKind kind, Access access);
  void release(const Lease& lease);
  // The memory is about to be unmapped or reused for something else: nothing registered here covers it any more when
  // this returns, and leases of it must not be used any longer (only released).
  void invalidate(std::span<std::byte> range);

  Counts counts() const { return counts_; }

 private:
  struct Entry {
    std::uintptr_t begin = 0, end = 0;
    MemoryKind kind{};
    Access access{};
    std::uint32_t leases = 0;
    bool mapped = true;                       // in by_begin_ (not invalidated)
    std::list<std::uint64_t>::iterator idle;  // in idle_, where there are no leases
  };
  void deregister(std::uint64_t region);
  bool make_room(std::uint64_t bytes);
  // The entries that overlap [begin, end), in order.
  std::vector<std::uint64_t> overlapping(std::uintptr_t begin, std::uintptr_t end, Access access) const;
  using ByBegin = std::multimap<std::uintptr_t, std::uint64_t>;
  ByBegin& listed(const Entry& entry) { return by_begin_[entry.access]; }

  Engine& engine_;
  const Options options_;
  Counts counts_;
  std::unordered_map<std::uint64_t, Entry> entries_;  // by region
  std::map<Access, ByBegin> by_begin_;                // of one access they may overlap, never contain each other
  std::list<std::uint64_t> idle_;                     // least recently used first
};

}  // namespace rejoin::transport
