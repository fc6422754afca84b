// Jobs of the largest size: what is said fits a frame, and what is written down fits a record.
#include <gtest/gtest.h>

#include <map>

#include "base/sanitized.h"
#include "membership/coordinator.h"
#include "membership/log.h"

namespace rejoin::membership {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kFrame = 16 * MiB;  // daemon/framed.h: the most that a peer takes

// A coordinator, and what it says to the daemons, which host `replicas` / `nodes` replicas each.
struct Job {
  JobConfig config;
  std::uint32_t nodes;
  bool stages = false;  // each rank number declares something of its own
  Coordinator coordinator{config};
  TimePoint now{1s};
  std::map<std::uint32_t, std::uint64_t> incarnations;
  std::vector<proto::LogRecord> log;
  std::size_t largest_message = 0, largest_group = 0;
  proto::Plan plan;
  // What a daemon or relay knows of its ranks' peers.
  struct Known {
    std::map<std::pair<std::uint32_t, std::uint32_t>, std::string> addresses;  // by rank and replica
    void take(const proto::Peers& peers) {
      const RankSet complete(peers.complete(), std::uint64_t{1} << 32);
      if (!complete.empty())
        std::erase_if(addresses, [&](const auto& one) { return complete.contains(one.first.first); });
      for (const auto& peer : peers.peers()) addresses[{peer.rank(), peer.replica()}] = peer.address();
    }
  };
  std::map<NodeId, Known> known;

  void keep(const Actions& actions) {
    if (!actions.append.empty()) largest_group = std::max(largest_group, log_bytes(actions.append, 8).size());
    log.insert(log.end(), actions.append.begin(), actions.append.end());
    for (const auto& [to, message] : actions.send) {
      largest_message = std::max(largest_message, message.ByteSizeLong());
      if (message.has_registered()) incarnations[message.registered().replica()] = message.registered().incarnation();
      if (message.has_plan()) plan = message.plan();
      for (auto node : to) known[node].take(message.peers());
    }
  }
  void send(std::uint32_t replica, const proto::FromNode& message) {
    keep(coordinator.on_message(NodeId(1 + replica % nodes), message, now));
  }
  void register_all(std::size_t address_bytes) {
    for (std::uint32_t replica = 0; replica < config.replicas; ++replica)
      for (std::uint32_t rank = 0; rank < config.ranks; ++rank) {
        proto::FromNode message;
        auto& up = *message.mutable_rank_up();
        up.set_replica(replica);
        up.set_rank(rank);
        up.set_instance(1 + std::uint64_t{replica} * config.ranks + rank);
        up.set_digest(5);
        up.set_plan_hash(stages ? rank : 9);
        up.set_address(std::string(address_bytes, 'a'));
        up.set_stream_address(std::string(address_bytes, 's'));
        if (const auto found = incarnations.find(replica); found != incarnations.end())
          up.set_incarnation(found->second), up.set_job(coordinator.job());
        send(replica, message);
      }
    RankSet all;
    all.add(0, config.ranks);
    for (std::uint32_t replica = config.replicas; replica-- > 0;) {
      proto::FromNode message;
      auto& status = *message.mutable_replica_status();
      status.set_replica(replica);
      status.set_incarnation(incarnations[replica]);
      all.to(status.mutable_ranks());
      Incarnations links;
      for (const auto& [other, incarnation] : incarnations)
        if (other != replica) links.insert(incarnation);
      links.to(status.mutable_links());
      EXPECT_LE(message.ByteSizeLong(), kFrame);
      send(replica, message);
    }
  }
  void step() {
    RankSet all;
    all.add(0, config.ranks);
    const auto epoch = coordinator.epoch().value, next = coordinator.committed().value + 1;
    for (std::uint32_t replica = 0; replica < config.replicas; ++replica) {
      proto::FromNode message;
      auto& done = *message.mutable_reduced();
      done.set_replica(replica);
      done.set_epoch(epoch);
      done.set_step(next);
      done.set_incarnation(incarnations[replica]);
      all.to(done.mutable_ranks());
      send(replica, message);
    }
  }
};

TEST(Sizes, AJobOfAThousandReplicasStartsCommitsAndIsReadBackWithinAFrame) {
  Job job{.config = {.replicas = 1024, .ranks = 2, .batch = 7, .silence = 1s}, .nodes = 4};
  ASSERT_TRUE(job.coordinator.recover({}, job.now));
  job.register_all(100);
  ASSERT_TRUE(job.coordinator.started());
  EXPECT_EQ(job.plan.members_size(), 1024);
  for (int i = 0; i < 3; ++i) job.step();
  EXPECT_EQ(job.coordinator.committed(), Step(3));
  EXPECT_LE(job.largest_message, kFrame);
  EXPECT_LE(job.largest_group, kFrame);
  // Some are gone, one after the other, with the samples that they held.
  for (std::uint32_t replica = 0; replica < 1024; replica += 100) {
    proto::FromNode message;
    auto& down = *message.mutable_rank_down();
    down.set_replica(replica);
    down.set_instance(1 + std::uint64_t{replica} * job.config.ranks);
    down.set_reason("killed");
    job.send(replica, message);
  }
  EXPECT_LE(job.largest_message, kFrame);
  const auto parsed = parse_log(log_bytes(job.log, 0), "the log");
  ASSERT_TRUE(parsed) << parsed.error().message;
  Coordinator again(job.config);
  ASSERT_TRUE(again.recover(parsed->records, job.now));
  EXPECT_EQ(again.committed(), job.coordinator.committed());
  EXPECT_EQ(again.epoch(), job.coordinator.epoch());
}

// The coordinator compares what is declared with each rank that comes.
TEST(Sizes, ThousandsOfRanksOfStagesStartAJobAndComeBackToAnotherCoordinator) {
  constexpr std::uint32_t replicas = kSanitized ? 128 : 512;
  Job job{.config = {.replicas = replicas, .ranks = 64, .batch = 7, .silence = 1s}, .nodes = 4, .stages = true};
  ASSERT_TRUE(job.coordinator.recover({}, job.now));
  job.register_all(10);
  ASSERT_TRUE(job.coordinator.started());
  job.step();
  Job after{.config = job.config, .nodes = job.nodes, .stages = true, .incarnations = job.incarnations};
  ASSERT_TRUE(after.coordinator.recover(job.log, after.now));
  after.register_all(10);
  after.step();
  EXPECT_EQ(after.coordinator.committed(), Step(2));
  EXPECT_EQ(after.plan.members_size(), replicas);
}

// Of addresses as long as those of 24 replicas with eight rails, more than a frame takes in all.
TEST(Sizes, WhatARelayOfFourThousandRanksMustKnowOfTheirPeersComesInFragments) {
  Job job{.config = {.replicas = 4, .ranks = 4096, .batch = 7, .silence = 1s}, .nodes = 4};
  ASSERT_TRUE(job.coordinator.recover({}, job.now));
  job.register_all(1000);
  ASSERT_TRUE(job.coordinator.started());
  job.now += 100ms;
  job.keep(job.coordinator.on_tick(job.now));
  EXPECT_LE(job.largest_message, kFrame);
  ASSERT_EQ(job.known.size(), 4u);
  for (const auto& [node, known] : job.known) {
    ASSERT_EQ(known.addresses.size(), 4 * 4096u);
    for (const auto& [rank, address] : known.addresses) ASSERT_EQ(address.size(), 1000u);
  }
}

}  // namespace
}  // namespace rejoin::membership
