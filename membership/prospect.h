// Says in which order members will stand in an epoch that has not begun yet, and with whom each of them is to be
// connected there.
#pragma once

#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"
#include "base/ring_links.h"
#include "control.pb.h"
#include "membership/coordinator_actions.h"
#include "membership/rank_set.h"
#include "membership/ring_order.h"

namespace rejoin::membership {

struct RingMember {
  ReplicaId replica;
  Incarnation incarnation;
  bool catching_up = false;
  auto operator<=>(const RingMember&) const = default;
};
using Ring = std::vector<RingMember>;  // contributors first

Ring in_order(Ring ring);
// Returns the others in the ring with which the member at this position is to be connected.
Incarnations links_in(const LinkRule& rule, const Ring& ring, std::size_t position);

// The Prospect that the coordinator has sent last.
struct Prospect {
  Ring ring;
  std::size_t candidates = 0;                                 // so many at the ring's end are candidates
  std::vector<std::pair<ReplicaId, Incarnation>> of_start{};  // the replicas that are to start the job
  unsigned changed = 0;                                       // how often the ring has changed for these
  std::vector<NodeId> receivers;
  TimePoint sent_at{};
  bool stale = false;  // before a start: what replicas have registered with may have changed since

  proto::ToNode message(std::uint64_t job) const;
};

// As it stands in a message or record.
LinkRule rule_in(const auto& message) {
  if (!message.has_full_mesh_members()) return {};
  return {.full_mesh_members = message.full_mesh_members(), .spares = message.spares()};
}
void put_rule(const LinkRule& rule, auto& message) {
  if (!rule.full_mesh_members) return;
  message.set_full_mesh_members(*rule.full_mesh_members);
  message.set_spares(rule.spares);
}

// Whom a candidate of this incarnation is to connect with, by what it was told: for where it stands if all before it
// are admitted, and for where it stands if none of them is. Of one that is not in it, nobody.
Incarnations links_of_candidate(const LinkRule& rule, const proto::Prospect& prospect, std::uint64_t incarnation);

}  // namespace rejoin::membership
