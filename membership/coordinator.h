// The coordinator: decides epochs and commits. A pure state machine: messages and the time go in, actions come out.
// The shell makes `append` durable, in order, before it sends anything of `send`. Replaying the appended records
// through recover() gives the same decisions, so that a restarted coordinator goes on where it stopped.
//
// What it does for each step grows with the reports that come, and those are gathered on their way: a daemon reports
// for its ranks, a relay for all that connect through it. "Node" means any of them here.
//
// The rules, each in one function:
//   start      all configured replicas have registered and are connected: the most advanced state contributes, the
//              others catch up.
//   commit     all ranks of all members have exchanged: the step is decided, and with it the plan of the next one.
//   retry      a member is gone: the same step again in the next epoch, without it.
//   admission  a registered, connected replica enters at the next step boundary as catching up.
//   promotion  all its ranks have caught up: it contributes from the next step boundary on.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"
#include "base/result.h"
#include "control.pb.h"
#include "membership/ledger.h"
#include "membership/rank_set.h"

namespace rejoin::membership {

using NodeId = Id<struct NodeTag>;  // one connection of a daemon or relay; never reused

struct JobConfig {
  std::uint32_t replicas = 3;
  std::uint32_t ranks = 2;
  std::uint64_t batch = 1;                     // samples a contributor trains in a step
  std::uint64_t steps = 0;                     // then the job is finished; 0: never
  Duration silence = std::chrono::seconds(2);  // how long a peer may be silent
};

struct Actions {
  std::vector<proto::LogRecord> append;  // durable before anything is sent
  std::vector<std::pair<NodeId, proto::ToNode>> send;
  std::vector<NodeId> close;       // after sending: what still comes over these connections must not be heard
  std::vector<std::string> notes;  // what happened, for the log and the trace
};

class Coordinator {
 public:
  explicit Coordinator(const JobConfig& config) : config_(config), ledger_(config.batch) {}

  // Before anything else: takes up the decisions of an earlier life. `mismatch` where the log is of another job shape,
  // `corrupt` where its records contradict each other.
  Result<> recover(const std::vector<proto::LogRecord>& records, TimePoint now);

  Actions on_message(NodeId node, const proto::FromNode& message, TimePoint now);
  Actions on_node_lost(NodeId node, TimePoint now);
  Actions on_tick(TimePoint now);  // at least every silence / 8

  struct RankState {
    NodeId node;
    std::uint64_t life = 0, version = 0, digest = 0;  // of its state
    TimePoint lost_at{};                              // when its node was lost
    bool registered = false, connected_node = false;
    std::uint32_t address_size = 0;
    std::string addresses;  // of its all-reduce engine, then of its daemon's stream
  };
  // Ranks that stand alike: connected with these incarnations, and caught up or not.
  struct Standing {
    RankSet ranks;
    std::vector<std::uint64_t> links;  // ascending
    bool caught_up = false;
  };
  struct ReplicaState {
    Incarnation incarnation;
    std::vector<RankState> ranks;     // all of the job's, by number
    std::uint32_t registered = 0;     // of them
    std::vector<Standing> standings;  // disjoint
  };
  struct MemberState {
    ReplicaId replica;
    Incarnation incarnation;
    bool catching_up = false;
    RankSet exchanged;  // for the step under way
  };

  bool started() const { return epoch_ != Epoch{}; }
  bool finished() const { return config_.steps != 0 && committed_.value >= config_.steps; }
  Epoch epoch() const { return epoch_; }
  Step committed() const { return committed_; }
  const std::vector<MemberState>& members() const { return members_; }
  const std::map<ReplicaId, ReplicaState>& replicas() const { return replicas_; }
  const Ledger& ledger() const { return ledger_; }
  // Whom the step under way waits for, for people.
  std::vector<std::string> waiting_for(TimePoint now) const;

 private:
  void on_rank_up(NodeId node, const proto::RankUp& up, TimePoint now);
  void on_rank_down(ReplicaId replica, std::uint32_t rank, std::uint64_t life, const std::string& reason);
  void on_exchanged(const proto::Exchanged& exchanged);
  void on_standing(const proto::Standing& standing);
  void on_accusation(const proto::Accusation& accusation, TimePoint now);
  void judge(TimePoint now);

  void try_start();
  void try_commit();
  void remove(ReplicaId replica, const std::string& reason);
  void drop_registration(ReplicaId replica, const std::string& reason);
  bool change_members_at_boundary();
  void begin_epoch(const std::string& reason);
  void plan_step();
  void broadcast_plan();
  bool may_announce();
  void announce_to(NodeId node, const RankSet& ranks);
  void announce_ranks(const ReplicaState& replica, ReplicaId id, const RankSet& ranks, const std::set<NodeId>& told);
  static void describe(const ReplicaState& replica, ReplicaId id, const RankSet& ranks, proto::Peers& peers);
  proto::Plan plan() const;
  bool whole(const ReplicaState& replica) const;
  bool linked(const ReplicaState& replica, const std::set<std::uint64_t>& incarnations) const;
  bool caught_up(const ReplicaState& replica) const;
  RankState& keep(ReplicaState& replica, NodeId node, const proto::RankUp& up);
  MemberState* member(ReplicaId replica);
  RankState* rank_of(std::uint32_t replica, std::uint32_t rank, std::uint64_t life);
  void send(NodeId node, proto::ToNode message);
  template <typename... Args>
  void note(fmt::format_string<Args...> format, Args&&... args) {
    actions_.notes.push_back(fmt::format(format, std::forward<Args>(args)...));
  }
  Result<> replay(const proto::LogRecord& record);
  Actions take() { return std::exchange(actions_, {}); }

  const JobConfig config_;
  Ledger ledger_;
  Epoch epoch_;
  Step committed_;
  std::uint64_t last_incarnation_ = 0;
  std::uint64_t plan_hash_ = 0;
  std::vector<MemberState> members_;
  std::map<ReplicaId, ReplicaState> replicas_;
  struct NodeState {
    TimePoint heard{};
    RankSet hosts;  // the ranks, of any replica, that have registered through it
  };
  std::map<NodeId, NodeState> nodes_;
  std::optional<TimePoint> recovering_until_;
  struct Edge {
    std::string what;
    bool lost = false;
    bool counts = false;  // it has lasted too long
    TimePoint since{};    // … since then
  };
  std::map<std::pair<std::uint32_t, std::uint32_t>, Edge> accusations_;  // accuser → suspect, in this epoch
  Actions actions_;
};

}  // namespace rejoin::membership
