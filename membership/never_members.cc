#include "membership/never_members.h"

namespace rejoin::membership {

void NeverMembers::take(const proto::LogRecord::Incarnated& given_out) {
  if (!given_out.has_replica()) return add(given_out.incarnation(), std::nullopt);
  Place place{.replica = given_out.replica(), .rank = {}};
  if (given_out.has_rank()) place.rank = given_out.rank();
  const auto same_place = [&](const auto& entry) {
    return place.rank ? entry->first == place : entry->first.replica == place.replica;
  };
  for (auto entry = last_.lower_bound(place); entry != last_.end() && same_place(entry); entry = last_.erase(entry))
    all_.erase(entry->second);
  add(given_out.incarnation(), place);
}

void NeverMembers::add(std::uint64_t incarnation, std::optional<Place> place) {
  erase(incarnation);  // a log that was put back has it twice
  all_[incarnation] = place;
  if (place) last_[*place] = incarnation;
}

void NeverMembers::erase(std::uint64_t incarnation) {
  const auto gone = all_.extract(incarnation);
  if (!gone.empty() && gone.mapped()) last_.erase(*gone.mapped());
}

void NeverMembers::erase_up_to(std::uint64_t incarnation) {
  while (!all_.empty() && all_.begin()->first <= incarnation) erase(all_.begin()->first);
}

bool NeverMembers::may_be_of(std::uint64_t incarnation, std::uint32_t replica, std::uint32_t rank) const {
  const auto found = all_.find(incarnation);
  if (found == all_.end()) return false;
  const auto& place = found->second;
  return !place || (place->replica == replica && place->rank.value_or(rank) == rank);
}

void NeverMembers::to(proto::LogRecord::Snapshot& snapshot) const {
  for (const auto& [incarnation, place] : all_) {
    snapshot.add_never_members(incarnation);
    if (!place) continue;
    auto& of = *snapshot.add_never_members_of();
    of.set_incarnation(incarnation);
    of.set_replica(place->replica);
    if (place->rank) of.set_rank(*place->rank);
  }
}

NeverMembers NeverMembers::from(const proto::LogRecord::Snapshot& snapshot) {
  NeverMembers read;
  for (const auto incarnation : snapshot.never_members()) read.add(incarnation, std::nullopt);
  for (const auto& of : snapshot.never_members_of())
    if (read.all_.contains(of.incarnation())) read.take(of);
  return read;
}

}  // namespace rejoin::membership
