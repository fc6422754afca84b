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
  std::size_t busy = 0;  // transfers into or out of it that are under way; kept by the backend
};

class Regions {
 public:
  explicit Regions(Unguessable& keys) : keys_(keys) {}
  RegionId add(std::span<std::byte> memory) { return add(memory, keys_.next()); }
  RegionId add(std::span<std::byte> memory, std::uint64_t key);  // which no other has
  void revoke_key(RegionId id);                                  // nothing new starts
  void remove(RegionId id);
  Region* find(RegionId id);
  Region* by_key(std::uint64_t key);
  RemoteRegion remote(RegionId id) const;
  // The region that a peer's operation names, or why it is refused.
  enum class Refusal : std::uint64_t { none, bad_key, bad_range };
  Refusal check(std::uint64_t key, std::uint64_t offset, std::uint64_t length);
  // The local bytes of an operation of ours.
  Result<std::byte*> local(const LocalRange& range, std::uint64_t length);

 private:
  Unguessable& keys_;
  std::uint64_t made_ = 0;
  std::unordered_map<std::uint64_t, Region> regions_;
  std::unordered_map<std::uint64_t, std::uint64_t> by_key_;
};

// The outcome of an operation that the peer refused.
std::optional<Error> refusal_error(Regions::Refusal refusal);

}  // namespace rejoin::transport
