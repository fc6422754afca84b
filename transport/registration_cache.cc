#include "transport/registration_cache.h"

#include <algorithm>

#include "base/fail.h"

namespace rejoin::transport {

RegistrationCache::~RegistrationCache() {
  for (const auto& [region, entry] : entries_)
    if (entry.mapped) engine_.deregister(RegionId(region));
}

std::vector<std::uint64_t> RegistrationCache::overlapping(std::uintptr_t begin, std::uintptr_t end,
                                                          Access access) const {
  // No entry contains another, so their ends are in the order of their begins: those that reach past `begin` are the
  // last ones that start before `end`.
  std::vector<std::uint64_t> found;
  const auto all = by_begin_.find(access);
  if (all == by_begin_.end()) return found;
  for (auto it = all->second.lower_bound(end); it != all->second.begin();) {
    --it;
    if (entries_.at(it->second).end <= begin) break;
    found.push_back(it->second);
  }
  std::reverse(found.begin(), found.end());
  return found;
}

Result<RegistrationCache::Lease> RegistrationCache::acquire(std::span<std::byte> range, MemoryKind kind,
                                                            Access access) {
  if (range.empty()) return fail(ErrorCode::invalid_argument, "an empty range can't be registered");
  const auto address = reinterpret_cast<std::uintptr_t>(range.data());
  const std::uintptr_t first = address / options_.page * options_.page;
  std::uintptr_t begin = first, end = round_up(address + range.size(), options_.page);
  const auto overlaps = overlapping(begin, end, access);
  for (auto region : overlaps) {
    Entry& entry = entries_.at(region);
    if (entry.begin > begin || entry.end < end || entry.kind != kind) continue;
    ++counts_.hits;
    if (entry.leases++ == 0) idle_.erase(entry.idle);
    return Lease{RegionId(region), address - entry.begin};
  }
  // What overlaps and is idle is taken into the new registration. Contained ones in use stay theirs until released.
  ++counts_.misses;
  std::vector<std::uint64_t> swallowed;
  for (auto region : overlaps) {
    const Entry& entry = entries_.at(region);
    if (entry.kind != kind) continue;
    begin = std::min(begin, entry.begin);
    end = std::max(end, entry.end);
    swallowed.push_back(region);
  }
  for (auto region : swallowed) {
    Entry& entry = entries_.at(region);
    if (entry.leases == 0) {
      deregister(region);
      continue;
    }
    std::erase_if(listed(entry), [&](const auto& item) { return item.second == region; });  // not handed out any more
  }
  if (!make_room(end - begin))
    return fail(ErrorCode::exhausted, "registering {} more passes the limit of {}, and the {} registered are in use",
                human_bytes(end - begin), human_bytes(options_.max_bytes), human_bytes(counts_.bytes));
  auto region = engine_.register_region({reinterpret_cast<std::byte*>(begin), end - begin}, kind, access);
  if (!region) return tl::unexpected(region.error());
  entries_[region->value] = {.begin = begin, .end = end, .kind = kind, .access = access, .leases = 1};
  by_begin_[access].emplace(begin, region->value);
  counts_.bytes += end - begin;
  return Lease{*region, address - begin};
}

bool RegistrationCache::make_room(std::uint64_t bytes) {
  while (counts_.bytes + bytes > options_.max_bytes) {
    if (idle_.empty()) return false;
    ++counts_.evictions;
    deregister(idle_.front());
  }
  return true;
}

void RegistrationCache::release(const Lease& lease) {
  auto found = entries_.find(lease.region.value);
  REJOIN_CHECK(found != entries_.end() && found->second.leases > 0, "region {} is not leased", lease.region.value);
  Entry& entry = found->second;
  if (--entry.leases > 0) return;
  if (!entry.mapped) {
    entries_.erase(found);
    return;
  }
  entry.idle = idle_.insert(idle_.end(), lease.region.value);
  const auto [from, to] = listed(entry).equal_range(entry.begin);
  const bool current = std::any_of(from, to, [&](const auto& item) { return item.second == lease.region.value; });
  if (!current) deregister(lease.region.value);  // a larger one has taken its place
}

void RegistrationCache::deregister(std::uint64_t region) {
  Entry& entry = entries_.at(region);
  engine_.deregister(RegionId(region));
  counts_.bytes -= entry.end - entry.begin;
  std::erase_if(listed(entry), [&](const auto& item) { return item.second == region; });
  if (entry.leases > 0) {
    entry.mapped = false;
    return;
  }
  idle_.erase(entry.idle);
  entries_.erase(region);
}

void RegistrationCache::invalidate(std::span<std::byte> range) {
  const auto begin = reinterpret_cast<std::uintptr_t>(range.data()), end = begin + range.size();
  std::vector<std::uint64_t> gone;  // superseded ones in use are not in by_begin_: look at all
  for (const auto& [region, entry] : entries_)
    if (entry.mapped && entry.begin < end && begin < entry.end) gone.push_back(region);
  for (auto region : gone) deregister(region);
}

}  // namespace rejoin::transport
