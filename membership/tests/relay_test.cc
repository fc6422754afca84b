// What a relay passes on of what ranks say of others and of themselves.
#include "membership/relay.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

namespace rejoin::membership {
namespace {

using namespace std::chrono_literals;

struct Ranks {
  Relay relay{"relay", 1600ms};
  TimePoint now = TimePoint{} + 1h;

  Ranks() {
    relay.on_coordinator_up(now);
    for (std::uint64_t rank = 0; rank < 8; ++rank) {
      proto::FromNode hello;
      hello.mutable_hello()->set_node("daemon");
      relay.on_node_message(NodeId(rank), hello, now);
    }
    proto::ToNode plan;
    plan.mutable_plan()->set_epoch(3);
    relay.on_coordinator_message(plan, now);
  }
  // How many messages go up for this one.
  std::size_t send(std::uint32_t rank, std::uint32_t suspect, bool excused, std::uint64_t epoch = 3,
                   bool unconnected = false, bool only_waiting = true) {
    proto::FromNode message;
    auto& accusation = *message.mutable_accusation();
    accusation.set_replica(1);
    accusation.set_rank(rank);
    accusation.set_epoch(epoch);
    accusation.set_suspect(suspect);
    accusation.set_only_waiting(only_waiting);
    accusation.set_excused(excused);
    accusation.set_unconnected(unconnected);
    return relay.on_node_message(NodeId(rank), message, now).to_coordinator.size();
  }
};

TEST(Relay, OfRanksThatWaitForAnotherReplicaTheFirstSpeaksForAll) {
  Ranks ranks;
  EXPECT_EQ(ranks.send(0, 2, false), 1u);
  EXPECT_EQ(ranks.send(1, 2, false), 0u);
  EXPECT_EQ(ranks.send(0, 2, false, 2), 0u) << "of an epoch that is over";
  EXPECT_EQ(ranks.send(2, 2, false, 3, /*unconnected=*/true), 1u) << "another kind of wait";
  EXPECT_EQ(ranks.send(3, 2, false, 3, /*unconnected=*/true), 0u);
}

// To the coordinator that is worth something for a quarter of a silence, and what counts for as long as the step lasts.
TEST(Relay, ThatOneWaitsIsPassedOnForAsLongAsItIsSaidAndThatItWaitsTooLongOnce) {
  for (const Duration between : {1600ms / 16, 1600ms / 10, 1600ms / 8}) {  // two words of one rank
    Ranks ranks;
    std::size_t passed = 0;
    Duration longest{};
    const TimePoint begun = ranks.now;
    for (TimePoint last = begun; ranks.now - begun < 16s; ranks.now += between / 8)
      for (std::uint32_t rank = 0; rank < 8; ++rank) {
        if ((ranks.now - begun) / (between / 8) % 8 != rank % 2) continue;  // two of them at a time
        if (ranks.send(rank, 2, false) == 0) continue;
        ++passed;
        longest = std::max(longest, ranks.now - std::exchange(last, ranks.now));
      }
    EXPECT_LE(longest, 1600ms / 8) << milliseconds(between);
    EXPECT_LE(passed, 108u) << "of 1,024 and more";
    EXPECT_GE(passed, 80u);
    EXPECT_EQ(ranks.send(0, 2, false, 3, false, /*only_waiting=*/false), 1u);
    for (int i = 0; i < 64; ++i, ranks.now += between)
      for (std::uint32_t rank = 0; rank < 8; ++rank)
        EXPECT_EQ(ranks.send(rank, 2, false, 3, false, /*only_waiting=*/false), 0u);
  }
}

// The coordinator knows of the one whose word has gone up that it lacks a connection, and not of those who say it, too.
TEST(Relay, WhereTheOneThatSpokeHasAllConnectionsWhoStillLacksOneIsHeard) {
  Ranks ranks;
  EXPECT_EQ(ranks.send(0, 2, false), 1u);
  EXPECT_EQ(ranks.send(0, 2, false, 3, /*unconnected=*/true), 1u);
  EXPECT_EQ(ranks.send(1, 2, false, 3, true), 0u);
  EXPECT_EQ(ranks.send(2, 2, false), 0u) << "it has lacked nothing";
  EXPECT_EQ(ranks.send(0, 2, false), 1u) << "that it has it, too";
  EXPECT_EQ(ranks.send(1, 2, false, 3, true), 1u);
  EXPECT_EQ(ranks.send(1, 3, false), 1u);
  EXPECT_EQ(ranks.send(2, 2, false), 1u) << "it waits for the same one";
  for (std::uint32_t rank = 0; rank < 8; ++rank) EXPECT_EQ(ranks.send(rank, 2, false), 0u) << rank;
}

// Of each whose word has gone up the coordinator has to hear that it has its connection.
TEST(Relay, WhoeverSpokeForAConnectionIsHeardWhenItHasIt) {
  Ranks ranks;
  EXPECT_EQ(ranks.send(0, 2, false, 3, /*unconnected=*/true), 1u);
  ranks.now += 200ms;
  EXPECT_EQ(ranks.send(1, 2, false, 3, true), 1u);
  EXPECT_EQ(ranks.send(2, 3, false), 1u);
  EXPECT_EQ(ranks.send(0, 3, false), 1u);
  EXPECT_EQ(ranks.send(2, 2, false, 3, true), 0u) << "that 1 lacks it is known";
  EXPECT_EQ(ranks.send(1, 3, false), 1u);
  EXPECT_EQ(ranks.send(2, 2, false, 3, true), 1u);
}

// Whoever hears of it no more judges: so it is passed on for as long as it is said, but not of each rank.
TEST(Relay, WhatAReplicaSaysOfItselfIsPassedOnAgainAndAgainOfAnyRank) {
  Ranks ranks;
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(ranks.send(0, 1, true), 1u) << i;
    for (std::uint32_t rank = 1; rank < 8; ++rank) EXPECT_EQ(ranks.send(rank, 1, true), 0u) << rank;
    EXPECT_EQ(ranks.send(3, 1, false), 1u) << "another thing, " << i;
    ranks.now += 100ms;
  }
}

// Of all of a replica's ranks, which are behind several daemons: not known where one of them doesn't say.
TEST(Relay, ReportsTheLongestThatAReplicasRanksHaveComputed) {
  Ranks ranks;
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    proto::FromNode message;
    auto& up = *message.mutable_rank_up();
    up.set_replica(1);
    up.set_rank(rank);
    up.set_instance(rank + 1);
    up.set_incarnation(5);
    (void)ranks.relay.on_node_message(NodeId(rank), message, ranks.now);
  }
  const auto reported = [&](std::uint64_t step, const std::vector<std::uint64_t>& us) {
    std::vector<proto::FromNode> up;
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      EXPECT_TRUE(up.empty());
      proto::FromNode message;
      auto& reduced = *message.mutable_reduced();
      reduced.set_replica(1);
      reduced.set_incarnation(5);
      reduced.set_epoch(3);
      reduced.set_step(step);
      reduced.set_compute_us(us[rank]);
      RankSet(rank).to(reduced.mutable_ranks());
      up = ranks.relay.on_node_message(NodeId(rank), message, ranks.now).to_coordinator;
    }
    return up.at(0).reduced().compute_us();
  };
  EXPECT_EQ(reported(1, {4000, 9000, 5000}), 9000u);
  EXPECT_EQ(reported(2, {4000, 3000, 2000}), 4000u);
  EXPECT_EQ(reported(3, {4000, 0, 2000}), 0u);
}

// Two processes of one place behind two daemons of a relay: one runs, and the other comes back after it was long gone.
struct Place {
  Relay relay{"relay", 1600ms};
  TimePoint now = TimePoint{} + 1h;
  static constexpr NodeId kLive{1}, kStale{2};
  static constexpr std::uint64_t kInstance = 10, kIncarnation = 7, kFormer = 4, kFormers = 3, kJob = 9;

  Place() {
    relay.on_coordinator_up(now);
    for (const auto node : {kLive, kStale}) {
      proto::FromNode hello;
      hello.mutable_hello()->set_node("daemon");
      relay.on_node_message(node, hello, now);
    }
    comes(kLive, kInstance, 0);
    registered(kInstance, kIncarnation);
  }
  void introduces(NodeId node, std::uint64_t introduction) {
    proto::FromNode hello;
    hello.mutable_hello()->set_node("daemon");
    hello.mutable_hello()->set_introduction(introduction);
    relay.on_node_message(node, hello, now);
  }
  void comes(NodeId node, std::uint64_t instance, std::uint64_t incarnation, std::uint64_t job = 0,
             std::uint64_t reduced = 0) {
    proto::FromNode message;
    auto& up = *message.mutable_rank_up();
    up.set_replica(1);
    up.set_rank(0);
    up.set_instance(instance);
    up.set_incarnation(incarnation);
    up.set_job(job);
    up.set_reduced_epoch(reduced);
    up.set_reduced_step(reduced);
    EXPECT_EQ(relay.on_node_message(node, message, now).to_coordinator.size(), 1u);
  }
  std::vector<NodeId> registered(std::uint64_t instance, std::uint64_t incarnation) {
    proto::ToNode message;
    auto& its = *message.mutable_registered();
    its.set_replica(1);
    its.set_rank(0);
    its.set_instance(instance);
    its.set_incarnation(incarnation);
    its.set_job(kJob);
    return told(message);
  }
  std::vector<NodeId> evicted(std::uint64_t incarnation, std::uint64_t job = 0) {
    proto::ToNode message;
    message.mutable_evicted()->set_job(job);
    message.mutable_evicted()->set_replica(1);
    message.mutable_evicted()->set_incarnation(incarnation);
    return told(message);
  }
  std::vector<NodeId> told(const proto::ToNode& message) {
    std::vector<NodeId> all;
    for (const auto& [nodes, passed] : relay.on_coordinator_message(message, now).to_nodes)
      all.insert(all.end(), nodes.begin(), nodes.end());
    return all;
  }
  // Whether its report of that step goes up.
  bool reduces(NodeId node, std::uint64_t incarnation, std::uint64_t step) {
    proto::FromNode message;
    auto& reduced = *message.mutable_reduced();
    reduced.set_replica(1);
    reduced.set_incarnation(incarnation);
    reduced.set_epoch(3);
    reduced.set_step(step);
    RankSet(0).to(reduced.mutable_ranks());
    return !relay.on_node_message(node, message, now).to_coordinator.empty();
  }
  std::vector<std::uint64_t> instances_lost_with(NodeId node) {
    relay.on_node_lost(node, now);
    std::vector<std::uint64_t> down;
    for (int i = 0; i < 20; ++i) {
      now += 200ms;
      for (const auto other : {kLive, kStale}) {
        proto::FromNode heartbeat;
        heartbeat.mutable_heartbeat();
        if (other != node) relay.on_node_message(other, heartbeat, now);
      }
      for (const auto& message : relay.on_tick(now).to_coordinator)
        if (message.has_rank_down()) down.push_back(message.rank_down().instance());
    }
    return down;
  }
};

TEST(Relay, WhoComesBackLongAfterItWasReplacedTakesNothingFromWhoHasItsPlace) {
  Place place;
  place.comes(Place::kStale, Place::kFormer, Place::kFormers);
  EXPECT_TRUE(place.reduces(Place::kLive, Place::kIncarnation, 1)) << "before the coordinator has judged";
  const auto told = place.evicted(Place::kFormers);
  EXPECT_EQ(std::count(told.begin(), told.end(), Place::kStale), 1);
  EXPECT_FALSE(place.reduces(Place::kStale, Place::kFormers, 2));
  proto::FromNode down;
  down.mutable_rank_down()->set_replica(1);
  down.mutable_rank_down()->set_rank(0);
  down.mutable_rank_down()->set_instance(Place::kFormer);
  EXPECT_EQ(place.relay.on_node_message(Place::kStale, down, place.now).to_coordinator.size(), 1u);
  EXPECT_TRUE(place.reduces(Place::kLive, Place::kIncarnation, 2));
  EXPECT_EQ(place.instances_lost_with(Place::kLive), std::vector{Place::kInstance});
}

// Its relay has heard of another one first, as where it has just been connected with both.
TEST(Relay, WhoComesBackHasItsPlaceFromWhenTheCoordinatorKnowsItAndItsReportsAreNotLostBefore) {
  Place place;
  place.comes(Place::kStale, Place::kFormer, Place::kFormers);
  EXPECT_TRUE(place.reduces(Place::kStale, Place::kFormers, 1)) << "the coordinator judges";
  EXPECT_EQ(place.registered(Place::kFormer, Place::kFormers), std::vector{Place::kStale});
  EXPECT_TRUE(place.reduces(Place::kStale, Place::kFormers, 2));
  EXPECT_FALSE(place.reduces(Place::kLive, Place::kIncarnation, 2)) << "its place is another's";
  EXPECT_EQ(place.instances_lost_with(Place::kStale), std::vector{Place::kFormer});
}

// Its daemon was started with this job's relay, and its incarnation has the same number.
TEST(Relay, WhoComesBackFromAnotherJobTakesNothingFromWhoHasItsPlace) {
  Place place;
  place.comes(Place::kStale, Place::kFormer, Place::kIncarnation, Place::kJob + 1, 100);
  EXPECT_TRUE(place.reduces(Place::kLive, Place::kIncarnation, 1));
  EXPECT_EQ(place.evicted(Place::kIncarnation, Place::kJob + 1), std::vector{Place::kStale});
  EXPECT_TRUE(place.reduces(Place::kLive, Place::kIncarnation, 2));
  EXPECT_EQ(place.instances_lost_with(Place::kLive), std::vector{Place::kInstance});
}

// The coordinator has lost its log, and the job that it begins anew has no plan yet.
TEST(Relay, WhoIsOfTheJobBehindTheLastPlansIsNotLostWithTheConnectionThatItHadBefore) {
  Place place;
  proto::ToNode plan;
  plan.mutable_plan()->set_job(Place::kJob - 1);
  place.told(plan);
  constexpr std::uint64_t newcomer = 11;
  place.comes(Place::kLive, newcomer, 0);
  EXPECT_EQ(place.registered(newcomer, 8), std::vector{Place::kLive});
  place.relay.on_node_lost(Place::kLive, place.now);
  place.comes(Place::kStale, newcomer, 8, Place::kJob);
  EXPECT_EQ(place.instances_lost_with(NodeId(3)), std::vector{Place::kInstance}) << "the one of before";
}

// The coordinator has been restarted: a newcomer asks for the place first, and waits there; then the former comes back.
TEST(Relay, WhoWaitsForAPlaceHearsTheAnswerAlsoWhereTheFormerComesBackAfterIt) {
  for (const bool lost : {false, true}) {
    Place place;
    place.relay.on_coordinator_down(place.now);
    place.relay.on_coordinator_up(place.now);
    for (const auto node : {Place::kLive, Place::kStale}) place.introduces(node, 2);
    place.comes(Place::kStale, Place::kFormer, 0);
    place.comes(Place::kLive, Place::kInstance, Place::kIncarnation);
    EXPECT_EQ(place.registered(Place::kInstance, Place::kIncarnation), std::vector{Place::kLive});
    EXPECT_TRUE(place.reduces(Place::kLive, Place::kIncarnation, 1));
    if (lost) {
      EXPECT_EQ(place.instances_lost_with(Place::kStale), std::vector{Place::kFormer});
    } else {
      proto::ToNode refused;
      refused.mutable_refused()->set_replica(1);
      refused.mutable_refused()->set_instance(Place::kFormer);
      EXPECT_EQ(place.told(refused), std::vector{Place::kStale});
    }
  }
}

// The relay was stopped: it hears what the daemon sent over its former connection behind what it sent over the next
// one.
TEST(Relay, WhoWasHeardOverTwoConnectionsIntroducesItselfAgainWhenOneIsLost) {
  Place place;
  const auto before = Place::kLive, next = Place::kStale;
  place.comes(next, Place::kInstance, Place::kIncarnation);
  place.comes(before, Place::kInstance, Place::kIncarnation);
  std::optional<std::uint64_t> number;
  for (const auto& [nodes, message] : place.relay.on_node_lost(before, place.now).to_nodes)
    if (message.has_introduce()) {
      EXPECT_EQ(nodes, std::vector{next});
      number = message.introduce().number();
    }
  ASSERT_TRUE(number);
  place.introduces(next, *number);
  place.comes(next, Place::kInstance, Place::kIncarnation);
  EXPECT_TRUE(place.reduces(next, Place::kIncarnation, 1));
}

TEST(Relay, WhoComesBackAndIsLostBeforeItIsJudgedIsReportedDown) {
  Place place;
  place.comes(Place::kStale, Place::kFormer, Place::kFormers);
  EXPECT_EQ(place.instances_lost_with(Place::kStale), std::vector{Place::kFormer});
  EXPECT_TRUE(place.reduces(Place::kLive, Place::kIncarnation, 1));
}

}  // namespace
}  // namespace rejoin::membership
