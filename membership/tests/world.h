// The real coordinator, relay, node and rank machines in one process, with random orders of messages, losses and
// crashes around them: every replica on one node that is connected with the coordinator, or every rank on a node of its
// own and a relay for each replica; with rivals, also jobs of other sizes in which two processes ask for one place. The
// checkers know the invariants by name: one-decision, same-bits, exactly-once, no-false-eviction, one-process,
// progress.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "membership/coordinator.h"
#include "membership/node.h"
#include "membership/rank.h"
#include "membership/relay.h"

namespace rejoin::membership {

using namespace std::chrono_literals;

inline std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  return (a ^ (b + 0x9e3779b97f4a7c15 + (a << 6) + (a >> 2))) * 0xbf58476d1ce4e5b9;
}

struct World {
  JobConfig config{.replicas = 3, .ranks = 2, .batch = 4, .silence = 1s, .roll_back_to = {}, .start_patience = {}};
  std::mt19937_64 random;
  TimePoint now{10s};

  std::unique_ptr<Coordinator> coordinator;
  std::vector<proto::LogRecord> log;  // what is on disk

  struct RankProcess {
    std::unique_ptr<Rank> machine;
    PeerTable peers;
    std::uint64_t instance = 0;
    RankConnection connection;
    std::uint64_t version = 0, bits = 1;  // the model state, and how current it is
    bool current = true;                  // false while catching up
    bool contributor = false;             // in the last plan that it had a part in
    std::deque<proto::ToNode> inbox;
    bool reported_ready = false;
    TimePoint stopped_until{};
  };
  struct NodeProcess {
    std::unique_ptr<Node> machine;
    std::uint64_t coordinator_connection = 0;  // 0: none
    TimePoint stopped_until{};
    std::deque<proto::FromNode> to_coordinator;
    std::deque<proto::ToNode> from_coordinator;
    std::vector<std::optional<RankProcess>> ranks;
    std::optional<std::size_t> relay = {};  // where it has left that of its replica
  };
  std::vector<NodeProcess> nodes;
  struct RelayProcess {
    std::unique_ptr<Relay> machine;
    std::uint64_t coordinator_connection = 0;
    TimePoint stopped_until{};
    std::deque<proto::FromNode> to_coordinator;
    std::deque<proto::ToNode> from_coordinator;
  };
  std::vector<RelayProcess> relays;  // by replica, or none
  // Where there are rivals each rank has two nodes, and now and then a process on both.
  const std::uint32_t hosts;
  bool more_rivals = hosts > 1;  // come
  std::size_t nodes_of_a_host() const { return nodes.size() / hosts; }
  NodeProcess& node_of(std::uint32_t replica, std::uint32_t number, std::uint32_t host = 0) {
    return nodes[host * nodes_of_a_host() + (relays.empty() ? replica : replica * config.ranks + number)];
  }
  std::uint32_t pick_host() { return hosts > 1 && pick(3) == 0 ? 1 : 0; }
  RelayProcess* relay_of(const NodeProcess& node) {
    if (relays.empty()) return nullptr;
    const auto number = static_cast<std::size_t>(&node - nodes.data()) % nodes_of_a_host();
    return &relays[node.relay.value_or(number / config.ranks)];
  }
  std::uint64_t connections = 0, instances = 0;
  TimePoint coordinator_stopped_until{};
  std::uint64_t roll_backs = 0;  // that the operator allowed

  // What the checkers remember.
  std::map<std::uint64_t, std::uint64_t> decided;              // step → digest of who trained what
  std::map<std::uint64_t, std::uint64_t> bits_at;              // version → bits
  std::map<std::uint64_t, std::set<Incarnation>> contributed;  // to each step
  std::map<std::tuple<std::uint32_t, std::uint32_t, std::uint64_t>, std::uint64_t>
      owners;                                                           // places, incarnations: whose
  std::set<Incarnation> joined;                                         // that epochs have named
  std::map<std::uint32_t, std::map<Incarnation, std::uint64_t>> given;  // by replica: and after how many commits
  std::uint64_t commits = 0;                                            // ever
  std::string trouble;

  enum class Rivals : bool { no, yes };
  World(std::uint64_t seed, bool with_relays, Rivals rivals = Rivals::no);
  // One thing happens, or, this many times in a thousand, a fault.
  void step(int fault_rate);
  void tick();
  std::size_t contributors() const {
    return static_cast<std::size_t>(std::count_if(coordinator->members().begin(), coordinator->members().end(),
                                                  [](const auto& m) { return !m.catching_up; }));
  }

  // Its operator allows what it asks for.
  void start_coordinator(std::optional<JobConfig::RollBack> roll_back_to = {});
  void start_coordinator_again(std::optional<JobConfig::RollBack> roll_back_to = {});
  void cut(NodeProcess& node);  // from its side
  void connect(NodeProcess& node);
  void disconnect(NodeProcess& node);
  void relay_lost_coordinator(RelayProcess& relay);
  static void forget(auto& process) { process.to_coordinator.clear(), process.from_coordinator.clear(); }
  void keep(const Actions& actions);
  void keep(RelayProcess& relay, const Relay::Actions& actions);
  void keep(NodeProcess& node, const Node::Actions& actions);

  // Ranks, and their reactions to what arrives.
  void spawn(NodeProcess& node, std::uint32_t replica, std::uint32_t number);
  bool may_start(std::uint32_t replica, std::uint32_t number, std::uint32_t host) {
    const bool has_one = hosts > 1 && node_of(replica, number, 1 - host).ranks[number].has_value();
    return !has_one || (more_rivals && pick(40) == 0);
  }
  void greet_again(NodeProcess& node, std::uint32_t replica, std::uint32_t number);
  // The daemon has closed the connection of a rank that was silent; it comes back through another when it goes on.
  void hang_up(NodeProcess& node, RankConnection connection);
  void deliver(NodeProcess& node, std::uint32_t replica, std::uint32_t number);
  void apply(RankProcess& rank, std::uint32_t replica, Step step);
  void work(NodeProcess& node, std::uint32_t replica, std::uint32_t number);
  // All its processes live, stopped or not, with the state of this step, or with its gradient and its decision to come.
  bool holds(std::uint32_t replica, Step committed);
  // Who waits to be taken into the job, and has not been left behind by it, is not sent away for having come back.
  void check_that_it_was_left_behind(const RankProcess& rank, std::uint32_t replica, const proto::Evicted& evicted);
  // Two processes are never told the same incarnation for one place.
  void check_that_it_is_its_own(const proto::Registered& registered);
  // The protocol ends a replica's processes: somebody else must have what it has. (A second process that its operator
  // starts may take the place of one that stands still.)
  void check_that_another_holds(std::uint32_t replica);

  // Faults and restarts.
  void fail(std::uint64_t kind, std::uint32_t replica, std::uint32_t number);
  void kill_rank(NodeProcess& node, std::uint32_t number);
  // The daemon dies; its ranks find the new one and register again as who they are.
  void restart_daemon(NodeProcess& node, std::uint32_t replica);
  // Its daemon connects anew, with any relay, perhaps before its former connection is known to be over.
  void connect_elsewhere(NodeProcess& node);
  // It dies and another starts in its place; the daemons find it.
  void restart_relay(RelayProcess& relay);

  std::uint64_t pick(std::uint64_t n) { return random() % n; }
  bool stopped(const auto& process) const { return now < process.stopped_until; }
  // From milliseconds to several silences.
  Duration for_a_while() { return std::chrono::milliseconds(1) * (std::uint64_t{1} << pick(13)); }
};

}  // namespace rejoin::membership
