// What a daemon gathers of its ranks, and what it hands on to them.
#include "membership/node.h"

#include <gtest/gtest.h>

#include "membership/rank.h"
#include "membership/relay.h"

namespace rejoin::membership {
namespace {

using namespace std::chrono_literals;

struct Machine {
  Node node{"node", 1s, 1};
  TimePoint now{1s};
  std::vector<proto::FromNode> said;
  std::map<std::uint64_t, std::vector<proto::ToNode>> heard;  // by connection

  Machine() { keep(node.on_coordinator_up(now)); }
  void keep(const Node::Actions& actions) {
    said.insert(said.end(), actions.to_coordinator.begin(), actions.to_coordinator.end());
    for (const auto& [rank, sent] : actions.to_ranks) heard[rank.value].push_back(sent);
  }
  // Registered before, and with this reduction done; by job `job`.
  void up(std::uint64_t connection, std::uint32_t rank, std::uint64_t reduced_epoch = 0, std::uint64_t job = 7) {
    proto::FromNode message;
    auto& its = *message.mutable_rank_up();
    its.set_rank(rank);
    its.set_instance(rank + 1);
    its.set_incarnation(5);
    its.set_job(job);
    its.set_reduced_epoch(reduced_epoch);
    its.set_reduced_step(reduced_epoch);
    keep(node.on_rank_message(RankConnection(connection), message, now));
  }
  void reduced(std::uint64_t connection, std::uint64_t epoch) {
    proto::FromNode message;
    message.mutable_reduced()->set_epoch(epoch);
    message.mutable_reduced()->set_step(epoch);
    keep(node.on_rank_message(RankConnection(connection), message, now));
  }
  // The ranks of the last report.
  std::string reported() const {
    for (auto sent = said.rbegin(); sent != said.rend(); ++sent)
      if (sent->has_reduced()) return RankSet(sent->reduced().ranks(), 8).text();
    return "none";
  }
  void plan(std::uint64_t job, std::uint64_t epoch) {
    proto::ToNode message;
    message.mutable_plan()->set_job(job);
    message.mutable_plan()->set_epoch(epoch);
    keep(node.on_coordinator_message(message, now));
  }
};

// A log that was put back may have given it its incarnation, and lacks what its daemon has heard before it came.
TEST(Node, WhoCameAfterAPlanIsNotSaidToHaveHeardIt) {
  Machine machine;
  machine.up(1, 0);
  machine.plan(7, 3);
  machine.up(2, 1);
  machine.said.clear();
  machine.keep(machine.node.on_coordinator_up(machine.now));
  ASSERT_EQ(machine.said.size(), 3u);
  EXPECT_EQ(machine.said[1].rank_up().heard_epoch(), 3u);
  EXPECT_EQ(machine.said[2].rank_up().heard_epoch(), 0u);
  machine.plan(7, 4);
  machine.said.clear();
  machine.keep(machine.node.on_coordinator_up(machine.now));
  EXPECT_EQ(machine.said[2].rank_up().heard_epoch(), 4u);
}

// Who has heard a plan keeps to its job, and a daemon that is new hears of that from the rank.
TEST(Node, TellsTheJobThatItsRanksHaveHeardAPlanOf) {
  Machine of;
  const auto job = [&](std::uint64_t before) {
    proto::LeaderView view;
    view.set_job(before);
    of.node.write_hosts(view);
    return view.job();
  };
  EXPECT_EQ(job(7), 0u) << "nobody is there";
  of.up(1, 0);
  EXPECT_EQ(job(7), 0u) << "it is registered, and nothing is decided";
  of.plan(7, 1);
  EXPECT_EQ(job(0), 7u);
  proto::ToNode finished;
  finished.mutable_plan()->set_epoch(1);
  finished.mutable_plan()->set_job(7);
  finished.mutable_plan()->set_finished(true);
  of.keep(of.node.on_coordinator_message(finished, of.now));
  EXPECT_EQ(job(7), 0u) << "there is nothing more to hear";
  of.plan(7, 1);
  proto::FromNode message;
  auto& its = *message.mutable_rank_up();
  its.set_replica(1);
  its.set_incarnation(3);
  its.set_job(8);
  its.set_heard_epoch(2);
  of.keep(of.node.on_rank_message(RankConnection(2), message, of.now));
  EXPECT_EQ(job(7), 7u);
  EXPECT_EQ(job(8), 8u);
  of.keep(of.node.on_rank_gone(RankConnection(1), "it ended", Node::Gone::ended));
  EXPECT_EQ(job(7), 8u);
}

// A coordinator or relay with a shorter silence would find it silent again and again.
TEST(Node, SendsHeartbeatsByTheShorterSilenceAndSaysThatTheyDiffer) {
  proto::ToNode welcome;
  welcome.mutable_welcome()->set_silence_ms(2000);
  const auto longest_pause = [&](auto machine, auto hear, const std::string& who) {
    TimePoint now{1h}, sent = now;
    auto up = machine.on_coordinator_up(now);
    EXPECT_EQ(up.to_coordinator.front().hello().silence_ms(), 20'000u);
    const auto notes = hear(machine, welcome, now).notes;
    EXPECT_EQ(notes.size(), 1u);
    if (!notes.empty()) EXPECT_TRUE(notes[0].text.starts_with(who + " has --silence-ms 20000, and")) << notes[0].text;
    Duration longest{};
    for (const TimePoint end = now + 20s; now < end; now += 100ms)
      for (const auto& message : machine.on_tick(now).to_coordinator)
        if (message.has_heartbeat()) longest = std::max(longest, now - sent), sent = now;
    return std::max(longest, now - sent);
  };
  const auto hear = [](auto& machine, const proto::ToNode& message, TimePoint now) {
    return machine.on_coordinator_message(message, now);
  };
  EXPECT_LE(longest_pause(Node("node", 20s, 1), hear, "this daemon"), 600ms);
  EXPECT_LE(longest_pause(Relay("relay", 20s), hear, "this relay"), 600ms);
}

TEST(Node, ReportsAReductionWhenTheLastOfItsRanksHasIt) {
  Machine machine;
  machine.up(1, 0), machine.up(2, 1);
  machine.reduced(1, 3);
  EXPECT_EQ(machine.reported(), "none");
  machine.reduced(2, 3);
  EXPECT_EQ(machine.reported(), "0-1");
}

// Its connection broke when it had done what the others' report waited for.
TEST(Node, ReportsAReductionThatARankBringsAlongWhenItComesBack) {
  Machine machine;
  machine.up(1, 0), machine.up(2, 1);
  machine.reduced(1, 3);
  machine.keep(machine.node.on_rank_gone(RankConnection(2), "it came back", Node::Gone::replaced));
  EXPECT_EQ(machine.reported(), "none");
  machine.up(3, 1, 3);
  EXPECT_EQ(machine.reported(), "0-1");
}

// It may come back through another daemon.
TEST(Node, ReportsAReductionThatOnlyWaitedForARankThatIsGone) {
  Machine machine;
  machine.up(1, 0), machine.up(2, 1);
  machine.reduced(1, 3);
  machine.keep(machine.node.on_rank_gone(RankConnection(2), "it is silent", Node::Gone::silent));
  EXPECT_EQ(machine.reported(), "0");
}

// Its number there may be the same.
TEST(Node, ReportsAReductionThatARankOfAnotherJobHasNoPartIn) {
  Machine machine;
  machine.up(1, 0), machine.up(2, 1, 0, 8);
  machine.reduced(1, 3);
  EXPECT_EQ(machine.reported(), "0");
}

TEST(Node, WhatACoordinatorWithAnotherJobsLogDecidesIsNothingToItsRanks) {
  Machine machine;
  machine.up(1, 0);
  machine.plan(7, 3);
  ASSERT_EQ(machine.heard[1].size(), 1u);
  machine.plan(8, 500);
  EXPECT_EQ(machine.heard[1].size(), 1u);
  EXPECT_EQ(machine.node.plan().epoch(), 3u) << "its streams go on";
  machine.said.clear();
  machine.keep(machine.node.on_coordinator_up(machine.now));
  ASSERT_EQ(machine.said.size(), 2u);
  EXPECT_EQ(machine.said[1].rank_up().heard_epoch(), 3u) << "a log without it is an older copy";
}

// Each job counts its incarnations from 1.
TEST(Node, ThatSomebodyOfAnotherJobIsPutOutIsNothingToItsRanks) {
  Machine machine;
  machine.up(1, 0);
  const auto evicted = [&](std::uint64_t job) {
    machine.heard.clear();
    proto::ToNode message;
    message.mutable_evicted()->set_incarnation(5);
    message.mutable_evicted()->set_job(job);
    machine.keep(machine.node.on_coordinator_message(message, machine.now));
    return machine.heard.contains(1);
  };
  EXPECT_FALSE(evicted(8));
  EXPECT_TRUE(evicted(7));
  EXPECT_TRUE(evicted(0)) << "as an older coordinator says it";
}

TEST(Node, SaysThatAnInstanceIsHereWhenItIsAskedFor) {
  Machine machine;
  machine.up(1, 0);
  const auto answers_to_inquiry = [&](std::uint64_t instance) {
    machine.said.clear();
    proto::ToNode message;
    message.mutable_inquiry()->set_instance(instance);
    machine.keep(machine.node.on_coordinator_message(message, machine.now + 30ms));
    return machine.said;
  };
  const auto said = answers_to_inquiry(1);
  ASSERT_EQ(said.size(), 1u);
  EXPECT_EQ(said[0].alive().instance(), 1u);
  EXPECT_EQ(said[0].alive().silent_ms(), 30u);
  EXPECT_TRUE(answers_to_inquiry(2).empty());
}

// A replica of a thousand that comes, or goes, costs each rank of the others a few bytes.
TEST(Node, WhatIsSaidOfOnePeerDoesNotGrowWithTheOthers) {
  constexpr std::uint64_t replicas = 1000;
  Machine machine;
  machine.up(1, 0);
  PeerTable known;  // the rank's
  const auto hear = [&](const proto::ToNode& message) {
    machine.heard.clear(), machine.said.clear();
    machine.keep(machine.node.on_coordinator_message(message, machine.now));
    ASSERT_EQ(machine.heard[1].size(), 1u);
    (void)known.apply(machine.heard[1].back().peers());
    proto::FromNode links;
    known.incarnations(0).to(links.mutable_links()->mutable_incarnations());
    EXPECT_LE(links.ByteSizeLong(), 40u);
    machine.keep(machine.node.on_rank_message(RankConnection(1), links, machine.now));
    ASSERT_EQ(machine.said.size(), 1u);
    EXPECT_LE(machine.said.back().ByteSizeLong(), 40u);
  };
  for (std::uint64_t replica = 1; replica < replicas; ++replica) {
    proto::ToNode message;
    auto& peer = *message.mutable_peers()->add_peers();
    peer.set_replica(static_cast<std::uint32_t>(replica));
    peer.set_incarnation(1000 + replica);
    hear(message);
    EXPECT_LE(machine.heard[1].back().ByteSizeLong(), 40u);
  }
  EXPECT_EQ(known.of(0).size(), replicas - 1);
  proto::ToNode gone;
  gone.mutable_peers()->add_gone(1500);
  hear(gone);
  EXPECT_EQ(known.of(0).size(), replicas - 2);
  EXPECT_LE(machine.heard[1].back().ByteSizeLong(), 40u);
  EXPECT_EQ(Incarnations(machine.said.back().replica_status().links(), ~0u).text(), "1001-1499, 1501-1999");
}

// It may have missed what was said before.
TEST(Node, ARankThatConnectsIsFirstToldOfAllItsPeers) {
  Machine machine;
  const auto peer = [&](std::uint32_t replica) {
    proto::ToNode message;
    message.mutable_peers()->add_peers()->set_replica(replica);
    machine.keep(machine.node.on_coordinator_message(message, machine.now));
  };
  peer(1);
  machine.up(1, 0);
  peer(2);
  machine.up(2, 0);
  peer(3);
  ASSERT_EQ(machine.heard[1].size(), 2u);
  EXPECT_EQ(machine.heard[1][0].peers().peers_size(), 2);
  EXPECT_EQ(machine.heard[1][1].peers().peers_size(), 1);
  ASSERT_EQ(machine.heard[2].size(), 1u);
  EXPECT_EQ(machine.heard[2][0].peers().peers_size(), 3);
  EXPECT_EQ(machine.heard[2][0].peers().complete_size(), 1);
}

// A local socket takes no message of any size.
TEST(Node, ManyPeersComeToARankInFragmentsThatCountAsOne) {
  Machine machine;
  machine.up(1, 0);
  proto::ToNode message;
  auto& peers = *message.mutable_peers();
  peers.set_job(7);
  RankSet(0).to(peers.mutable_complete());
  for (std::uint32_t replica = 1; replica <= 500; ++replica) {
    auto& peer = *peers.add_peers();
    peer.set_replica(replica);
    peer.set_incarnation(replica);
    peer.set_card(std::string(kMostCardBytes, 'c'));
  }
  machine.heard.clear();
  machine.keep(machine.node.on_coordinator_message(message, machine.now));
  const auto& heard = machine.heard[1];
  EXPECT_GT(heard.size(), 5u);
  proto::Peers news;
  for (const auto& one : heard) {
    EXPECT_LT(one.ByteSizeLong(), kMostOfPeers + 4096);
    EXPECT_EQ(one.peers().more(), &one != &heard.back());
    news.MergeFrom(one.peers());
  }
  PeerTable table;
  (void)table.apply(news);
  EXPECT_EQ(table.of(0).size(), 500u);
  EXPECT_EQ(RankSet(news.complete(), 8).text(), RankSet(0).text());
}

TEST(Node, ARankThatWasToldOfAllItsPeersAtOnceIsToldOfEachNewOneAlone) {
  Machine machine;
  machine.up(1, 0);
  proto::ToNode all, one;
  RankSet(0).to(all.mutable_peers()->mutable_complete());
  for (std::uint32_t replica : {1u, 2u, 3u}) all.mutable_peers()->add_peers()->set_replica(replica);
  one.mutable_peers()->add_peers()->set_replica(4);
  machine.keep(machine.node.on_coordinator_message(all, machine.now));
  machine.keep(machine.node.on_coordinator_message(one, machine.now));
  ASSERT_EQ(machine.heard[1].size(), 2u);
  EXPECT_EQ(machine.heard[1][0].peers().peers_size(), 3);
  EXPECT_EQ(machine.heard[1][1].peers().peers_size(), 1);
  EXPECT_EQ(machine.heard[1][1].peers().complete_size(), 0);
}

TEST(Node, WhomItsRanksCantConnectWithIsReportedOnceForEachPeer) {
  Machine machine;
  machine.up(1, 0), machine.up(2, 1);
  for (std::uint32_t rank : {0u, 1u}) {
    proto::FromNode message;
    for (std::uint64_t incarnation : {8u, 9u}) {
      auto& one = *message.mutable_links()->add_unreached();
      one.set_rank(rank);
      one.set_incarnation(incarnation);
      one.set_why("no such file");
    }
    machine.keep(machine.node.on_rank_message(RankConnection(rank + 1), message, machine.now));
  }
  ASSERT_TRUE(machine.said.back().has_replica_status());
  const auto& told = machine.said.back().replica_status().unreached();
  ASSERT_EQ(told.size(), 2);
  EXPECT_EQ(told[0].incarnation(), 8u);
  EXPECT_EQ(told[1].why(), "no such file");
}

// A relay was stopped when it had given the first answer: then it heard that the rank was silent, that it came once
// more, as it had yet to hear that answer, and where it stands as who it is by the first.
TEST(Node, WhatIsSaidOfARankBetweenTwoAnswersToItIsSaidAgain) {
  Machine machine;
  const auto registered = [&] {
    proto::ToNode answer;
    answer.mutable_registered()->set_instance(1);
    answer.mutable_registered()->set_incarnation(5);
    machine.said.clear();
    machine.keep(machine.node.on_coordinator_message(answer, machine.now));
    return std::ranges::count_if(machine.said, [](const auto& said) { return said.has_replica_status(); });
  };
  for (const bool is_new : {true, false}) {
    proto::FromNode up, links;
    up.mutable_rank_up()->set_instance(1);
    if (!is_new) up.mutable_rank_up()->set_incarnation(5);
    links.mutable_links()->set_instance(1);
    const RankConnection connection(is_new ? 1 : 2);
    machine.keep(machine.node.on_rank_message(connection, up, machine.now));
    machine.keep(machine.node.on_rank_message(connection, links, machine.now));
    EXPECT_EQ(registered(), 1);
    EXPECT_EQ(registered(), 1) << "one that is known by its incarnation may have been forgotten in between";
    machine.keep(machine.node.on_rank_gone(connection, "silent", Node::Gone::silent));
  }
}

TEST(Node, WhoLeavesIsSaidToHaveLeft) {
  Machine machine;
  machine.up(1, 0);
  machine.said.clear();
  machine.keep(machine.node.on_rank_gone(RankConnection(1), "the job is finished", Node::Gone::left));
  ASSERT_EQ(machine.said.size(), 1u);
  EXPECT_TRUE(machine.said[0].rank_down().ended());
  EXPECT_TRUE(machine.said[0].rank_down().left());
}

// Its daemon knows better by now where others find it.
TEST(Node, TellsWhereARankIsByNowWhenItIntroducesItAgain) {
  Machine machine;
  machine.up(1, 0);
  EXPECT_TRUE(machine.node.move(RankConnection(1), "10.0.0.2:1", "tcp=10.0.0.2:2", "its card"));
  EXPECT_FALSE(machine.node.move(RankConnection(1), "10.0.0.2:1", "tcp=10.0.0.2:2", "its card"));
  EXPECT_TRUE(machine.node.move(RankConnection(1), "10.0.0.2:1", "tcp=10.0.0.2:2", "another card"));
  EXPECT_FALSE(machine.node.move(RankConnection(2), "10.0.0.3:1", "", "")) << "nobody is there";
  machine.said.clear();
  machine.keep(machine.node.on_coordinator_up(machine.now));
  const auto up = std::ranges::find_if(machine.said, &proto::FromNode::has_rank_up);
  ASSERT_NE(up, machine.said.end());
  EXPECT_EQ(up->rank_up().address(), "10.0.0.2:1");
  EXPECT_EQ(up->rank_up().stream_address(), "tcp=10.0.0.2:2");
  EXPECT_EQ(up->rank_up().card(), "another card");
  EXPECT_EQ(up->rank_up().incarnation(), 5u);
}

}  // namespace
}  // namespace rejoin::membership
