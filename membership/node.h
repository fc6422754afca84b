// A node is the daemon's part between its ranks and the coordinator. It gathers the ranks' reports, passes the
// coordinator's messages to the ranks, and repeats everything after either side was lost. It is pure: connections are
// numbers, and the caller passes the time in.
//
// Its messages, in order (control.proto):
//   1. It connects to the coordinator or a relay with NodeHello, and sends RankUp for each rank that is there.
//   2. A rank that registers sends RankUp, which it passes on; Registered, Refused, Declare or Evicted come back.
//   3. From the ranks' Links, and CaughtUp of the stream, it makes one ReplicaStatus for each replica, again whenever
//      that changes.
//   4. It passes Peers, Prospect, Plan and Waits on to the ranks, all peers to one that is new and then what changes.
//   5. From the ranks' Reduced it makes one for all ranks of a replica that are here, when the last has come; or
//      earlier, for one that had said that it lacks a connection.
//   6. It passes Accusations, Details, Drift and Declarations on as they come, and sends RankDown when a rank ends or
//      is silent.
// It answers Inquiry with Alive or RankDown. After Introduce, or a new connection, it begins again with 1, and says
// again of each process that has ended that it has, until a step has been committed without it.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/deadlines.h"
#include "base/ids.h"
#include "control.pb.h"
#include "membership/link_rates.h"
#include "membership/note.h"
#include "membership/pause_detector.h"
#include "membership/peer_table.h"
#include "membership/round_trips.h"
#include "membership/versions.h"

namespace rejoin::membership {

using RankConnection = Id<struct RankConnectionTag>;  // one connection of a rank; never reused

class Node {
 public:
  struct Actions {
    std::vector<proto::FromNode> to_coordinator;
    std::vector<std::pair<RankConnection, proto::ToNode>> to_ranks;
    std::vector<RankConnection> silent;  // ranks that hang: they have to connect anew when they come back
    std::vector<Note> notes;
  };
  struct RankInfo {
    proto::RankUp up;
    TimePoint heard{};
    bool registered = false;
    std::optional<Incarnations> links;
    std::vector<proto::Unreached> unreached;
    RoundTrips round_trips;
    LinkRates rates;
    std::uint64_t compute_us = 0;  // of the last reduction, as in Reduced
    bool caught_up = false;
    std::uint64_t unconnected_in = 0;  // the epoch in which it has said that it lacks a connection; 0: none
    bool knows_peers = false;          // it has been told of all; from then on of what changes
  };

  // `id`: random, another one for each process. `location`: where it stands (base/location.h), if that is told.
  Node(std::string name, Duration silence, std::uint64_t id, std::string location = "")
      : name_(std::move(name)), location_(std::move(location)), silence_(silence), id_(id), pause_detector_(silence) {}

  // Connected (again), or asked for it (Introduce, with this number): it introduces itself and its ranks.
  Actions on_coordinator_up(TimePoint now, std::uint64_t introduction = 0);
  Actions on_coordinator_message(const proto::ToNode& message, TimePoint now);
  Actions on_coordinator_down() {
    coordinator_up_ = false;
    return {};
  }

  Actions on_rank_message(RankConnection rank, const proto::FromNode& message, TimePoint now);
  enum class Gone : std::uint8_t {
    ended,     // its process is no more, and its state with it
    left,      // likewise, by its own Leave
    silent,    // it may come back through another connection
    replaced,  // it has come back through another connection already
  };
  // Of one that was silent before: its process has ended now.
  Actions on_rank_gone(RankConnection rank, const std::string& reason, Gone how);
  // Others find it there from when it is introduced next. True: they have been told of other places, or of none.
  bool move(RankConnection rank, const std::string& address, const std::string& stream_address,
            const std::string& card);
  // Returns what becomes of a rank whose place is asked for. replaced: by itself, over another connection. silent: by a
  // process that the coordinator has registered, while it has not registered this one, or that one later; so is who
  // comes back after a daemon's restart behind a second process for its place. ended: it has to, or the newcomer is
  // refused.
  Gone gone_for(RankConnection rank, const proto::RankUp& newcomer) const;
  Actions on_tick(TimePoint now);  // at least every silence / 8

  bool coordinator_up() const { return coordinator_up_; }
  TimePoint coordinator_heard() const { return coordinator_heard_; }
  const std::map<RankConnection, RankInfo>& ranks() const { return ranks_; }
  void write_hosts(proto::LeaderView& view) const;  // the ranks here, and their job (leader_tracker.h)
  const proto::Plan& plan() const { return plan_; }
  const PeerTable& peers() const { return peers_; }

 private:
  static bool are_one_replica(const RankInfo& one, const RankInfo& other);
  void gather(const RankInfo& rank, Actions& actions);
  void report_status(const RankInfo& rank, Actions& actions);
  bool concerns_nobody(std::uint64_t job) const;
  void tell_of_peers(RankConnection rank, RankInfo& info, const proto::Peers& news, Actions& actions) const;
  void send(RankConnection rank, const proto::ToNode& message, Actions& actions) const;
  void tell_gone(const proto::RankUp& up, const std::string& reason, Gone how, Actions& actions);
  bool is_named(const proto::RankDown& down) const;
  void keep_end(const proto::RankDown& down);
  void forget_ended();

  const std::string name_, location_;
  const Duration silence_;
  const std::uint64_t id_;
  Duration pace_ = deadlines::kHeartbeatOfDaemon.of(silence_);  // of heartbeats to the coordinator
  PauseDetector pause_detector_;
  bool coordinator_up_ = false;
  TimePoint coordinator_heard_{}, heartbeat_sent_{};
  std::map<RankConnection, RankInfo> ranks_;
  std::map<RankConnection, proto::RankUp> silent_;  // gone, and their processes may live
  struct Ended {
    proto::RankDown down;
    std::optional<std::uint64_t> out_since{};  // the committed step of the first plan without it
  };
  std::vector<Ended> ended_;  // to be said again
  proto::Plan plan_;
  PeerTable peers_;
  using StatusKey = std::tuple<std::uint64_t, std::uint32_t, std::uint64_t>;  // job, replica, incarnation
  static StatusKey status_key(const proto::RankUp& up) { return {up.job(), up.replica(), up.incarnation()}; }
  std::map<StatusKey, std::string> statuses_;  // sent last
};

void add_unreached(const proto::Unreached& one, proto::ReplicaStatus& status);  // to a report of several
// Removes from `links` what is not in `its`; where nothing is there yet, takes `its` over.
void keep_common(std::optional<Incarnations>& links, const Incarnations& its);

void write_hosts(const std::map<std::uint32_t, RankSet>& hosted, proto::LeaderView& view);  // by replica

// What one message tells a rank of its peers, in bytes. A local socket takes no message of any size.
constexpr std::size_t kMostOfPeers = 64 * KiB;

}  // namespace rejoin::membership
