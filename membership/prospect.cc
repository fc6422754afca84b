#include "membership/prospect.h"

#include <algorithm>

namespace rejoin::membership {

Ring in_order(Ring ring) {
  std::stable_partition(ring.begin(), ring.end(), [](const RingMember& member) { return !member.catching_up; });
  return ring;
}

Incarnations links_in(const LinkRule& rule, const Ring& ring, std::size_t position) {
  const auto contributors = std::ranges::count_if(ring, [](const RingMember& member) { return !member.catching_up; });
  Incarnations links;
  // A ring of joiners alone is of a start that no state is there for yet.
  for (auto other : links_of(rule, static_cast<std::uint32_t>(position),
                             static_cast<std::uint32_t>(contributors > 0 ? contributors : ring.size()),
                             static_cast<std::uint32_t>(ring.size())))
    links.insert(ring[other].incarnation.value);
  return links;
}

proto::ToNode Prospect::message(std::uint64_t job) const {
  proto::ToNode message;
  auto& prospect = *message.mutable_prospect();
  for (const auto& one : ring) {
    auto& member = *prospect.add_members();
    member.set_replica(one.replica.value);
    member.set_incarnation(one.incarnation.value);
    member.set_catching_up(one.catching_up);
  }
  prospect.set_candidates(static_cast<std::uint32_t>(candidates));
  prospect.set_job(job);
  return message;
}

Incarnations links_of_candidate(const LinkRule& rule, const proto::Prospect& prospect, std::uint64_t incarnation) {
  Ring ring;
  for (const auto& member : prospect.members())
    ring.push_back({ReplicaId(member.replica()), Incarnation(member.incarnation()), member.catching_up()});
  const auto self = std::ranges::find(ring, Incarnation(incarnation), &RingMember::incarnation);
  if (self == ring.end()) return {};
  const auto position = static_cast<std::size_t>(self - ring.begin());
  Incarnations links = links_in(rule, ring, position);
  const std::size_t members = ring.size() - std::min<std::size_t>(ring.size(), prospect.candidates());
  if (position <= members) return links;
  const RingMember its = *self;
  ring.resize(members);
  ring.push_back(its);
  links.add(links_in(rule, ring, members));
  return links;
}

}  // namespace rejoin::membership
