// What a relay knows of its daemons, and says of them, when they or the coordinator come, go, or introduce themselves
// again.
#include <gtest/gtest.h>

#include <algorithm>

#include "membership/relay.h"

namespace rejoin::membership {
namespace {

using namespace std::chrono_literals;

// Two daemons of one replica behind a relay.
struct Behind {
  Relay relay{"relay", 1s};
  TimePoint now{1s};
  std::vector<proto::FromNode> said;
  std::map<std::uint64_t, std::vector<proto::ToNode>> heard;  // by node

  Behind() {
    keep(relay.on_coordinator_up(now));
    for (std::uint64_t node : {1, 2}) hello(node);
  }
  void hello(std::uint64_t node, std::uint64_t introduction = 0) {
    proto::FromNode message;
    message.mutable_hello()->set_node("daemon");
    message.mutable_hello()->set_introduction(introduction);
    keep(relay.on_node_message(NodeId(node), message, now));
  }
  void keep(const Relay::Actions& actions) {
    said.insert(said.end(), actions.to_coordinator.begin(), actions.to_coordinator.end());
    for (const auto& [nodes, sent] : actions.to_nodes)
      for (auto node : nodes) heard[node.value].push_back(sent);
  }
  void up(std::uint64_t node, std::uint64_t instance) {
    proto::FromNode message;
    message.mutable_rank_up()->set_instance(instance);
    keep(relay.on_node_message(NodeId(node), message, now));
  }
  void send(const proto::ToNode& message) { keep(relay.on_coordinator_message(message, now)); }
  void registers(std::uint64_t instance, std::uint64_t incarnation) {
    proto::ToNode message;
    message.mutable_registered()->set_instance(instance);
    message.mutable_registered()->set_incarnation(incarnation);
    send(message);
  }
  bool reports_reduction(std::uint64_t node, std::uint64_t incarnation, std::uint64_t epoch) {
    said.clear();
    proto::FromNode message;
    auto& done = *message.mutable_reduced();
    done.set_incarnation(incarnation);
    done.set_epoch(epoch);
    done.set_step(1);
    RankSet(0).to(done.mutable_ranks());
    keep(relay.on_node_message(NodeId(node), message, now));
    return !said.empty();
  }
};

TEST(Relay, DaemonsStayAndIntroduceThemselvesToTheNextCoordinator) {
  Behind relay;
  relay.up(1, 100);
  relay.registers(100, 5);
  relay.heard.clear();
  relay.keep(relay.relay.on_coordinator_down(relay.now));
  EXPECT_FALSE(relay.reports_reduction(1, 5, 1)) << "there is nobody to hear it";
  proto::LeaderView view;
  relay.relay.write_hosts(view);
  ASSERT_EQ(view.hosts_size(), 1) << "whom it speaks for, when it says that the leader is lost";
  EXPECT_EQ(RankSet(view.hosts(0).ranks(), 8), RankSet(0));
  relay.said.clear();
  relay.keep(relay.relay.on_coordinator_up(relay.now));
  ASSERT_EQ(relay.said.size(), 1u);
  EXPECT_TRUE(relay.said[0].has_hello());
  for (std::uint64_t node : {1, 2}) EXPECT_TRUE(relay.heard[node].back().has_introduce());
  EXPECT_FALSE(relay.reports_reduction(1, 5, 1)) << "it was said to the one before";
  relay.hello(1);
  EXPECT_FALSE(relay.reports_reduction(1, 5, 1)) << "so was this";
  relay.hello(1, relay.heard[1].back().introduce().number());
  proto::FromNode again;
  again.mutable_rank_up()->set_instance(100);
  again.mutable_rank_up()->set_incarnation(5);
  relay.keep(relay.relay.on_node_message(NodeId(1), again, relay.now));
  EXPECT_TRUE(relay.said.back().has_rank_up());
  EXPECT_TRUE(relay.reports_reduction(1, 5, 1));
  relay.keep(relay.relay.on_node_lost(NodeId(1), relay.now));
  view.Clear();
  relay.relay.write_hosts(view);
  EXPECT_EQ(view.hosts_size(), 0);
}

TEST(Relay, TellsTheJobThatItsRanksHaveHeardAPlanOfAlsoWithoutACoordinator) {
  Behind relay;
  const auto job = [&] {
    proto::LeaderView view;
    relay.relay.write_hosts(view);
    return view.job();
  };
  relay.up(1, 100);
  proto::ToNode message;
  message.mutable_registered()->set_instance(100);
  message.mutable_registered()->set_incarnation(5);
  message.mutable_registered()->set_job(7);
  relay.send(message);
  EXPECT_EQ(job(), 0u);
  message.mutable_plan()->set_epoch(1);
  message.mutable_plan()->set_job(7);
  relay.send(message);
  EXPECT_EQ(job(), 7u);
  relay.keep(relay.relay.on_coordinator_down(relay.now));
  EXPECT_EQ(job(), 7u);
  relay.keep(relay.relay.on_node_lost(NodeId(1), relay.now));
  EXPECT_EQ(job(), 0u);
  proto::FromNode back;  // to a relay that was started again
  back.mutable_rank_up()->set_instance(100);
  back.mutable_rank_up()->set_incarnation(5);
  back.mutable_rank_up()->set_job(7);
  back.mutable_rank_up()->set_heard_epoch(1);
  relay.keep(relay.relay.on_node_message(NodeId(2), back, relay.now));
  EXPECT_EQ(job(), 7u);
}

// Each job counts its epochs and incarnations from 1: what a stray process reports is not taken for its replica's.
TEST(Relay, RanksOfAnotherJobKeepNoReportBack) {
  for (const bool comes_first : {false, true}) {
    Behind relay;
    const auto plan = [&] {
      proto::ToNode message;
      message.mutable_plan()->set_epoch(1);
      message.mutable_plan()->set_job(7);
      relay.send(message);
    };
    relay.up(1, 100);
    proto::ToNode registered;
    registered.mutable_registered()->set_instance(100);
    registered.mutable_registered()->set_incarnation(5);
    registered.mutable_registered()->set_job(7);
    relay.send(registered);
    if (!comes_first) plan();
    proto::FromNode stray;
    stray.mutable_rank_up()->set_rank(1);
    stray.mutable_rank_up()->set_instance(300);
    stray.mutable_rank_up()->set_incarnation(5);
    stray.mutable_rank_up()->set_job(9);
    stray.mutable_rank_up()->set_heard_epoch(8);
    relay.keep(relay.relay.on_node_message(NodeId(2), stray, relay.now));
    EXPECT_EQ(std::ranges::count_if(relay.said, &proto::FromNode::has_rank_up), 2) << "the coordinator hears of it";
    if (comes_first) plan();
    EXPECT_TRUE(relay.reports_reduction(1, 5, 1));
    EXPECT_FALSE(relay.reports_reduction(2, 5, 8));
    EXPECT_TRUE(relay.reports_reduction(1, 5, 2));
    proto::ToNode evicted;
    evicted.mutable_evicted()->set_incarnation(5);
    evicted.mutable_evicted()->set_job(9);
    relay.send(evicted);
    EXPECT_TRUE(relay.heard[2].back().has_evicted());
    EXPECT_FALSE(relay.heard[1].back().has_evicted());
    EXPECT_TRUE(relay.reports_reduction(1, 5, 3));
  }
}

TEST(Relay, ASecondProcessForAPlaceCostsTheFirstNothingUntilTheCoordinatorSaysSo) {
  for (const bool taken : {false, true}) {
    Behind relay;
    relay.up(1, 100);
    relay.registers(100, 5);
    relay.up(2, 200);
    EXPECT_TRUE(relay.reports_reduction(1, 5, 1));
    proto::ToNode message;
    message.mutable_inquiry()->set_instance(100);
    relay.send(message);
    EXPECT_TRUE(relay.heard[1].back().has_inquiry());
    if (taken) {
      relay.registers(200, 6);
      EXPECT_TRUE(relay.heard[2].back().has_registered());
      EXPECT_TRUE(relay.reports_reduction(2, 6, 2));
    } else {
      message.mutable_refused()->set_instance(200);
      relay.send(message);
      EXPECT_TRUE(relay.heard[2].back().has_refused());
      EXPECT_TRUE(relay.reports_reduction(1, 5, 2)) << "the first is as it was";
    }
  }
}

// Found by the property of random faults: the coordinator had registered it, and nobody ever said that it was gone.
TEST(Relay, WhoTakesAPlaceWhileItsDaemonIsGoneIsSaidToBeGoneAfterTheSilence) {
  Behind relay;
  relay.up(1, 100);
  relay.registers(100, 5);
  relay.up(2, 200);
  relay.keep(relay.relay.on_node_lost(NodeId(2), relay.now));
  relay.registers(200, 6);
  relay.said.clear();
  for (int i = 0; i < 20; ++i) {
    relay.now += 100ms;
    relay.keep(relay.relay.on_tick(relay.now));
  }
  EXPECT_TRUE(std::any_of(relay.said.begin(), relay.said.end(),
                          [](const auto& sent) { return sent.rank_down().instance() == 200; }));
}

// The coordinator has lost another connection of one of its daemons, and asks all again where they stand.
struct AskedAgain : Behind {
  AskedAgain() {
    for (std::uint64_t node : {1, 2}) comes(node);
    for (std::uint64_t node : {1, 2}) stands(node);
    heard.clear(), said.clear();
  }
  void comes(std::uint64_t node) {
    proto::FromNode message;
    message.mutable_rank_up()->set_rank(static_cast<std::uint32_t>(node));
    message.mutable_rank_up()->set_instance(100 * node);
    message.mutable_rank_up()->set_incarnation(5);
    keep(relay.on_node_message(NodeId(node), message, now));
  }
  void stands(std::uint64_t node) {
    proto::FromNode message;
    message.mutable_replica_status()->set_incarnation(5);
    RankSet(static_cast<std::uint32_t>(node)).to(message.mutable_replica_status()->mutable_ranks());
    keep(relay.on_node_message(NodeId(node), message, now));
  }
  void ends(std::uint64_t node) {
    proto::FromNode message;
    message.mutable_rank_down()->set_rank(static_cast<std::uint32_t>(node));
    message.mutable_rank_down()->set_instance(100 * node);
    message.mutable_rank_down()->set_ended(true);
    keep(relay.on_node_message(NodeId(node), message, now));
  }
  void ask() {
    proto::ToNode message;
    message.mutable_introduce();
    send(message);
  }
  std::uint64_t number(std::uint64_t node) { return heard[node].back().introduce().number(); }
  bool said_down(std::uint64_t node) const {
    return std::ranges::any_of(said, [&](const auto& one) { return one.rank_down().instance() == 100 * node; });
  }
};

TEST(Relay, WhoIsLostOrEndsBeforeItHasIntroducedItselfAgainIsReported) {
  AskedAgain relay;
  relay.ask();
  ASSERT_TRUE(relay.said.back().has_hello());
  relay.ends(2);
  EXPECT_TRUE(relay.said_down(2));
  relay.keep(relay.relay.on_node_lost(NodeId(1), relay.now));
  for (int i = 0; i < 20; ++i) {
    relay.now += 100ms;
    relay.keep(relay.relay.on_tick(relay.now));
  }
  EXPECT_TRUE(relay.said_down(1));
}

TEST(Relay, WhoIsAskedTwiceToIntroduceItselfIsHeardBetweenItsAnswers) {
  AskedAgain relay;
  relay.ask();
  const auto first = relay.number(2);
  relay.ask();
  relay.hello(2, first);
  relay.ends(2);
  EXPECT_TRUE(relay.said_down(2));
}

// What the coordinator heard of it last may have come over the connection that it has lost.
TEST(Relay, WhereRanksStandIsSaidAgainToACoordinatorThatAsks) {
  AskedAgain relay;
  relay.ask();
  relay.said.clear();
  for (std::uint64_t node : {1, 2}) {
    relay.hello(node, relay.number(node));
    relay.comes(node);
    relay.stands(node);
  }
  EXPECT_EQ(std::ranges::count_if(relay.said, [](const auto& one) { return one.has_rank_up(); }), 2);
  EXPECT_TRUE(std::ranges::any_of(
      relay.said, [](const auto& one) { return RankSet(one.replica_status().ranks(), 8).size() == 2; }));
}

// Found by the property of random faults: a rank had been told of a new peer, and nobody ever heard of it, since its
// report waited for that of a daemon which had gone to another relay.
TEST(Relay, AReportThatWaitsForADaemonThatHasLeftIsMadeWithoutIt) {
  for (const bool lost : {true, false}) {
    AskedAgain relay;
    relay.comes(2);  // and has yet to say where it stands
    relay.stands(1);
    EXPECT_TRUE(std::ranges::none_of(relay.said, [](const auto& one) { return one.has_replica_status(); }));
    if (lost) relay.keep(relay.relay.on_node_lost(NodeId(2), relay.now));
    else relay.ends(2);
    EXPECT_TRUE(std::ranges::any_of(
        relay.said, [](const auto& one) { return RankSet(one.replica_status().ranks(), 8) == RankSet(1); }));
  }
}

// Found by the property of random faults: it has heard who it is, and then its relay hears what it said before.
TEST(Relay, WhereARankStandsIsPassedOnThoughItHadSaidMeanwhileThatItWasNotRegistered) {
  Behind relay;
  relay.up(1, 100);
  relay.registers(100, 5);
  relay.up(1, 100);
  relay.said.clear();
  proto::FromNode message;
  message.mutable_replica_status()->set_incarnation(5);
  RankSet(0).to(message.mutable_replica_status()->mutable_ranks());
  relay.keep(relay.relay.on_node_message(NodeId(1), message, relay.now));
  EXPECT_TRUE(std::ranges::any_of(relay.said, [](const auto& one) { return one.has_replica_status(); }));
}

}  // namespace
}  // namespace rejoin::membership
