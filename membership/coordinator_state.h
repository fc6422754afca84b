// What the coordinator keeps of those who are not, or not only, members.
#pragma once

#include <optional>
#include <string>

#include "base/clock.h"
#include "control.pb.h"
#include "membership/coordinator_actions.h"
#include "membership/rank_set.h"
#include "membership/round_trips.h"
#include "membership/versions.h"

namespace rejoin::membership {

constexpr std::size_t kLongestRelease = 32;  // bytes; who says more is cut off

// Of a rank: what may be said to it by all on the way there, and for people the releases of its trainer and daemon.
struct RankVersions {
  Spoken spoken = Spoken();
  std::string release{}, of_daemon{};
};

// A connection of a daemon or relay.
struct ConnectedNode {
  TimePoint heard{};
  std::string name, address;
  RankSet hosts;  // the ranks, of any replica, that have registered through it
  Spoken spoken = Spoken();
  std::string release{};
};

// A replica that the job runs without.
struct ReplicaOutage {
  ReplicaId replica;
  std::string why;
  std::optional<Duration> lasting;  // nothing: since before this coordinator was started
  std::string next;                 // what has to happen before it is in the job again
};

// Ranks of a replica that are connected with the same incarnations.
struct ConnectedRanks {
  RankSet ranks;
  Incarnations links;
  std::vector<proto::Unreached> unreached;
  RoundTrips round_trips{};
};

// Who has the state of the last committed step and is out: may be taken back until the next one is committed.
struct SuspendedReplica {
  ReplicaId replica;
  Incarnation incarnation;
  std::string reason;
  bool ended = false;  // one of its processes is gone, and with it the state
};

// Whether members may change places in the ring for what was measured.
enum class Moving : bool { no, yes };

// As they were found last, since they are asked for more often than they change.
struct KnownNeighbourhoods {
  std::vector<std::uint64_t> of;  // incarnations
  Neighbourhoods found;
  bool stale = true;  // other round trips have been told since
};

// A process that asks for a place which another one has.
struct PlaceClaim {
  NodeId node;
  proto::RankUp up;
  NodeId asked{};  // by which node whether the place's holder lives
};

// A process of another job, by its place.
struct Stranger {
  NodeId node;
  std::uint64_t instance = 0;
  std::string what;
  std::optional<TimePoint> lost_at{};  // when its node was lost, or it was silent: it may come back
};

// What a member says of another, or of itself, in this epoch.
struct AccusationEdge {
  std::string what;
  bool lost = false;
  bool counts = false;  // it has lasted too long
  TimePoint since{};    // … since then
  TimePoint waits_since{};
  std::optional<TimePoint> excused{};  // reported last, by itself
  RankSet ranks;                       // that say so
};

}  // namespace rejoin::membership
