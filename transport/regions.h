// What all backends keep alike: the regions registered with an engine, and keys and ids that can't be guessed.
#pragma once

#include <array>
#include <unordered_map>

#include "transport/transport.h"

namespace rejoin::transport {

// Numbers of the system's that nobody can predict, whatever others of them are known; given a seed, they follow from
// it.
class Unguessable {
 public:
  explicit Unguessable(std::optional<std::uint64_t> seed = {}) : seed_(seed) {}
  std::uint64_t next();

 private:
  std::optional<std::uint64_t> seed_;
  std::uint64_t counter_ = 0;
  std::array<std::uint64_t, 32> drawn_{};  // in one call
  std::size_t left_ = 0;
};

struct Region {
  RegionId id;
  std::span<std::byte> memory;
  std::uint64_t key = 0;
  Access access = Access::local;
  std::size_t busy = 0;  // transfers into or out of it that are under way; kept by the backend
};

class Regions {
 public:
  explicit Regions(Unguessable& keys) : keys_(keys) {}
  RegionId add(std::span<std::byte> memory, Access access) { return add(memory, access, keys_.next()); }
  RegionId add(std::span<std::byte> memory, Access access, std::uint64_t key);  // which no other has
  void revoke_key(RegionId id);                                                 // nothing new starts
  void remove(RegionId id);
  Region* find(RegionId id);
  const Region* find(RegionId id) const;
  Region* by_key(std::uint64_t key);
  RemoteRegion remote(RegionId id) const;
  // Whether a peer's operation may have what it names, or why it is refused; counted.
  enum class Refusal : std::uint64_t { none, bad_key, bad_range, no_remote_read, no_remote_write };
  Refusal check(std::uint64_t key, std::uint64_t offset, std::uint64_t length, Access needed);
  void count(Refusal refusal);
  std::uint64_t refused() const { return refused_; }
  // The local bytes of an operation of ours.
  Result<std::byte*> local(const LocalRange& range, std::uint64_t length);

 private:
  Unguessable& keys_;
  std::uint64_t made_ = 0, refused_ = 0;
  std::uint64_t wrong_ = 0;  // of the refused: with a key that is good
  std::unordered_map<std::uint64_t, Region> regions_;
  std::unordered_map<std::uint64_t, std::uint64_t> by_key_;
};

// The first thing that is wrong with an operation on a region of this length and access, which needs one right.
Regions::Refusal refusal_of(std::uint64_t offset, std::uint64_t length, Access needed, std::uint64_t region_length,
                            Access access);
// The outcome of an operation that the peer refused.
std::optional<Error> refusal_error(Regions::Refusal refusal);

}  // namespace rejoin::transport
