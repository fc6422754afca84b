// Many ranks that come back at once: what that costs, and who is judged meanwhile.
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <set>

#include "membership/coordinator.h"
#include "membership/relay.h"

namespace rejoin::membership {
namespace {

using namespace std::chrono_literals;

constexpr std::uint32_t kManyReplicas = 64, kRanksOfEach = 8, kBehindRelay = 16;
constexpr NodeId kRelay{1}, kOthers{2}, kRestless{3};

// A job of which each replica has one daemon, the first replicas' behind one relay, and those of the others behind a
// node that only listens.
struct Returning {
  Coordinator coordinator;
  std::unique_ptr<Relay> relay;
  TimePoint now{1s};
  std::map<std::uint32_t, std::uint64_t> incarnations;
  std::vector<proto::LogRecord> log;
  std::uint64_t epochs = 0;
  struct Counted {
    std::size_t peers = 0, lists = 0, plans = 0;             // lists: messages that say who all peers of some ranks are
    std::map<std::uint32_t, std::set<std::uint32_t>> known;  // of a rank's number: replicas
    void add(const proto::ToNode& message) {
      peers += static_cast<std::size_t>(message.peers().peers_size());
      lists += message.peers().complete_size() > 0 ? 1 : 0;
      plans += message.has_plan() ? 1 : 0;
      for (const auto& peer : message.peers().peers()) known[peer.rank()].insert(peer.replica());
    }
  };
  Counted to_relay;
  std::map<NodeId, Counted> to_daemons;

  explicit Returning(const std::vector<proto::LogRecord>& earlier = {})
      : coordinator(JobConfig{.replicas = kManyReplicas, .ranks = kRanksOfEach, .batch = 1, .silence = 2s}) {
    EXPECT_TRUE(coordinator.recover(earlier, now));
  }
  void start() {
    start_relay();
    for (std::uint32_t replica = 0; replica < kManyReplicas; ++replica)
      for (std::uint32_t rank = 0; rank < kRanksOfEach; ++rank) up(replica, rank, true);
    pass(1s);
    for (std::uint32_t replica = 0; replica < kManyReplicas; ++replica) status(replica);
    pass(250ms);
    ASSERT_EQ(coordinator.members().size(), kManyReplicas);
  }
  void start_relay() {
    relay = std::make_unique<Relay>("relay", 2s);
    keep(relay->on_coordinator_up(now));
    for (std::uint32_t daemon = 0; daemon < kBehindRelay; ++daemon) {
      proto::FromNode hello;
      hello.mutable_hello()->set_node("daemon");
      keep(relay->on_node_message(NodeId(daemon), hello, now));
    }
  }
  void forget_counts() { to_relay = {}, to_daemons.clear(); }
  void pass(Duration time) {
    for (const TimePoint until = now + time; now < until;) {
      now += 125ms;
      proto::FromNode heartbeat;
      heartbeat.mutable_heartbeat();
      for (const auto node : {kRelay, kOthers}) keep(coordinator.on_message(node, heartbeat, now));
      keep(coordinator.on_tick(now));
    }
  }
  void up(std::uint32_t replica, std::uint32_t rank, bool fresh = false) {
    send(replica, rank_up(replica, rank, fresh));
  }
  // Its daemon is lost, and there again.
  void goes_and_comes(std::uint32_t replica, std::uint32_t rank) {
    keep(coordinator.on_node_lost(kRestless, now));
    keep(coordinator.on_message(kRestless, rank_up(replica, rank, false), now));
  }
  proto::FromNode rank_up(std::uint32_t replica, std::uint32_t rank, bool fresh) const {
    proto::FromNode message;
    auto& up = *message.mutable_rank_up();
    up.set_replica(replica);
    up.set_rank(rank);
    up.set_instance(1 + replica * kRanksOfEach + rank);
    up.set_digest(5);
    up.set_plan_hash(9);
    if (!fresh) up.set_incarnation(incarnations.at(replica));
    return message;
  }
  void status(std::uint32_t replica) {
    proto::FromNode message;
    auto& status = *message.mutable_replica_status();
    status.set_replica(replica);
    status.set_incarnation(incarnations.at(replica));
    for (std::uint32_t rank = 0; rank < kRanksOfEach; ++rank) RankSet(rank).to(status.mutable_ranks());
    Incarnations links;
    for (const auto& [other, incarnation] : incarnations)
      if (other != replica) links.insert(incarnation);
    links.to(status.mutable_links());
    send(replica, message);
  }
  void send(std::uint32_t replica, const proto::FromNode& message) {
    if (relay != nullptr && replica < kBehindRelay) keep(relay->on_node_message(NodeId(replica), message, now));
    else keep(coordinator.on_message(kOthers, message, now));
  }
  void keep(const Relay::Actions& actions) {
    for (const auto& [to, message] : actions.to_nodes)
      for (const auto node : to) to_daemons[node].add(message);
    for (const auto& message : actions.to_coordinator) keep(coordinator.on_message(kRelay, message, now));
  }
  void keep(const Actions& actions) {
    for (const auto& record : actions.append) epochs += record.has_epoch() ? 1 : 0;
    log.insert(log.end(), actions.append.begin(), actions.append.end());
    for (const auto& [to, message] : actions.send) {
      if (message.has_registered()) incarnations[message.registered().replica()] = message.registered().incarnation();
      if (std::ranges::find(to, kRelay) == to.end() || relay == nullptr) continue;
      to_relay.add(message);
      keep(relay->on_coordinator_message(message, now));
    }
  }
  void expect_counts(std::size_t most_times) const {
    constexpr std::size_t list = kManyReplicas * kRanksOfEach;
    EXPECT_LE(to_relay.peers, most_times * list);
    EXPECT_LE(to_relay.plans, most_times + 1);
    ASSERT_EQ(to_daemons.size(), kBehindRelay);
    for (const auto& [daemon, its] : to_daemons) {
      EXPECT_LE(its.peers, most_times * list) << daemon.value;
      ASSERT_EQ(its.known.size(), kRanksOfEach) << daemon.value;
      for (const auto& [rank, replicas] : its.known) EXPECT_EQ(replicas.size(), kManyReplicas) << daemon.value;
    }
  }
};

// It was one list for each rank, which the relay sent to every daemon that has a rank of that number.
TEST(Returns, WhatARelayThatComesBackHearsDoesNotGrowWithTheDaemonsBehindIt) {
  Returning job;
  job.start();
  job.forget_counts();
  job.keep(job.coordinator.on_node_lost(kRelay, job.now));
  job.start_relay();
  for (std::uint32_t replica = 0; replica < kBehindRelay; ++replica)
    for (std::uint32_t rank = 0; rank < kRanksOfEach; ++rank) job.up(replica, rank);
  job.pass(250ms);
  RecordProperty("peers_to_relay", static_cast<int>(job.to_relay.peers));
  RecordProperty("peers_to_daemon", static_cast<int>(job.to_daemons.begin()->second.peers));
  RecordProperty("plans_to_relay", static_cast<int>(job.to_relay.plans));
  job.expect_counts(2);
  EXPECT_EQ(job.coordinator.members().size(), kManyReplicas);
}

TEST(Returns, WhatARelayHearsAtTheStartDoesNotGrowWithTheDaemonsBehindIt) {
  Returning job;
  job.start();
  RecordProperty("peers_to_relay", static_cast<int>(job.to_relay.peers));
  // A list when the first has come, one when all have, and each of the others in a message.
  job.expect_counts(2);
}

// One that comes alone does not wait for a tick.
TEST(Returns, WhoComesBackAloneHearsOfItsPeersAtOnce) {
  Returning job;
  job.start();
  job.keep(job.coordinator.on_node_lost(kRelay, job.now));
  job.pass(1s);
  job.forget_counts();
  job.start_relay();
  for (std::uint32_t rank = 0; rank < kRanksOfEach; ++rank) job.up(0, rank);
  EXPECT_EQ(job.to_relay.peers, kManyReplicas * kRanksOfEach);
  EXPECT_EQ(job.to_relay.plans, 1u);
}

// A job whose connections are all lost, in the epoch that it had, by this coordinator or by one that was started again.
void with_all_lost(const std::function<void(Returning&, Epoch, bool restarted)>& then) {
  for (const bool restarted : {false, true}) {
    Returning before;
    before.start();
    Returning after(before.log);
    Returning& job = restarted ? after : before;
    job.now = before.now;
    job.incarnations = before.incarnations;
    job.relay.reset();
    ASSERT_TRUE(job.coordinator.started());
    const auto epoch = job.coordinator.epoch();
    job.pass(125ms);
    for (const auto node : {kRelay, kOthers}) job.keep(job.coordinator.on_node_lost(node, job.now));
    then(job, epoch, restarted);
  }
}

// One rank each 10 ms, over 2.5 silences: no replica of those that are there first puts out the others.
TEST(Returns, NobodyIsJudgedAbsentWhileRanksStillComeBack) {
  with_all_lost([](Returning& job, Epoch epoch, bool restarted) {
    for (std::uint32_t i = 0; i < kManyReplicas * kRanksOfEach; ++i) {
      job.now += 10ms;
      job.up(i / kRanksOfEach, i % kRanksOfEach);
      if (i % 12 == 0) job.keep(job.coordinator.on_tick(job.now));
    }
    job.pass(2s);
    EXPECT_EQ(job.coordinator.epoch(), epoch) << restarted;
    EXPECT_EQ(job.coordinator.members().size(), kManyReplicas) << restarted;
    EXPECT_TRUE(job.coordinator.suspended().empty()) << restarted;
  });
}

// A rank that comes and goes all the time keeps nobody else in the job for good.
TEST(Returns, WhoStaysAwayIsOutThoughOthersComeBackAgainAndAgain) {
  with_all_lost([](Returning& job, Epoch, bool restarted) {
    for (std::uint32_t i = kRanksOfEach; i < kManyReplicas * kRanksOfEach; ++i)
      job.up(i / kRanksOfEach, i % kRanksOfEach);
    Duration taken{};
    for (; job.coordinator.members().size() == kManyReplicas && taken < 20s; taken += 125ms) {
      job.goes_and_comes(1, 0);
      job.pass(125ms);
    }
    EXPECT_EQ(job.coordinator.members().size(), kManyReplicas - 1) << restarted;
    EXPECT_GE(taken, 9s) << restarted;
    EXPECT_LE(taken, 10500ms) << restarted;
  });
}

}  // namespace
}  // namespace rejoin::membership
