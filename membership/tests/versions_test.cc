// Two releases in one job: who may speak with whom, and what all members are taken to speak.
#include "membership/versions.h"

#include "base/release.h"
#include "membership/greeting.h"
#include "membership/leader_tracker.h"
#include "membership/node.h"
#include "membership/relay.h"
#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {
namespace {

using namespace std::string_view_literals;

// As a node of protocol 15 says it, byte by byte: FromNode { hello { protocol: 15, node: "n1" } }.
constexpr std::string_view kOldHello = "\x0a\x06\x08\x0f\x12\x02n1"sv;

proto::NodeHello hello_of(std::uint32_t protocol, std::uint32_t newest = 0) {
  proto::NodeHello hello;
  hello.set_node("n1");
  hello.set_protocol(protocol);
  hello.set_newest(newest);
  return hello;
}

TEST(Versions, TwoEndsSpeakTheNewestThatBothDo) {
  EXPECT_EQ(agreed({15, 16}, {15, 15}), 15u);
  EXPECT_EQ(agreed({15, 16}, {15, 16}), 16u);
  EXPECT_EQ(agreed({15, 16}, {16, 17}), 16u);
  EXPECT_EQ(agreed({15, 16}, {14, 14}), std::nullopt);
  EXPECT_EQ(agreed({15, 16}, {17, 17}), std::nullopt);
  EXPECT_EQ(agreed({15, 16}, {0, 0}), std::nullopt);
  EXPECT_FALSE(Spoken().may(Feature::welcome));
  EXPECT_TRUE(Spoken(16).may(Feature::welcome));
  EXPECT_EQ(Spoken::through(16, Spoken(15)).version(), 15u);
  EXPECT_EQ(Spoken::through(0, Spoken(16)).version(), 15u);
}

TEST(Versions, AHelloOfProtocol15IsTakenAndNotAnsweredWithWhatItDoesNotKnow) {
  proto::FromNode message;
  ASSERT_TRUE(message.ParseFromArray(kOldHello.data(), static_cast<int>(kOldHello.size())));
  const auto greeting = greet(message.hello(), "10.0.0.7:1");
  ASSERT_TRUE(greeting.spoken);
  EXPECT_EQ(greeting.spoken->version(), 15u);
  EXPECT_FALSE(greeting.answer);
}

// One of protocol 15 compares the field `protocol` with 15, and passes over fields that it doesn't know.
TEST(Versions, WhatThisReleaseSaysFirstIsTakenByOneOfProtocol15) {
  Node node("n", 1s, 1);
  Relay relay("r", 1s);
  LeaderTracker tracker("n", 1s, 2, [](proto::LeaderView&) {});
  const auto from_node = node.on_coordinator_up(TimePoint{1s}).to_coordinator;
  const auto from_relay = relay.on_coordinator_up(TimePoint{1s}).to_coordinator;
  const auto from_tracker = tracker.on_connected(1, TimePoint{1s}).send;
  for (const auto& message : {from_node.at(0), from_relay.at(0), from_tracker.at(0).second}) {
    ASSERT_TRUE(message.has_hello());
    const std::string bytes = message.SerializeAsString();
    EXPECT_EQ(bytes[2], '\x08') << "field 1";
    EXPECT_EQ(bytes[3], '\x0f') << "is 15";
    EXPECT_EQ(message.hello().newest(), 16u);
    EXPECT_EQ(message.hello().release(), release());
  }
}

TEST(Versions, ANodeOfAnotherVersionIsToldWhoIsToBeUpgraded) {
  const auto newer = greet(hello_of(17), "10.0.0.7:1");
  EXPECT_FALSE(newer.spoken);
  EXPECT_EQ(newer.refusal,
            "node n1 at 10.0.0.7:1 speaks protocol 17, and its coordinator or relay 15 to 16: upgrade its coordinator "
            "or relay first, to a release that speaks protocol 17");
  ASSERT_TRUE(newer.answer);
  EXPECT_EQ(newer.answer->welcome().refusal(), newer.refusal);
  const auto older = greet(hello_of(14), "10.0.0.7:1");
  EXPECT_FALSE(older.spoken);
  EXPECT_EQ(older.refusal,
            "node n1 at 10.0.0.7:1 speaks protocol 14, and its coordinator or relay 15 to 16: upgrade node n1 at "
            "10.0.0.7:1 first, to a release that speaks protocol 15 to 16");
  EXPECT_FALSE(older.answer) << "it does not know that message";
  const auto next = greet(hello_of(16, 17), "10.0.0.7:1");
  ASSERT_TRUE(next.spoken);
  EXPECT_EQ(next.spoken->version(), 16u);
}

TEST(Greeting, ARelayIsTakenByACoordinatorAndNotByARelay) {
  proto::NodeHello relay = hello_of(15, 16);
  relay.set_relay(true);
  EXPECT_TRUE(greet(relay, "10.0.0.7:1").spoken);
  const auto refused = greet(relay, "10.0.0.7:1", {}, false);
  EXPECT_FALSE(refused.spoken);
  EXPECT_TRUE(refused.misplaced);
  ASSERT_TRUE(refused.answer);
  EXPECT_EQ(refused.answer->welcome().refusal(),
            "relay n1 at 10.0.0.7:1 has come to a relay, or to itself; give it the coordinator's address");
  EXPECT_TRUE(greet(hello_of(15, 16), "10.0.0.7:1", {}, false).spoken);
}

// ---- what all members speak

struct Mixed : Bench {
  using Bench::Bench;
  std::uint32_t spoken[3] = {16, 16, 16};  // with the ranks of each replica, by what their daemons say
  void hello(std::uint64_t node, std::uint32_t newest) {
    proto::FromNode message;
    *message.mutable_hello() = hello_of(15, newest);
    send(node, message);
  }
  void up_all() {
    for (std::uint32_t replica = 0; replica < 3; ++replica) hello(replica, 16);
    for (std::uint32_t replica = 0; replica < 3; ++replica) come(replica, 1, false);
    link_all();
  }
  void come(std::uint32_t replica, std::uint64_t instance, bool again) {
    for (std::uint32_t rank = 0; rank < config.ranks; ++rank) {
      auto message = introduction(replica, rank, instance);
      if (again) message.mutable_rank_up()->set_incarnation(incarnations[replica]);
      message.mutable_rank_up()->set_speaks(spoken[replica]);
      send(replica, message);
    }
  }
  std::uint32_t protocol() const { return coordinator.protocol().version(); }
  // As the log has it.
  std::uint32_t recovered(const std::vector<proto::LogRecord>& from) const {
    Coordinator other(config);
    const auto taken = other.recover(from, now);
    EXPECT_TRUE(taken) << taken.error().message;
    return other.protocol().version();
  }
  std::uint32_t told() const {  // with the last plan
    for (auto one = inbox.at(0).rbegin(); one != inbox.at(0).rend(); ++one)
      if (one->has_plan()) return one->plan().protocol();
    return 0;
  }
};

TEST(CoordinatorVersions, MembersThatSpeakTheSameBeginWithIt) {
  Mixed job;
  job.up_all();
  ASSERT_EQ(job.coordinator.epoch().value, 1u);
  EXPECT_EQ(job.protocol(), 16u);
  EXPECT_EQ(job.told(), 16u);
  EXPECT_EQ(job.recovered(job.log), 16u);
  EXPECT_EQ(job.recovered({job.coordinator.snapshot()}), 16u);
  job.steps(3);
  EXPECT_EQ(job.coordinator.epoch().value, 1u);
}

// A daemon that is started again as the newer one brings its ranks back, who are of the newer release themselves.
TEST(CoordinatorVersions, WhenTheLastMemberSpeaksTheNewerOneAnEpochOfTheSameMembersBeginsAtTheNextStep) {
  Mixed job;
  job.spoken[1] = 15;
  job.up_all();
  EXPECT_EQ(job.protocol(), 15u);
  EXPECT_EQ(job.told(), 0u) << "as one of protocol 15 says it";
  EXPECT_FALSE(job.log.back().epoch().protocol());
  job.steps(1);
  job.spoken[1] = 16;
  job.come(1, 1, true);
  EXPECT_EQ(job.coordinator.epoch().value, 1u);
  job.steps(1);
  EXPECT_EQ(job.coordinator.epoch().value, 2u);
  EXPECT_EQ(job.coordinator.committed().value, 2u);
  EXPECT_EQ(job.protocol(), 16u);
  EXPECT_EQ(job.told(), 16u);
  EXPECT_EQ(job.coordinator.members().size(), 3u);
  EXPECT_NE(job.news.find("from epoch 2 on all members speak protocol 16, until then 15"), std::string::npos);
  EXPECT_EQ(job.recovered(job.log), 16u);
  job.steps(1);
  EXPECT_EQ(job.coordinator.epoch().value, 2u);
}

TEST(CoordinatorVersions, WhenAMemberComesBackThroughAnOlderDaemonTheStepIsRepeatedAtOnceInTheOlderOne) {
  Mixed job;
  job.up_all();
  job.steps(1);
  job.hello(2, 0);  // the same ranks, over a connection that speaks 15
  job.come(2, 1, true);
  EXPECT_EQ(job.coordinator.epoch().value, 2u);
  EXPECT_EQ(job.coordinator.committed().value, 1u);
  EXPECT_EQ(job.protocol(), 15u);
  EXPECT_EQ(job.coordinator.members().size(), 3u);
  job.steps(1);
  EXPECT_EQ(job.coordinator.committed().value, 2u);
  EXPECT_EQ(job.recovered(job.log), 15u);
}

// Found by the simulator: a coordinator that was started again took one back that it had not heard, in an epoch of the
// newer protocol, which had begun without it.
TEST(CoordinatorVersions, WhoIsOutForNowMayBeTakenBackAndCountsUntilItIsOutForGood) {
  Mixed job;
  job.spoken[0] = 15;
  job.up_all();
  job.steps(1);
  job.pass(1500ms, {1, 2});
  ASSERT_EQ(job.contributors(), 2u);
  ASSERT_EQ(job.coordinator.suspended().size(), 1u);
  EXPECT_EQ(job.protocol(), 15u);
  EXPECT_EQ(job.recovered(job.log), 15u);
  for (int step = 0; step < 2; ++step)
    for (const std::uint32_t replica : {1u, 2u}) job.reduced(replica);
  EXPECT_EQ(job.coordinator.suspended().size(), 0u);
  EXPECT_EQ(job.coordinator.committed().value, 3u);
  EXPECT_EQ(job.protocol(), 16u);
}

// Of several coordinators any may take over.
TEST(CoordinatorVersions, ACoordinatorThatMayTakeOverCountsAsWell) {
  Mixed job;
  job.coordinator.set_protocol_of_coordinators(Spoken());
  job.up_all();
  EXPECT_EQ(job.protocol(), 15u);
  job.coordinator.set_protocol_of_coordinators(Spoken(16));
  job.steps(1);
  EXPECT_EQ(job.protocol(), 16u);
  job.coordinator.set_protocol_of_coordinators(Spoken());
  job.pass(200ms);
  EXPECT_EQ(job.protocol(), 15u);
}

TEST(CoordinatorVersions, OneThatIsStartedAgainKeepsTheEpochsProtocolUntilItsMembersAreBack) {
  Mixed job;
  job.up_all();
  job.steps(1);
  Mixed again(job.log);
  again.incarnations = job.incarnations;
  EXPECT_EQ(again.protocol(), 16u);
  for (std::uint32_t replica = 0; replica < 3; ++replica) again.hello(replica, 16);
  again.come(0, 1, true);
  again.pass(200ms);
  EXPECT_EQ(again.protocol(), 16u);
  again.spoken[1] = 15;
  again.come(1, 1, true);
  again.come(2, 1, true);
  again.pass(200ms);
  EXPECT_EQ(again.protocol(), 15u);
  EXPECT_EQ(again.coordinator.members().size(), 3u);
}

TEST(CoordinatorVersions, ARecordOfALaterReleaseIsRefusedWithWhatToDo) {
  proto::LogRecord later;
  ASSERT_TRUE(later.ParseFromString(std::string("\xd2\x0f\x00"sv)));  // field 250
  const auto replayed = Coordinator(Bench().config).replay(later);
  ASSERT_FALSE(replayed);
  EXPECT_NE(replayed.error().message.find("a later one has written it"), std::string::npos) << replayed.error().message;
}

TEST(CoordinatorVersions, ARelayPassesOnNoMoreThanTheDaemonSpeaks) {
  Relay relay("r", 1s);
  (void)relay.on_coordinator_up(TimePoint{1s});
  const auto passed = [&](std::uint32_t newest, std::uint32_t speaks) {
    proto::FromNode hello, up;
    *hello.mutable_hello() = hello_of(15, newest);
    hello.mutable_hello()->set_introduction(1);
    up.mutable_rank_up()->set_speaks(speaks);
    const NodeId node(newest);
    (void)relay.on_node_message(node, hello, TimePoint{1s});
    proto::ToNode again;
    again.mutable_introduce()->set_number(9);
    const auto asked = relay.on_coordinator_message(again, TimePoint{1s});
    hello.mutable_hello()->set_introduction(asked.to_nodes.at(0).second.introduce().number());
    (void)relay.on_node_message(node, hello, TimePoint{1s});
    return relay.on_node_message(node, up, TimePoint{1s}).to_coordinator.at(0).rank_up().speaks();
  };
  EXPECT_EQ(passed(16, 16), 16u);
  EXPECT_EQ(passed(0, 16), 15u);
  EXPECT_EQ(passed(16, 0), 15u);
}

// ---- what a node tells of the coordinators

TEST(LeaderTrackerVersions, TellsTheLowestOfTheCoordinatorsThatItHasReached) {
  LeaderTracker tracker("n", 1s, 2, [](proto::LeaderView&) {});
  TimePoint now{1s};
  proto::ToNode welcome, leads;
  welcome.mutable_welcome()->set_oldest(15);
  welcome.mutable_welcome()->set_newest(16);
  leads.mutable_leads()->set_term(1);
  const auto view = [&](const LeaderTracker::Actions& actions) -> std::uint32_t {
    for (const auto& [to, message] : actions.send)
      if (message.has_leader_view()) return message.leader_view().coordinators();
    return 99;
  };
  (void)tracker.on_connected(0, now);
  (void)tracker.on_message(0, welcome, now);
  EXPECT_EQ(view(tracker.on_message(0, leads, now)), 16u);
  (void)tracker.on_connected(1, now);
  EXPECT_EQ(view(tracker.on_message(1, leads, now)), 15u) << "it leaves the welcome out";
  (void)tracker.on_disconnected(1, now);
  (void)tracker.on_connected(1, now);
  (void)tracker.on_message(1, welcome, now);
  EXPECT_EQ(view(tracker.on_message(1, leads, now)), 16u) << "it has been upgraded";
}

}  // namespace
}  // namespace rejoin::membership
