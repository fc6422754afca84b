// Who is judged where what some ranks say of their waits comes through a relay.
#include "membership/node.h"
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
  void reduced_by(std::uint32_t replica, std::uint32_t rank) { say(replica, rank, reduction_by(replica, rank)); }
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

// Behind one daemon: that a rank has reduced the step takes back what it has said of a connection.
TEST(RelayWaits, WhoLackedAConnectionIsReportedWhenItHasReducedAndDoesNotWaitForTheOthers) {
  Node node("node", 1s, 1);
  (void)node.on_coordinator_up(TimePoint{1s});
  // The ranks of the reports that go up.
  const auto says = [&](std::uint64_t rank, const proto::FromNode& message) {
    std::string reported;
    for (const auto& sent : node.on_rank_message(RankConnection(rank), message, TimePoint{1s}).to_coordinator)
      if (sent.has_reduced()) reported += RankSet(sent.reduced().ranks(), 8).text();
    return reported;
  };
  const auto reduces = [&](std::uint64_t rank, std::uint64_t epoch) {
    proto::FromNode message;
    message.mutable_reduced()->set_epoch(epoch);
    message.mutable_reduced()->set_step(epoch);
    return says(rank, message);
  };
  for (std::uint32_t rank = 0; rank < 4; ++rank) (void)says(rank, Bench::introduction(0, rank, 1));
  proto::FromNode lacks;
  lacks.mutable_accusation()->set_epoch(3);
  lacks.mutable_accusation()->set_suspect(1);
  lacks.mutable_accusation()->set_unconnected(true);
  (void)says(0, lacks);
  EXPECT_EQ(reduces(1, 3), "");
  EXPECT_EQ(reduces(0, 3), "0-1");
  EXPECT_EQ(reduces(2, 3), "0-2") << "or it would be named with the one that hangs";
  EXPECT_EQ(reduces(3, 3), "0-3");
  EXPECT_EQ(reduces(0, 4), "") << "it lacked one in an earlier epoch";
}

// One rank of replica 1 gets its connection with 0, reduces, and says nothing more. The other one waits for a trainer.
TEST(RelayWaits, AConnectionThatCameLateBehindARelayIsNobodysLack) {
  for (const bool relayed : {false, true}) {
    Relayed job(relayed, 2);
    job.waits(1, 0, 0, false, /*unconnected=*/true);
    job.tick();
    job.reduced_by(1, 0);
    EXPECT_EQ(job.coordinator.members()[1].reduced, RankSet(0));
    for (int i = 0; i < 32; ++i) {
      job.waits(1, 1, 2, true), job.waits(0, 1, 2, true);
      job.tick();
    }
    EXPECT_EQ(job.out(), "") << "relayed " << relayed;
    if (!relayed) continue;
    for (std::uint32_t replica : {0u, 2u}) job.reduced(replica);
    job.reduced_by(1, 1);
    EXPECT_EQ(job.coordinator.committed(), Step(1));
  }
}

// … whose own word is no longer heard, also where the relay has passed on another rank's.
TEST(RelayWaits, OfRanksThatLackAConnectionEachHasItForItself) {
  Relayed job(true, 3);
  job.waits(1, 0, 0, false, /*unconnected=*/true);
  job.waits(1, 1, 0, false, true);
  job.reduced_by(1, 0);
  job.waits(1, 1, 0, false, true);
  job.reduced_by(1, 1);
  for (int i = 0; i < 32; ++i) job.waits(1, 2, 2, true), job.tick();
  EXPECT_EQ(job.out(), "");
}

}  // namespace
}  // namespace rejoin::membership
