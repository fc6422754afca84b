#include "transport/regions.h"

#include <bit>
#include <utility>

#include "base/entropy.h"
#include "base/fail.h"
#include "base/log.h"
#include "base/mix.h"
#include "base/refusals.h"

namespace rejoin::transport {

std::uint64_t Unguessable::next() {
  constexpr std::uint64_t apart = 0x9e3779b97f4a7c15;
  // Seeds that lie close together give numbers that have nothing in common.
  if (seed_) return mixed(mixed(*seed_ + apart) + ++counter_ * apart);
  if (left_ == 0) {
    fill_with_random_numbers(drawn_);
    left_ = drawn_.size();
  }
  return std::exchange(drawn_[--left_], 0);
}

RegionId Regions::add(std::span<std::byte> memory, Access access, std::uint64_t key) {
  const RegionId id(++made_);
  regions_[id.value] = {id, memory, key, access, 0};
  by_key_[key] = id.value;
  return id;
}

void Regions::revoke_key(RegionId id) {
  if (Region* region = find(id)) by_key_.erase(region->key);
}

void Regions::remove(RegionId id) {
  revoke_key(id);
  regions_.erase(id.value);
}

Region* Regions::find(RegionId id) {
  auto found = regions_.find(id.value);
  return found == regions_.end() ? nullptr : &found->second;
}

const Region* Regions::find(RegionId id) const { return const_cast<Regions*>(this)->find(id); }

Region* Regions::by_key(std::uint64_t key) {
  auto found = by_key_.find(key);
  return found == by_key_.end() ? nullptr : &regions_.at(found->second);
}

RemoteRegion Regions::remote(RegionId id) const {
  auto found = regions_.find(id.value);
  if (found == regions_.end()) return {};
  return {found->second.key, found->second.memory.size()};
}

Regions::Refusal refusal_of(std::uint64_t offset, std::uint64_t length, Access needed, std::uint64_t region_length,
                            Access access) {
  using Refusal = Regions::Refusal;
  if (!allows(access, needed))
    return needed == Access::remote_read ? Refusal::no_remote_read : Refusal::no_remote_write;
  return in_range(offset, length, region_length) ? Refusal::none : Refusal::bad_range;
}

Regions::Refusal Regions::check(std::uint64_t key, std::uint64_t offset, std::uint64_t length, Access needed) {
  const Region* region = by_key(key);
  const Refusal refusal =
      region == nullptr ? Refusal::bad_key : refusal_of(offset, length, needed, region->memory.size(), region->access);
  if (refusal != Refusal::none) count(refusal);
  return refusal;
}

// A void key is what a peer has that has not heard yet that memory was withdrawn; the others are mistakes, or attacks.
void Regions::count(Refusal refusal) {
  const auto error = refusal_error(refusal);
  if (!error) return;
  ++refused_;
  refusals::count(refusal == Refusal::bad_key ? refusals::Why::memory_key : refusals::Why::memory_access);
  if (refusal == Refusal::bad_key || !std::has_single_bit(++wrong_)) return;
  logger().warn("an operation of a peer's was refused here ({} so far): seen from there, {}", wrong_, error->message);
}

Result<std::byte*> Regions::local(const LocalRange& range, std::uint64_t length) {
  Region* region = find(range.region);
  if (region == nullptr) return fail(ErrorCode::not_found, "local region {} is not registered", range.region.value);
  if (!in_range(range.offset, length, region->memory.size()))
    return fail(ErrorCode::invalid_argument, "bytes {}+{} are outside the local region of {}", range.offset, length,
                region->memory.size());
  return region->memory.data() + range.offset;
}

std::optional<Error> refusal_error(Regions::Refusal refusal) {
  switch (refusal) {
    case Regions::Refusal::none: return std::nullopt;
    case Regions::Refusal::bad_key: return Error{ErrorCode::refused, "the peer has no region with this key (any more)"};
    case Regions::Refusal::bad_range: return Error{ErrorCode::refused, "the range is outside the peer's region"};
    case Regions::Refusal::no_remote_read:
      return Error{ErrorCode::refused, "the peer's region is registered without remote read"};
    case Regions::Refusal::no_remote_write:
      return Error{ErrorCode::refused, "the peer's region is registered without remote write"};
  }
  return Error{ErrorCode::corrupt, "the peer answered with an unknown refusal"};
}

}  // namespace rejoin::transport
