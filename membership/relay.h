// A relay stands between the daemons of one or several replicas and the coordinator. To the daemons it is the
// coordinator, and to the coordinator it is one node with all of their ranks. It sends equal reports of ranks up as
// one, when the last of them has come. It passes plans and peers down, to each daemon what concerns its ranks. So what
// reaches the coordinator grows with relays and not with daemons. It is pure, as all of this folder: connections are
// numbers, and the caller passes the time in.
//
// Its messages, in order (control.proto):
//   1. It connects to the coordinator with a NodeHello, as a daemon does, and answers each daemon's own with
//      NodeWelcome.
//   2. It passes each rank's RankUp up, and what the coordinator says of it (Registered, Refused, Declare, Inquiry,
//      Evicted) down.
//   3. For each replica it sends one ReplicaStatus for all of its ranks, again whenever that changes.
//   4. It passes Peers, Prospect, Plan and Waits down, to each daemon what concerns its ranks.
//   5. When all ranks of a replica behind it have reduced a step it sends one Reduced; earlier, where one of them had
//      said that it lacks a connection.
//   6. It passes the Accusations on that are new in the epoch, or of waits that are not too long yet, RankDown when a
//      rank or its daemon is lost, and Details, Drift, Declaration, Alive and Report as they come.
// Heartbeats go both ways on each of its connections.
//
// It decides nothing, and what it knows is worth nothing without the coordinator that it has told. When it has lost
// that one it keeps the daemons' connections, and ignores what they say. When it has the next, it tells them to
// introduce themselves again (Introduce), and hears each from its NodeHello on.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/deadlines.h"
#include "membership/coordinator.h"
#include "membership/digest_table.h"
#include "membership/note.h"

namespace rejoin::membership {

class Relay {
 public:
  struct Actions {
    std::vector<proto::FromNode> to_coordinator;
    std::vector<std::pair<std::vector<NodeId>, proto::ToNode>> to_nodes;  // one message, to all of them
    std::vector<NodeId> close;                                            // after sending
    std::vector<Note> notes;
  };

  Relay(std::string name, Duration silence) : name_(std::move(name)), silence_(silence), pause_detector_(silence) {}

  Actions on_coordinator_up(TimePoint now, std::uint64_t introduction = 0);  // as Node's
  Actions on_coordinator_message(const proto::ToNode& message, TimePoint now);
  Actions on_coordinator_down(TimePoint now);  // also where it leads no more

  Actions on_node_message(NodeId node, const proto::FromNode& message, TimePoint now);
  Actions on_node_lost(NodeId node, TimePoint now);
  Actions on_tick(TimePoint now);  // at least every silence / 8

  bool coordinator_up() const { return coordinator_up_; }
  TimePoint coordinator_heard() const { return coordinator_heard_; }
  bool finished() const { return finished_; }  // the job, by the last plan heard
  std::size_t ranks() const { return ranks_.size(); }
  void write_hosts(proto::LeaderView& view);  // the ranks behind it, and their job (leader_tracker.h)

 private:
  static constexpr std::uint64_t kNoLimit =
      ~std::uint64_t{0};  // of rank numbers: the coordinator knows how many there are
  struct NodeState {
    TimePoint heard{};
    std::string name, address;
    RankSet hosts;
    Spoken spoken;
    bool wants_plan = false;  // a rank of it has just registered: one that it heard before could not mean it
    bool introduced = false;  // to the coordinator that is connected now
    std::uint64_t asked = 0;  // the number of the last Introduce to it
    // Of its ranks, whether or not there is a coordinator: by replica and rank, the instance that was heard last.
    struct Place {
      std::uint64_t instance = 0;
      std::uint64_t job = 0;  // of which it has heard a plan
    };
    std::map<std::pair<std::uint32_t, std::uint32_t>, Place> places;
  };
  struct RankState {
    NodeId node;
    std::uint64_t instance = 0, incarnation = 0;  // 0: not registered
    std::uint64_t job = 0;                        // 0: not known
    bool connected = false;
    TimePoint lost_at{};  // when its node was lost
  };
  // One incarnation of a replica, as far as it is connected through here.
  struct Group {
    RankSet registered;
    std::uint64_t epoch = 0, step = 0;
    RankSet reduced;  // of that step
    DigestTable digests;
    ComputeTime computed;                               // likewise
    std::pair<std::uint64_t, std::uint64_t> at_once{};  // the epoch and step whose reports go up as they come
    std::map<NodeId, proto::ReplicaStatus> statuses;
    std::string last_status;  // that went up
  };
  using GroupKey = std::pair<std::uint32_t, std::uint64_t>;               // replica, incarnation
  using RankKey = std::pair<std::uint32_t, std::uint32_t>;                // replica, rank
  using Accusing = std::tuple<std::uint32_t, std::uint32_t, bool, bool>;  // replica, suspect, only waiting, unconnected

  static void note_places(NodeState& of, const proto::FromNode& message);
  void ask_to_introduce(std::vector<NodeId> nodes);
  bool passes_on(const proto::Accusation& accusation, TimePoint now);
  bool hear_others_than(std::uint32_t replica, const RankSet& connected);
  void on_rank_up(NodeId node, const proto::RankUp& up);
  RankState& take_place(const RankKey& key, NodeId node, std::uint64_t instance);
  void take_place(const RankKey& key, const RankState& claim);
  RankState& claim(const RankKey& key, NodeId node, std::uint64_t instance);
  void drop_claim(const RankKey& key, std::uint64_t instance);
  void down(const RankKey& key, std::uint64_t instance);
  void join(const RankKey& key, RankState& rank, std::uint64_t incarnation);
  void leave(const RankKey& key, RankState& rank);
  void leave_group(const RankKey& key, const RankState& rank);
  void quit_group(const RankKey& key, const RankState& rank);
  void put_strangers_aside();
  bool is_of_strangers(NodeId node, std::uint32_t replica, std::uint64_t incarnation) const;
  void on_replica_status(NodeId node, const proto::ReplicaStatus& status);
  void add_reduced_ranks(const proto::Reduced& reduced);
  void report_reduced(const GroupKey& key, const Group& group);
  void report_status(const GroupKey& key);
  void tell_that_it_is_alone(TimePoint now);
  proto::ToNode alone() const;
  void lose_silent(TimePoint now);
  void on_evicted(const proto::ToNode& message);
  void on_peers(const proto::Peers& peers);
  void on_plan(const proto::ToNode& message);
  proto::FromNode& up() { return actions_.to_coordinator.emplace_back(); }
  void send(std::vector<NodeId> nodes, proto::ToNode message);
  Actions take() { return std::exchange(actions_, {}); }

  const std::string name_;
  const Duration silence_;
  Duration pace_ = deadlines::kHeartbeatOfDaemon.of(silence_);  // of heartbeats to the coordinator
  PauseDetector pause_detector_;
  bool coordinator_up_ = false;
  TimePoint coordinator_heard_{}, heartbeat_sent_{};
  std::map<NodeId, NodeState> nodes_;
  std::map<RankKey, RankState> ranks_;
  // Of places that others have, by those who are new or who come back: the coordinator says which of the two it is, and
  // until then that other one stays.
  std::map<std::pair<RankKey, std::uint64_t>, RankState> claims_;  // by instance
  std::map<GroupKey, Group> groups_;
  std::pair<std::uint64_t, std::uint64_t> plan_{};  // the last one's epoch and commit
  std::uint64_t plan_job_ = 0;
  bool finished_ = false;
  std::optional<TimePoint> alone_since_;  // without a coordinator
  bool alone_reported_ = false;
  std::uint64_t introductions_ = 0;
  struct Passed {
    RankSet ranks;  // whose words have gone up
    TimePoint last{};
  };
  std::map<Accusing, Passed> accused_;                                 // in that epoch
  std::map<std::pair<std::uint32_t, bool>, TimePoint> of_themselves_;  // replicas, excused or not: passed on last
  Actions actions_;
};

}  // namespace rejoin::membership
