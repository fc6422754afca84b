// Who is judged where what some ranks say of their waits comes through a relay.
#include "membership/relay.h"
#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {
namespace {

// Replica 1 is behind a relay, with a daemon for each of its ranks, or behind none.
struct Relayed : Bench {
  Relay relay{"relay", 1s};
  const bool relayed;
  std::size_t seen = 0;  // by the relay, of what the coordinator has sent it

  Relayed(bool with_relay, std::uint32_t ranks) : Bench({}, {.replicas = 3, .ranks = ranks}), relayed(with_relay) {
    if (relayed) up_through(relay.on_coordinator_up(now));
    for (std::uint64_t rank = 0; relayed && rank < ranks; ++rank) {
      proto::FromNode hello;
      hello.mutable_hello()->set_node("daemon");
      up_through(relay.on_node_message(NodeId(rank), hello, now));
    }
    for (std::uint32_t replica = 0; replica < 3; ++replica)
      for (std::uint32_t rank = 0; rank < ranks; ++rank) say(replica, rank, introduction(replica, rank, 1));
    link_all();
    hear();
    EXPECT_EQ(contributors(), 3u);
  }
  void up_through(const Relay::Actions& actions) {
    for (const auto& message : actions.to_coordinator) send(1, message);
  }
  void hear() {
    for (; relayed && seen < inbox[1].size(); ++seen)
      up_through(relay.on_coordinator_message(proto::ToNode(inbox[1][seen]), now));
  }
  void say(std::uint32_t replica, std::uint32_t rank, const proto::FromNode& message) {
    if (relayed && replica == 1) up_through(relay.on_node_message(NodeId(rank), message, now));
    else send(replica, message);
    hear();
  }
  void waits(std::uint32_t who, std::uint32_t rank, std::uint32_t suspect, bool only_waiting,
             bool unconnected = false) {
    proto::FromNode message;
    auto& a = *message.mutable_accusation();
    a.set_replica(who);
    a.set_rank(rank);
    a.set_epoch(coordinator.epoch().value);
    a.set_suspect(suspect);
    a.set_what("chunk 3 of 9 of the reduce-scatter");
    a.set_only_waiting(only_waiting);
    a.set_unconnected(unconnected);
    a.set_tells_connections(true);
    say(who, rank, message);
  }
  // A tick, in which all are heard.
  void tick() {
    now += config.silence / 16;
    proto::FromNode heartbeat;
    heartbeat.mutable_heartbeat();
    for (std::uint32_t replica = 0; replica < 3; ++replica)
      for (std::uint32_t rank = 0; rank < config.ranks; ++rank) say(replica, rank, heartbeat);
    if (relayed) up_through(relay.on_tick(now));
    keep(coordinator.on_tick(now));
    hear();
  }
  std::string out() const {
    std::string all;
    for (const auto& one : coordinator.suspended()) all += fmt::format("replica {}: {}", one.replica, one.reason);
    return all;
  }
};

// Replica 2 hangs. 1 waits for it, as a newcomer with more patience than 0, which waits for 1.
TEST(RelayWaits, WhoWaitsWithPatienceBehindARelayIsNotTakenForOneThatHangs) {
  for (const bool relayed : {false, true}) {
    Relayed job(relayed, 1);
    for (int i = 1; i < 64 && job.coordinator.suspended().empty(); ++i) {
      job.tick();
      if (i < 4) continue;  // a quarter of a silence
      job.waits(0, 0, 1, /*only_waiting=*/i < 20);
      job.waits(1, 0, 2, /*only_waiting=*/true);
    }
    EXPECT_EQ(job.out().find("replica 2: it hangs: "), 0u) << "relayed " << relayed << ": " << job.out();
  }
}

}  // namespace
}  // namespace rejoin::membership
