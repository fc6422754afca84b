// What people are told: who is out and why, whom the job waits for, and what is not as it should be.
#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {
namespace {

proto::FromNode hello(const std::string& name) {
  proto::FromNode message;
  message.mutable_hello()->set_node(name);
  message.mutable_hello()->set_address("10.0.0.7:4242");
  return message;
}

void up_on(Bench& bench, std::uint32_t replica, const std::string& node, const std::string& stream,
           std::uint64_t digest = 5) {
  for (std::uint32_t rank = 0; rank < bench.config.ranks; ++rank) {
    auto message = Bench::introduction(replica, rank, 1, rank == 0 ? 5 : digest);
    message.mutable_rank_up()->set_node(node);
    message.mutable_rank_up()->set_stream_address(stream);
    bench.send(replica, message);
  }
}

std::string line_of(const ReplicaOutage& out) {
  return fmt::format("{} for {}: {}; {}", out.replica,
                     out.lasting ? fmt::format("{:.0f} ms", milliseconds(*out.lasting)) : "?", out.why, out.next);
}

TEST(CoordinatorStatus, SaysWhichReplicasAreOutSinceWhenAndWhyAndWhatHasToHappen) {
  Bench bench;
  bench.start();
  EXPECT_TRUE(bench.coordinator.outages(bench.now).empty());
  bench.down(1);
  bench.pass(500ms);
  const auto only = [&](const Bench& of) {
    const auto all = of.coordinator.outages(of.now);
    return all.size() == 1 ? line_of(all.front()) : fmt::format("{} replicas", all.size());
  };
  EXPECT_EQ(only(bench), "1 for 500 ms: rank 1: killed; its trainers have to be started again");

  bench.rank_up(1, 0, 2, 0);
  EXPECT_EQ(only(bench), "1 for 500 ms: rank 1: killed; 1 of its 2 ranks have registered again, rank 1 has not");
  bench.rank_up(1, 1, 2, 0);
  EXPECT_EQ(only(bench), "1 for 500 ms: rank 1: killed; it has registered, and connects with the others");
  bench.link_all();
  EXPECT_EQ(only(bench), "1 for 500 ms: rank 1: killed; it has registered, and is admitted after step 1");

  Bench again(bench.log);
  EXPECT_EQ(only(again), "1 for ?: rank 1: killed; its trainers have to be started again");
  for (auto replica : {0u, 2u}) bench.reduced(replica);
  EXPECT_EQ(only(bench), "0 replicas") << "it catches up";
}

TEST(CoordinatorStatus, WhoIsSilentAndMayBeTakenBackIsOutForThat) {
  Bench bench;
  bench.start();
  bench.pass(1500ms, {0, 2});
  const auto all = bench.coordinator.outages(bench.now);
  ASSERT_EQ(all.size(), 1u);
  EXPECT_TRUE(all[0].why.starts_with("it is silent")) << all[0].why;
  EXPECT_EQ(all[0].next, "it may be taken back until step 1 is committed");
}

TEST(CoordinatorStatus, WhoseNodeIsGoneIsOutForThat) {
  Bench bench;
  for (std::uint32_t replica = 0; replica < 3; ++replica) {
    const auto node = fmt::format("node{}", replica);
    bench.send(replica, hello(node));
    up_on(bench, replica, node, "");
  }
  bench.link_all();
  bench.keep(bench.coordinator.on_node_lost(NodeId(1), bench.now));
  bench.pass(1500ms, {0, 2});
  const auto all = bench.coordinator.outages(bench.now);
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].why, "it is silent: rank 0: its node node1 is not connected");
  for (auto replica : {0u, 2u}) bench.reduced(replica);
  EXPECT_TRUE(bench.coordinator.outages(bench.now).at(0).next.starts_with("its daemon has to reach this coordinator"));
}

// That it was another coordinator that led before is nothing which this one knows of.
TEST(CoordinatorStatus, WhoDoesNotComeBackToTheOneThatLeadsNowIsNotSaidToHaveEnded) {
  Bench bench;
  bench.start();
  Bench next(bench.log);
  next.incarnations = bench.incarnations;
  for (auto replica : {0u, 2u}) next.back(replica, replica);
  next.pass(1500ms, {0, 2});
  EXPECT_NE(next.warnings.find("replica 1 is out: it did not come back after a change or restart of the coordinator"),
            std::string::npos)
      << next.warnings;
  for (auto replica : {0u, 2u}) next.reduced(replica);
  const auto all = next.coordinator.outages(next.now);
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].why, "it did not come back after a change or restart of the coordinator");
  EXPECT_EQ(all[0].next,
            "its daemon has to reach this coordinator (see that it runs, and has all coordinators in --connect), and "
            "then its trainers have to be started again");
  const std::string of_before = "it did not come back after the coordinator's restart";
  auto log = bench.log;
  log.insert(log.end(), next.log.begin(), next.log.end());
  for (auto& record : log)
    if (record.has_epoch() && record.epoch().reason().starts_with("without those"))
      record.mutable_epoch()->set_reason("without replica 1: " + of_before);
  Bench later(log);
  const auto known = later.coordinator.outages(later.now);
  ASSERT_EQ(known.size(), 1u);
  EXPECT_EQ(known[0].why, of_before) << "as an older release wrote it";
  EXPECT_EQ(known[0].next, all[0].next);
}

// The moment from which a step is waited for begins with this coordinator.
TEST(CoordinatorStatus, AfterARestartNobodyHasBeenWaitedForSinceTheMachineWasStarted) {
  Bench bench;
  bench.start();
  bench.steps(2);
  Bench again(bench.log);
  EXPECT_TRUE(again.waits_for("its reduction of step 3, for 0 ms"));
}

TEST(CoordinatorStatus, ATrainerThatIsSilentIsToldFromANodeOrARelayThatIs) {
  Bench bench;
  const char* connections[] = {"node0", "node1", "relay2"};
  for (std::uint32_t replica = 0; replica < 3; ++replica) {
    bench.send(replica, hello(connections[replica]));
    up_on(bench, replica, fmt::format("node{}", replica), "");
  }
  bench.link_all();
  proto::FromNode silent;
  auto& down = *silent.mutable_rank_down();
  down.set_rank(1);
  down.set_instance(101);
  down.set_reason("its process gave no sign of life for 1000 ms");
  // The last one that has the state: the others are gone.
  for (auto replica : {1u, 2u}) bench.down(replica);
  bench.send(0, silent);
  EXPECT_TRUE(bench.waits_for("rank 1 has not been heard for 1000 ms: its process gave no sign of life for 1000 ms"));
  EXPECT_FALSE(bench.waits_for("not connected"));

  Bench lost;
  for (std::uint32_t replica = 0; replica < 3; ++replica) {
    lost.send(replica, hello(connections[replica]));
    up_on(lost, replica, fmt::format("node{}", replica), "");
  }
  lost.link_all();
  for (std::uint64_t node : {1, 2}) lost.keep(lost.coordinator.on_node_lost(NodeId(node), lost.now));
  EXPECT_TRUE(lost.waits_for("rank 0 has not been heard for 0 ms: its node node1 is not connected"));
  EXPECT_TRUE(lost.waits_for("relay relay2, through which its node node2 reports, is not connected"));
}

TEST(CoordinatorStatus, SeveralLastHoldersThatAreSilentAreNamedTogether) {
  Bench bench;
  bench.start();
  for (std::uint64_t node : {0, 1, 2}) bench.keep(bench.coordinator.on_node_lost(NodeId(node), bench.now));
  EXPECT_TRUE(bench.waits_for("replicas 0, 1, 2: they are silent, and nobody else has the state of step 0"));
}

TEST(CoordinatorStatus, ANodeThatWasSilentIsNamedWithItsAddress) {
  Bench bench;
  bench.start();
  bench.send(1, hello("node1"));
  bench.pass(1500ms, {0, 2});
  EXPECT_NE(bench.warnings.find("node node1 at 10.0.0.7:4242 was silent for 1000 ms"), std::string::npos)
      << bench.warnings;
}

TEST(CoordinatorStatus, DaemonsWithDifferentTransportsAreNamedAsSoonAsTheyAreKnown) {
  Bench bench;
  up_on(bench, 0, "node0", "shm=a");
  up_on(bench, 1, "node1", "shm=b");
  EXPECT_EQ(bench.warnings, "");
  EXPECT_TRUE(bench.coordinator.alarms().empty());
  up_on(bench, 2, "node2", "tcp=c");
  const std::string what =
      "replica 2 rank 0: its daemon's catch-up stream goes over tcp, and that of replica 0 over shm: neither can catch "
      "up from the other. Start all daemons of a job with the same --transport";
  EXPECT_NE(bench.warnings.find(what), std::string::npos) << bench.warnings;
  EXPECT_EQ(bench.coordinator.alarms(), std::vector<std::string>{what});
}

TEST(CoordinatorStatus, WhoComesWithAnotherStateThanTheOthersIsNamed) {
  Bench bench;
  up_on(bench, 0, "node0", "", 6);
  for (auto replica : {1u, 2u}) up_on(bench, replica, "node", "");
  bench.link_all();
  ASSERT_EQ(bench.contributors(), 2u);
  const std::string what =
      "replica 0 has come with another state of step 0 than replicas 1, 2 (on rank 1): it takes over theirs. Give all "
      "replicas the same initial weights, or the same checkpoint";
  EXPECT_NE(bench.warnings.find(what), std::string::npos) << bench.warnings;
  EXPECT_EQ(bench.coordinator.alarms(), std::vector<std::string>{what});
  bench.caught_up(0);
  bench.steps(1);
  EXPECT_NE(bench.news.find("replica 0 has caught up, and contributes from step 2 on"), std::string::npos)
      << bench.news;
}

TEST(CoordinatorStatus, AnOlderCheckpointIsNoAlarm) {
  Bench bench;
  bench.up(0, 1, 3);
  bench.up(1, 1, 3);
  bench.up(2, 1, 2, 6);
  bench.link_all();
  EXPECT_TRUE(bench.coordinator.alarms().empty());
  EXPECT_NE(bench.news.find("replica 2 has come with the state of step 2, and catches up"), std::string::npos);
}

// Whoever has just been put out loses its connections: that is no news.
TEST(CoordinatorStatus, ThatAReplicaWhichIsOutLosesItsConnectionsIsNoWarning) {
  Bench bench;
  bench.start();
  bench.accuse(0, 1);
  bench.pass(500ms);
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  const auto unreached = [&](std::uint32_t replica) {
    proto::FromNode message;
    auto& status = *message.mutable_replica_status();
    status.set_replica(replica);
    status.set_incarnation(bench.incarnations[replica]);
    RankSet(0).to(status.mutable_ranks());
    auto& one = *status.add_unreached();
    one.set_incarnation(bench.incarnations[0]);
    one.set_why("the peer is gone");
    bench.send(replica, message);
  };
  unreached(1);
  EXPECT_EQ(bench.warnings.find("can't connect"), std::string::npos) << bench.warnings;
  EXPECT_FALSE(bench.waits_for("can't connect"));

  bench.down(2);
  bench.up(2, 2);
  unreached(2);
  EXPECT_NE(bench.warnings.find("replica 2 rank 0: it can't connect with replica 0 rank 0: the peer is gone"),
            std::string::npos)
      << "of one that comes it is";
}

TEST(CoordinatorStatus, HowReplicasDifferIsToldWhenItIsKnown) {
  Bench bench;
  bench.up(0);
  bench.up(1, 1, 0, 5, 8);
  EXPECT_EQ(bench.warnings, "");
  bench.declare(0, 7);
  bench.declare(1, 8);
  EXPECT_EQ(bench.warnings.find("is not known"), std::string::npos) << bench.warnings;
  EXPECT_NE(bench.warnings.find("replica 0 and replica 1: they declare different things"), std::string::npos)
      << bench.warnings;

  Bench mute;
  mute.up(0);
  mute.up(1, 1, 0, 5, 8);
  mute.pass(600ms);
  EXPECT_NE(mute.warnings.find("where, is not known here"), std::string::npos) << "nor does it wait for ever";
}

TEST(CoordinatorStatus, EachLineNamesWhatIsWaitedFor) {
  Bench bench;
  bench.start();
  bench.steps(3);
  for (std::uint32_t r : {0u, 1u, 2u}) bench.down(r);
  for (std::uint32_t r : {0u, 1u, 2u}) bench.up(r, 2, 2);
  bench.link_all();
  EXPECT_TRUE(bench.waits_for("a later checkpoint, or an operator's word: step 3 is committed"));
}

// After a restart, all came from an older checkpoint, one by one: with each the log has an epoch less of those who had
// been there before. All but the last have registered by then; none has been a member.
TEST(CoordinatorStatus, WhoWaitsForAnOperatorsWordIsNotPutOutByTheCoordinatorThatBringsIt) {
  Bench bench;
  bench.start();
  bench.steps(3);
  Bench again(bench.log);
  for (std::uint32_t r : {1u, 0u, 2u}) again.up(r, 2, 2);
  again.pass(1100ms);  // nobody else has come back
  again.link_all();
  EXPECT_EQ(again.coordinator.wants_roll_back(), Step(2));
  auto log = bench.log;
  log.insert(log.end(), again.log.begin(), again.log.end());

  Bench told(log, {.roll_back_to = Step(2)});
  told.incarnations = again.incarnations;
  for (std::uint32_t replica : {0u, 1u, 2u})
    for (std::uint32_t rank = 0; rank < told.config.ranks; ++rank) {
      auto message = Bench::introduction(replica, rank, 2);
      auto& up = *message.mutable_rank_up();
      up.set_incarnation(again.incarnations[replica]);
      up.set_version(2);
      auto& trained = *up.add_trained();
      trained.set_end(60);
      told.send(replica, message);
    }
  told.link_all();
  EXPECT_FALSE(told.evicted_anybody());
  EXPECT_EQ(told.contributors(), 3u);
  EXPECT_EQ(told.coordinator.committed(), Step(2));
}

// Who has been a member, and is none any more, hears what its replica was put out for.
TEST(CoordinatorStatus, WhoComesBackAfterItWasPutOutHearsWhy) {
  Bench bench;
  bench.start();
  const auto before = bench.incarnations;
  bench.down(1);
  for (auto replica : {0u, 2u}) bench.reduced(replica);
  bench.inbox.clear();
  bench.back_with(1, 0, 1, 1);
  ASSERT_TRUE(bench.evicted_anybody());
  EXPECT_EQ(bench.inbox[1].back().evicted().reason(), "the others went on without it (rank 1: killed)");
  EXPECT_NE(bench.warnings.find("replica 1 rank 0, which has come back, is sent away"), std::string::npos);
}

TEST(Coordinator, ANodeWithAnotherSilenceIsNamed) {
  Bench bench;
  bench.start();
  const auto hello = [&](std::uint64_t node, std::uint64_t silence_ms) {
    proto::FromNode message;
    message.mutable_hello()->set_node(fmt::format("n{}", node));
    message.mutable_hello()->set_address("10.0.0.7:1");
    message.mutable_hello()->set_silence_ms(silence_ms);
    bench.send(node, message);
  };
  hello(0, 1000), hello(1, 0);
  EXPECT_TRUE(bench.coordinator.alarms().empty());
  hello(2, 20'000);
  ASSERT_EQ(bench.coordinator.alarms().size(), 1u);
  EXPECT_EQ(bench.coordinator.alarms()[0],
            "node n2 at 10.0.0.7:1 has --silence-ms 20000, and the coordinator 1000: give all processes of the job the "
            "same");
}

}  // namespace
}  // namespace rejoin::membership
