// Structures in which the coordinator keeps what it knows of nodes, of replicas that are out, and of processes that ask
// for a place. All belong to the coordinator (coordinator.h).
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/deadlines.h"
#include "control.pb.h"
#include "membership/coordinator_actions.h"
#include "membership/link_rates.h"
#include "membership/packed_text.h"
#include "membership/rank_set.h"
#include "membership/round_trips.h"
#include "membership/versions.h"

namespace rejoin::membership {

constexpr std::size_t kLongestRelease = 32;     // bytes; a longer name of a release is cut off
constexpr std::size_t kLongestReason = 400;     // bytes of what a peer says is the reason: it goes into the log
constexpr std::size_t kLongestSettings = 4096;  // likewise; differences behind that are not seen

// The protocol that a rank, its daemon and its relay all speak, and for people the releases of its trainer and daemon.
struct RankVersions {
  Spoken spoken = Spoken();
  std::string release{}, of_daemon{};
};

// What a rank has said of where it is: the address of its all-reduce engine, the one of its daemon's catch-up stream,
// its network card, and its node's location and name.
enum class RankText : std::uint8_t { address, stream_address, card, location, node };
using RankTexts = PackedText<RankText, 5>;

// A replica's rank, which one process has.
struct RankPlace {
  ReplicaId replica;
  RankId rank;
  auto operator<=>(const RankPlace&) const = default;
  static RankPlace of(const auto& message) { return {ReplicaId(message.replica()), RankId(message.rank())}; }
};

// A process that has, or wants, a place.
struct ProcessId {
  RankPlace place;
  std::uint64_t instance = 0;
  bool operator==(const ProcessId&) const = default;
  static ProcessId of(const auto& message) { return {RankPlace::of(message), message.instance()}; }
};

// A connection of a daemon or relay.
struct ConnectedNode {
  TimePoint heard{};        // when it sent something last
  TimePoint heard_since{};  // without a longer gap than heartbeats leave
  std::string name, address;
  RankSet hosts;  // the ranks, of any replica, that have registered through it
  Spoken spoken = Spoken();
  std::string release{};
  std::uint64_t silence_ms = 0;    // its own; 0: not told
  std::vector<ProcessId> moved{};  // that have registered through it, and then through another connection
  // At most so much lies between two things that are heard of one that is there.
  static Duration longest_gap(Duration silence) { return deadlines::kHeartbeatOfDaemon.of(silence) * 3 / 2; }
  void hear(TimePoint now, Duration silence) {
    if (now - heard > longest_gap(silence)) heard_since = now;
    heard = now;
  }
  // It is heard, and was before: what it had to say when it was not heard has come.
  bool is_heard_steadily(TimePoint now, Duration silence) const {
    return now - heard <= longest_gap(silence) && heard - heard_since >= silence / 8;
  }
};

// How a node is that says nothing more of those of whom it spoke.
enum class Connected { no_more, anew };

// Of a job that does not start, as its trainers are told.
struct WaitOfStart {
  std::string why;  // without times
  TimePoint since{};
  std::map<NodeId, TimePoint> untold{};  // and since when there is something to tell them
};

// A replica that the job runs without.
struct ReplicaOutage {
  ReplicaId replica;
  std::string why;
  std::optional<Duration> lasting;  // nothing: since before this coordinator was started
  std::string next;                 // what has to happen before it is in the job again
};

// Of a job that has started: who is no member.
struct AbsentReplica {
  std::string why;
  std::optional<TimePoint> since;
};

// Ranks of a replica that are connected with the same incarnations.
struct ConnectedRanks {
  RankSet ranks;
  Incarnations links;
  std::vector<proto::Unreached> unreached;
  RoundTrips round_trips{};
  LinkRates rates{};
};

// A replica that is out and has the state of the last committed step: it may be taken back until the next commit.
struct SuspendedReplica {
  ReplicaId replica;
  Incarnation incarnation;
  std::string reason;
  bool ended = false;  // one of its processes is gone, and with it the state
};

// What a check has made of a rank that registers: nothing, so that the next one comes, or all that there is to do.
enum class Screened : bool { goes_on, handled };

// Whether members may change their positions in the ring because of measured round trips.
enum class Moving : bool { no, yes };

// Of which replicas a decision is: those that are connected on all of their ranks now, or all.
enum class Whom : bool { connected, all };

// How a replica has come out of the job: one of its processes was lost, or has said that it leaves.
enum class Parting : bool { lost, left };

// Who contributes: as it is, or as it will be from the next step boundary on.
enum class When : bool { now, next_step };

// The neighbourhoods that were found last. They are asked for more often than they change.
struct KnownNeighbourhoods {
  std::vector<std::uint64_t> of;  // the incarnations among which they were found
  Neighbourhoods found;
  bool stale = true;  // other round trips have been reported since
};

// The first of those whose plans and settings are the job's.
struct FirstDeclared {
  struct OfRank {
    std::uint64_t plan_hash = 0;
    std::string settings;
    bool operator==(const OfRank&) const = default;
  };
  ReplicaId replica;
  std::vector<OfRank> ranks{{}};  // by number, or one for all

  bool operator==(const FirstDeclared&) const = default;
  const OfRank& of(std::uint32_t rank) const { return ranks[std::min<std::size_t>(rank, ranks.size() - 1)]; }
  static FirstDeclared from(const proto::LogRecord::Declared& declared);
  void to(proto::LogRecord::Declared& declared) const;
};

// A process that asks for a place which another one has.
struct PlaceClaim {
  NodeId node;
  proto::RankUp up;
  NodeId asked{};              // the node that was asked whether the place's holder lives
  std::uint64_t asked_of = 0;  // … and who that was
};

// A process that belongs to another job and has a place in this one.
struct Stranger {
  NodeId node;
  std::uint64_t instance = 0;
  std::string what;
  std::optional<TimePoint> lost_at{};  // when its node was lost or it fell silent; it may come back
};

// Two members; of an accusation who accuses whom, who may be the same.
struct Edge {
  ReplicaId from, to;
  auto operator<=>(const Edge&) const = default;
};

// What a member says of another, or of itself, in this epoch.
struct Accusation {
  std::string what;
  bool lost = false;
  bool found = false;  // … as the member has found itself; otherwise it was told by the other end
  // Of ranks that it has lasted too long for: since when it counts, for each of them.
  std::map<std::uint32_t, TimePoint> counting{};
  TimePoint waits_since{};
  TimePoint heard{};                   // when the member last said so
  std::optional<TimePoint> excused{};  // when the member last excused itself
  RankSet ranks;                       // the ranks that report it
  RankSet unconnected;                 // … and wait for a connection, and not for what the other member does
  bool untold = false;                 // a rank of before waits, which can't say whether for a connection

  bool counts() const { return !counting.empty(); }
  TimePoint since() const {  // of what counts
    return std::ranges::min_element(counting, {}, [](const auto& one) { return one.second; })->second;
  }
  bool of_connection() const { return lost || !unconnected.empty(); }
};

}  // namespace rejoin::membership
