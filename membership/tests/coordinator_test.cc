#include "membership/coordinator.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "membership/log.h"
#include "membership/rank.h"

namespace rejoin::membership {
namespace {

using namespace std::chrono_literals;

// Drives a coordinator by hand: one node for each replica.
struct Told {
  std::optional<Step> roll_back_to = {};
  std::uint64_t steps = 0, id = 77;
  std::optional<JobConfig::Drop> drop = {};
};
struct Bench {
  JobConfig config{.replicas = 3, .ranks = 2, .batch = 10, .steps = 0, .silence = 1s};
  Coordinator coordinator;
  TimePoint now{1s};
  std::vector<proto::LogRecord> log;
  std::map<std::uint64_t, std::vector<proto::ToNode>> inbox;
  std::map<std::uint32_t, std::uint64_t> incarnations;
  std::vector<std::uint64_t> closed;  // connections

  explicit Bench(const std::vector<proto::LogRecord>& earlier = {}, Told told = {}) : coordinator(configured(told)) {
    const auto recovered = coordinator.recover(earlier, now);
    EXPECT_TRUE(recovered) << recovered.error().message;
    keep(coordinator.on_tick(now));
  }
  JobConfig configured(const Told& told) {
    config.roll_back_to = told.roll_back_to;
    config.steps = told.steps;
    config.id = told.id;
    config.drop = told.drop;
    return config;
  }

  // Time goes by, tick by tick; these nodes are heard in it.
  void pass(Duration time, const std::vector<std::uint64_t>& heard = {0, 1, 2}) {
    for (const TimePoint until = now + time; now < until;) {
      now += config.silence / 16;
      for (auto node : heard) {
        proto::FromNode heartbeat;
        heartbeat.mutable_heartbeat();
        send(node, heartbeat);
      }
      keep(coordinator.on_tick(now));
    }
  }
  void steps(int count) {
    for (int i = 0; i < count; ++i)
      for (std::uint32_t replica = 0; replica < 3; ++replica) reduced(replica);
  }
  // Its ranks come back as who they were, through this node.
  void back(std::uint32_t replica, std::uint64_t node, std::uint64_t instance = 1) {
    for (std::uint32_t rank = 0; rank < config.ranks; ++rank) back_with(replica, rank, node, instance);
  }
  void back_with(std::uint32_t replica, std::uint32_t rank, std::uint64_t node, std::uint64_t instance) {
    auto message = introduction(replica, rank, instance);
    message.mutable_rank_up()->set_incarnation(incarnations[replica]);
    send(node, message);
  }
  // … as ranks that have heard all of what another coordinator has decided.
  void back_from(const Bench& other, std::uint32_t replica) {
    for (std::uint32_t rank = 0; rank < config.ranks; ++rank) {
      auto message = introduction(replica, rank, 1);
      auto& up = *message.mutable_rank_up();
      up.set_incarnation(other.incarnations.at(replica));
      up.set_job(other.coordinator.job());
      up.set_heard_epoch(other.coordinator.epoch().value);
      up.set_heard_committed(other.coordinator.committed().value);
      send(replica, message);
    }
  }
  bool evicted_anybody() const {
    for (const auto& [node, told] : inbox)
      if (std::any_of(told.begin(), told.end(), [](const auto& sent) { return sent.has_evicted(); })) return true;
    return false;
  }
  std::string refusal(std::uint64_t node) {  // that came over it last
    std::string last;
    for (const auto& sent : inbox[node])
      if (sent.has_refused()) last = sent.refused().reason();
    return last;
  }
  bool asked_to_declare(std::uint64_t node) {
    return std::any_of(inbox[node].begin(), inbox[node].end(), [](const auto& sent) { return sent.has_declare(); });
  }
  // One tensor, of so many elements.
  void declare(std::uint32_t replica, std::uint64_t count, std::uint64_t instance = 1) {
    proto::FromNode message;
    auto& told = *message.mutable_declaration();
    told.set_replica(replica);
    told.set_instance(instance * 100);
    auto& tensor = *told.add_tensors();
    tensor.set_name("w");
    tensor.set_type("float32");
    tensor.set_count(count);
    tensor.set_moments(1);
    tensor.set_elementwise(true);
    send(replica, message);
  }
  bool waits_for(const std::string& what) const {
    const auto lines = coordinator.waiting_for(now);
    return std::any_of(lines.begin(), lines.end(),
                       [&](const std::string& line) { return line.find(what) != std::string::npos; });
  }

  void keep(const Actions& actions) {
    log.insert(log.end(), actions.append.begin(), actions.append.end());
    for (const auto& node : actions.close) closed.push_back(node.value);
    for (const auto& [node, message] : actions.send) {
      inbox[node.value].push_back(message);
      if (message.has_registered()) incarnations[message.registered().replica()] = message.registered().incarnation();
    }
  }
  void send(std::uint64_t node, const proto::FromNode& message) {
    keep(coordinator.on_message(NodeId(node), message, now));
  }
  void up(std::uint32_t replica, std::uint64_t instance = 1, std::uint64_t version = 0, std::uint64_t digest = 5,
          std::uint64_t plan = 9) {
    for (std::uint32_t rank = 0; rank < config.ranks; ++rank) rank_up(replica, rank, instance, version, digest, plan);
  }
  void rank_up(std::uint32_t replica, std::uint32_t rank, std::uint64_t instance, std::uint64_t version,
               std::uint64_t digest = 5, std::uint64_t plan = 9) {
    auto message = introduction(replica, rank, instance, digest, plan);
    message.mutable_rank_up()->set_version(version);
    // As of a job in which all three replicas have contributed to every step.
    Samples trained;
    trained.add(0, version * 30);
    trained.to(message.mutable_rank_up()->mutable_trained());
    send(replica, message);
  }
  // Its ranks come with the checkpoint of a step up to which these samples are trained.
  void bring(std::uint32_t replica, std::uint64_t version, const Batch& trained, std::uint64_t instance = 1) {
    for (std::uint32_t rank = 0; rank < config.ranks; ++rank) {
      auto message = introduction(replica, rank, instance);
      message.mutable_rank_up()->set_version(version);
      Samples samples;
      add(samples, trained);
      samples.to(message.mutable_rank_up()->mutable_trained());
      send(replica, message);
    }
  }
  std::string refused(std::uint64_t node) const {
    if (!inbox.contains(node)) return "";
    for (const auto& sent : inbox.at(node))
      if (sent.has_refused()) return sent.refused().reason();
    return "";
  }
  static proto::FromNode introduction(std::uint32_t replica, std::uint32_t rank, std::uint64_t instance,
                                      std::uint64_t digest = 5, std::uint64_t plan = 9) {
    proto::FromNode message;
    auto& up = *message.mutable_rank_up();
    up.set_replica(replica);
    up.set_rank(rank);
    up.set_instance(instance * 100 + rank);
    up.set_digest(digest);
    up.set_plan_hash(plan);
    return message;
  }
  // Each rank of each replica with all others.
  void link_all() {
    for (std::uint32_t replica = 0; replica < config.replicas; ++replica)
      for (std::uint32_t rank = 0; rank < config.ranks; ++rank) stand(replica, rank, false);
  }
  void stand(std::uint32_t replica, std::uint32_t rank, bool caught_up) {
    proto::FromNode message;
    auto& status = *message.mutable_replica_status();
    status.set_replica(replica);
    status.set_incarnation(incarnations[replica]);
    status.set_caught_up(caught_up);
    RankSet(rank).to(status.mutable_ranks());
    for (const auto& [other, incarnation] : incarnations)
      if (other != replica) status.add_links(incarnation);
    send(replica, message);
  }
  void reduced(std::uint32_t replica) { reduced(replica, replica); }
  void reduced(std::uint32_t replica, std::uint64_t node) {
    proto::FromNode message;
    auto& done = *message.mutable_reduced();
    done.set_replica(replica);
    done.set_epoch(coordinator.epoch().value);
    done.set_step(coordinator.committed().value + 1);
    done.set_incarnation(incarnations[replica]);
    for (std::uint32_t rank = 0; rank < config.ranks; ++rank) RankSet(rank).to(done.mutable_ranks());
    send(node, message);
  }
  void down(std::uint32_t replica, std::uint64_t instance = 1, std::uint32_t rank = 1) {
    proto::FromNode message;
    auto& gone = *message.mutable_rank_down();
    gone.set_replica(replica);
    gone.set_rank(rank);
    gone.set_instance(instance * 100 + rank);
    gone.set_reason("killed");
    gone.set_ended(true);
    send(replica, message);
  }
  // Of this epoch: it has waited too long, or (lost) their connection has broken.
  void accuse(std::uint32_t who, std::uint32_t suspect, bool lost = false, bool only_waiting = false) {
    proto::FromNode message;
    auto& a = *message.mutable_accusation();
    a.set_replica(who);
    a.set_epoch(coordinator.epoch().value);
    a.set_suspect(suspect);
    a.set_what(lost ? "connection reset" : "chunk 3 of 9 of the reduce-scatter");
    a.set_lost(lost);
    a.set_only_waiting(only_waiting);
    send(who, message);
  }
  void excuse(std::uint32_t who, const char* what = "its trainer, which is between steps", bool excused = true) {
    proto::FromNode message;
    auto& a = *message.mutable_accusation();
    a.set_replica(who);
    a.set_epoch(coordinator.epoch().value);
    a.set_suspect(who);
    a.set_what(what);
    a.set_only_waiting(true);
    a.set_excused(excused);
    send(who, message);
  }
  void start() {
    for (std::uint32_t r = 0; r < 3; ++r) up(r);
    link_all();
  }
  // Replica 1 has been lost, and has come back as a joiner.
  void join_again(std::initializer_list<std::uint32_t> others) {
    down(1);
    up(1, 2);
    link_all();
    for (auto replica : others) reduced(replica);
  }
  // After step 3 replica 0 contributes, 1 is a joiner, and 2 is gone.
  void start_with_a_joiner() {
    start();
    steps(2);
    down(2);
    join_again({0});
  }
  // A joiner's stream has ended, on all of its ranks.
  void caught_up(std::uint32_t replica) {
    for (std::uint32_t rank = 0; rank < config.ranks; ++rank) stand(replica, rank, true);
  }
  void expect_alone(std::uint32_t replica) const {
    ASSERT_EQ(contributors(), 1u);
    EXPECT_EQ(coordinator.members()[0].replica, ReplicaId(replica));
  }
  std::size_t contributors() const {
    return static_cast<std::size_t>(std::count_if(coordinator.members().begin(), coordinator.members().end(),
                                                  [](const auto& m) { return !m.catching_up; }));
  }
};

TEST(Coordinator, StartsWhenAllReplicasHaveRegisteredAndAreConnected) {
  Bench bench;
  bench.up(0);
  bench.up(1);
  EXPECT_FALSE(bench.coordinator.started());
  bench.up(2);
  EXPECT_FALSE(bench.coordinator.started());
  bench.link_all();
  ASSERT_TRUE(bench.coordinator.started());
  EXPECT_EQ(bench.contributors(), 3u);
}

TEST(Coordinator, WhoDiffersAtTheStartCatchesUpFromTheMostAdvanced) {
  Bench bench;
  bench.up(0, 1, 7, 5);
  bench.up(1, 1, 3, 4);
  bench.up(2, 1, 7, 5);
  bench.link_all();
  ASSERT_TRUE(bench.coordinator.started());
  EXPECT_EQ(bench.coordinator.committed(), Step(7));
  EXPECT_EQ(bench.contributors(), 2u);
  EXPECT_TRUE(bench.coordinator.members()[1].catching_up);
}

TEST(Coordinator, CommitsWhenEveryRankOfEveryMemberHasReduced) {
  Bench bench;
  bench.start();
  bench.reduced(0);
  bench.reduced(1);
  EXPECT_EQ(bench.coordinator.committed(), Step(0));
  bench.reduced(2);
  EXPECT_EQ(bench.coordinator.committed(), Step(1));
  EXPECT_TRUE(bench.log.back().has_committed());
}

TEST(Coordinator, ALostMemberMeansTheSameStepInTheNextEpochAndItsSamplesAgainLater) {
  Bench bench;
  bench.start();
  bench.reduced(0);
  const Epoch before = bench.coordinator.epoch();
  bench.down(1);
  EXPECT_EQ(bench.coordinator.epoch(), before.next());
  EXPECT_EQ(bench.coordinator.committed(), Step(0));
  EXPECT_EQ(bench.contributors(), 2u);
  bench.reduced(0);
  bench.reduced(2);
  EXPECT_EQ(bench.coordinator.committed(), Step(1));
  EXPECT_EQ(*bench.coordinator.ledger().batch_of(ReplicaId(0)), (Batch{{10, 20}}));
}

TEST(Coordinator, AReplicaComesBackAsCatchingUpAndContributesWhenAllItsRanksAreReady) {
  Bench bench;
  bench.start();
  bench.down(1);
  bench.up(1, 2);
  bench.link_all();
  EXPECT_EQ(bench.coordinator.members().size(), 2u) << "admission waits for the step boundary";
  bench.reduced(0);
  bench.reduced(2);
  ASSERT_EQ(bench.coordinator.members().size(), 3u);
  EXPECT_EQ(bench.contributors(), 2u);
  for (std::uint32_t rank : {0u, 1u}) {
    bench.reduced(0), bench.reduced(2), bench.reduced(1);
    EXPECT_EQ(bench.contributors(), 2u);
    bench.stand(1, rank, true);
  }
  bench.reduced(0), bench.reduced(2), bench.reduced(1);
  EXPECT_EQ(bench.contributors(), 3u);
}

TEST(Coordinator, StaleReportsOfAnEarlierEpochDecideNothing) {
  Bench bench;
  bench.start();
  proto::FromNode stale;
  stale.mutable_reduced()->set_replica(0);
  stale.mutable_reduced()->set_epoch(bench.coordinator.epoch().value);
  stale.mutable_reduced()->set_step(1);
  stale.mutable_reduced()->set_incarnation(bench.incarnations[0]);
  for (std::uint32_t rank : {0u, 1u}) RankSet(rank).to(stale.mutable_reduced()->mutable_ranks());
  bench.down(1);
  bench.send(0, stale);
  bench.reduced(2);
  EXPECT_EQ(bench.coordinator.committed(), Step(0));
}

TEST(Coordinator, AnotherPlanOrAPlaceOutsideTheJobIsRefusedWithTheReason) {
  Bench bench;
  bench.start();
  bench.down(1);
  bench.up(1, 2, 0, 5, /*plan=*/10);
  bench.pass(600ms);
  EXPECT_NE(bench.refusal(1).find("tensors or buckets differ from those of replicas 0, 2"), std::string::npos);
  bench.up(7);
  EXPECT_TRUE(bench.inbox[7].back().has_refused());
}

TEST(Coordinator, OfAWaitForGraphTheOneThatWaitsForNobodyIsOut) {
  Bench bench;
  bench.start();
  bench.accuse(0, 2);  // waits for 2, which itself waits for 1
  bench.accuse(2, 1);
  bench.pass(300ms);
  ASSERT_EQ(bench.coordinator.members().size(), 2u);
  EXPECT_EQ(bench.coordinator.members()[0].replica, ReplicaId(0));
  EXPECT_EQ(bench.coordinator.members()[1].replica, ReplicaId(2));
}

TEST(Coordinator, AWaitThatIsNotTooLongYetIsToldButNotJudged) {
  Bench bench;
  bench.start();
  bench.accuse(0, 2, /*lost=*/false, /*only_waiting=*/true);
  bench.pass(900ms);
  EXPECT_EQ(bench.coordinator.members().size(), 3u);
  EXPECT_TRUE(bench.waits_for("replica 0 waits for it: chunk 3 of 9 of the reduce-scatter"));
}

// A ring stands when one of it does: the others have not reduced either.
TEST(Coordinator, OfAllWhoHaveNotReducedOnlyThoseAreWaitedForThatWaitForNobody) {
  Bench bench;
  bench.start();
  EXPECT_EQ(bench.coordinator.waiting_for(bench.now).size(), 3u) << "all compute";
  bench.pass(500ms);
  bench.accuse(0, 2, /*lost=*/false, /*only_waiting=*/true);
  bench.accuse(2, 1, /*lost=*/false, /*only_waiting=*/true);
  bench.pass(125ms);
  EXPECT_EQ(bench.coordinator.waiting_for(bench.now),
            (std::vector<std::string>{"replica 1 rank 0: its reduction of step 1, for 125 ms; replica 2 waits for it: "
                                      "chunk 3 of 9 of the reduce-scatter"}));
  bench.accuse(1, 0, /*lost=*/false, /*only_waiting=*/true);
  EXPECT_EQ(bench.coordinator.waiting_for(bench.now).size(), 3u) << "a circle has no end";
  bench.reduced(1);
  EXPECT_EQ(bench.coordinator.waiting_for(bench.now).size(), 2u);
}

TEST(Coordinator, WhileATrainerMayTakeItsTimeNobodyIsJudged) {
  Bench bench;
  bench.start();
  bench.accuse(0, 1);
  bench.accuse(1, 2);
  for (int i = 0; i < 20; ++i) {
    bench.excuse(2);
    bench.pass(250ms);
    ASSERT_EQ(bench.coordinator.members().size(), 3u) << i;
  }
  EXPECT_TRUE(bench.waits_for("its trainer, which is between steps"));
  bench.pass(1s);  // it says so no more, and does not go on
  EXPECT_EQ(bench.coordinator.members().size(), 2u);
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  EXPECT_EQ(bench.coordinator.suspended()[0].replica, ReplicaId(2));
}

// The next patience is of steps in which nobody took its time.
TEST(Coordinator, APlanTellsWhetherATrainerTookItsTimeInTheStepBefore) {
  Bench bench;
  bench.start();
  bench.steps(1);
  EXPECT_FALSE(bench.inbox[0].back().plan().excused());
  bench.excuse(2);
  bench.steps(1);
  EXPECT_TRUE(bench.inbox[0].back().plan().excused());
  bench.steps(1);
  EXPECT_FALSE(bench.inbox[0].back().plan().excused());
}

TEST(Coordinator, WhoSaysThatItIsBusyNoLongerWithLeaveIsJudgedWithItsOwnWords) {
  Bench bench;
  bench.start();
  bench.accuse(0, 2);
  bench.excuse(2, "its trainer, which has been busy with 'a checkpoint' for 1.0 s", true);
  bench.pass(900ms);
  ASSERT_EQ(bench.coordinator.members().size(), 3u);
  bench.excuse(2, "its trainer, which has been busy with 'a checkpoint' for 2.0 s, longer than it said", false);
  bench.pass(200ms);
  EXPECT_EQ(bench.coordinator.members().size(), 2u);
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  EXPECT_EQ(bench.coordinator.suspended()[0].replica, ReplicaId(2));
  EXPECT_EQ(bench.coordinator.suspended()[0].reason,
            "replica 0 waits for chunk 3 of 9 of the reduce-scatter; the step waits for its trainer, which has been "
            "busy with 'a checkpoint' for 2.0 s, longer than it said");
}

TEST(Coordinator, NobodyExcusesAnother) {
  Bench bench;
  bench.start();
  proto::FromNode message;
  auto& a = *message.mutable_accusation();
  a.set_replica(0);
  a.set_suspect(2);
  a.set_epoch(bench.coordinator.epoch().value);
  a.set_excused(true);
  bench.send(0, message);
  bench.pass(300ms);
  EXPECT_EQ(bench.coordinator.members().size(), 2u);
}

TEST(Coordinator, ADaemonHasItsSilenceToComeBackBeforeItsReplicaIsOut) {
  Bench bench;
  bench.start();
  bench.keep(bench.coordinator.on_node_lost(NodeId(1), bench.now));
  bench.pass(900ms, {0, 2});
  EXPECT_EQ(bench.coordinator.members().size(), 3u);
  bench.pass(200ms, {0, 2});
  EXPECT_EQ(bench.coordinator.members().size(), 2u);
}

// Found by the simulator: it was heard again over the same connection, and its ranks were never registered again.
TEST(Coordinator, ANodeThatWasSilentMustConnectAnew) {
  Bench bench;
  bench.start();
  for (int i = 0; i < 30; ++i) {
    bench.now += bench.config.silence / 16;
    for (std::uint64_t node : {0, 1}) {
      proto::FromNode heartbeat;
      heartbeat.mutable_heartbeat();
      bench.send(node, heartbeat);
    }
    bench.keep(bench.coordinator.on_tick(bench.now));
  }
  EXPECT_EQ(bench.closed, std::vector<std::uint64_t>{2});
}

// Found by the simulator: joiners were sent to the address of a daemon that was no more.
TEST(Coordinator, ARankThatNeverHeardItsAnswerIsKnownByItsNewDaemonsAddress) {
  Bench bench;
  const auto up = [&](std::uint32_t number, std::uint64_t node, const std::string& address) {
    proto::FromNode message;
    auto& rank = *message.mutable_rank_up();
    rank.set_rank(number);
    rank.set_instance(77);
    rank.set_plan_hash(9);
    rank.set_stream_address(address);
    bench.send(node, message);
  };
  up(0, 0, "old");
  up(0, 5, "new");
  up(1, 6, "other");
  const auto& peers = bench.inbox[5].back().peers().peers();
  ASSERT_EQ(peers.size(), 1);
  EXPECT_EQ(peers[0].stream_address(), "new");
}

// ---- state survives

TEST(Coordinator, BelowTheLastCommittedStepItStartsOnlyAtAnOperatorsWordAndCountsWhatWasGivenUp) {
  Bench bench;
  bench.start();
  bench.steps(3);
  EXPECT_EQ(bench.coordinator.committed(), Step(3));
  for (std::uint32_t r : {0u, 1u, 2u}) bench.down(r);
  EXPECT_TRUE(bench.coordinator.members().empty());
  for (std::uint32_t r : {0u, 1u, 2u}) bench.up(r, 2, 2);
  bench.link_all();
  EXPECT_EQ(bench.coordinator.committed(), Step(3));
  EXPECT_EQ(bench.contributors(), 0u);
  EXPECT_EQ(bench.coordinator.wants_roll_back(), Step(2));
  EXPECT_TRUE(bench.waits_for("--roll-back-to 2 to give up 1 steps"));

  Bench told(bench.log, {.roll_back_to = Step(2)});
  for (std::uint32_t r : {0u, 1u, 2u}) told.up(r, 3, 2);
  told.link_all();
  EXPECT_EQ(told.coordinator.committed(), Step(2)) << "the most advanced state that is left";
  EXPECT_EQ(told.contributors(), 3u);
  EXPECT_EQ(told.coordinator.steps_rolled_back(), 1u);
  std::vector<proto::LogRecord> all = bench.log;
  all.insert(all.end(), told.log.begin(), told.log.end());
  EXPECT_EQ(rolled_back(all).steps, 1u);
  EXPECT_EQ(rolled_back(all).samples, 30u);

  // The word holds once.
  told.steps(2);
  for (std::uint32_t r : {0u, 1u, 2u}) told.down(r, 3);
  for (std::uint32_t r : {0u, 1u, 2u}) told.up(r, 4, 2);
  told.link_all();
  EXPECT_EQ(told.coordinator.committed(), Step(4));
  EXPECT_EQ(told.coordinator.wants_roll_back(), Step(2));
}

// Its ranks were started one by one, and found different checkpoints: as long as it might bring a later state than
// anybody else, an operator isn't asked whether the job may go back.
TEST(Coordinator, AReplicaWhoseRanksComeWithTheStatesOfDifferentStepsStartsOnceMore) {
  Bench bench;
  bench.start();
  bench.steps(3);
  for (std::uint32_t r : {0u, 1u, 2u}) bench.down(r);
  bench.rank_up(0, 0, 2, 3);
  bench.rank_up(0, 1, 2, 2);
  for (std::uint32_t r : {1u, 2u}) bench.up(r, 2, 1);
  bench.inbox.clear();
  bench.link_all();
  EXPECT_FALSE(bench.coordinator.wants_roll_back());
  const auto& told = bench.inbox[0];
  const auto evicted = std::find_if(told.begin(), told.end(), [](const auto& sent) { return sent.has_evicted(); });
  ASSERT_NE(evicted, told.end());
  EXPECT_NE(evicted->evicted().reason().find("states of steps 2 to 3"), std::string::npos)
      << evicted->evicted().reason();

  bench.up(0, 3, 3);
  bench.link_all();
  EXPECT_EQ(bench.coordinator.steps_rolled_back(), 0u);
  EXPECT_EQ(bench.coordinator.committed(), Step(3));
  EXPECT_EQ(bench.contributors(), 1u) << "the others catch up";
}

TEST(Coordinator, AReplicaWhoseRanksHaveNoCheckpointInCommonIsSentBackOnceAndThenNamed) {
  Bench bench;
  bench.start();
  bench.steps(3);
  for (std::uint32_t r : {0u, 1u, 2u}) bench.down(r);
  for (std::uint32_t r : {1u, 2u}) bench.up(r, 2, 1);
  for (const std::uint64_t instance : {2, 3}) {
    bench.inbox.clear();
    bench.rank_up(0, 0, instance, 3);
    bench.rank_up(0, 1, instance, 2);
    bench.link_all();
    EXPECT_EQ(bench.evicted_anybody(), instance == 2);
  }
  EXPECT_TRUE(bench.waits_for("replica 0: its ranks came with the states of steps 2 to 3"));
  EXPECT_EQ(bench.coordinator.wants_roll_back(), Step(1)) << "there is no better one";
}

// After a restart it is not whoever comes first who says what the job is like.
TEST(Coordinator, AMemberThatComesBackIsNotMeasuredByANewcomer) {
  Bench bench;
  bench.start();
  bench.down(2);
  bench.steps(1);
  Bench again(bench.log);
  again.incarnations = bench.incarnations;
  again.up(2, 2, 0, 5, 8);
  for (std::uint32_t r : {0u, 1u}) again.back(r, r);
  again.pass(600ms);
  const auto refused = [&](std::uint64_t node) {
    const auto& told = again.inbox[node];
    return std::any_of(told.begin(), told.end(), [](const auto& sent) { return sent.has_refused(); });
  };
  EXPECT_TRUE(refused(2));
  EXPECT_FALSE(refused(0) || refused(1));
  for (std::uint32_t r : {0u, 1u}) again.reduced(r);
  EXPECT_EQ(again.coordinator.committed().value, bench.coordinator.committed().value + 1);
}

TEST(Coordinator, WhatAMixedReplicaBringsIsNotWaitedForWhereAnotherHasALaterState) {
  Bench bench;
  for (std::uint32_t r : {1u, 2u}) bench.up(r, 1, 3);
  bench.rank_up(0, 0, 1, 3);
  bench.rank_up(0, 1, 1, 0);
  bench.link_all();
  EXPECT_EQ(bench.contributors(), 2u);
  EXPECT_EQ(bench.coordinator.members().size(), 3u);
}

// ---- a whole job starts again from its checkpoint

TEST(Coordinator, AFreshLogGoesOnWithTheSamplesThatTheCheckpointHasLeft) {
  Bench bench;
  for (std::uint32_t r : {0u, 1u, 2u}) bench.bring(r, 8, {{0, 225}, {240, 255}});
  bench.link_all();
  ASSERT_EQ(bench.contributors(), 3u);
  EXPECT_EQ(bench.coordinator.committed(), Step(8));
  EXPECT_EQ(*bench.coordinator.ledger().batch_of(ReplicaId(0)), (Batch{{225, 235}})) << "what waited goes out first";
  EXPECT_EQ(*bench.coordinator.ledger().batch_of(ReplicaId(1)), (Batch{{235, 240}, {255, 260}}));
  EXPECT_EQ(*bench.coordinator.ledger().batch_of(ReplicaId(2)), (Batch{{260, 270}}));
  bench.steps(2);
  const Audit once = audit(trained_by_step(bench.log));
  EXPECT_EQ(once.samples, 300u);
  EXPECT_EQ(once.once, 300u);
  EXPECT_EQ(once.lost + once.repeated, 0u);
  EXPECT_EQ(rolled_back(bench.log).steps, 0u);
  const auto& plan = bench.inbox[0].back().plan();
  EXPECT_EQ(Samples(plan.trained(), kMostSamples).text(), "0-299") << "for the next checkpoint";

  Bench again(bench.log);  // its own restart
  EXPECT_EQ(again.coordinator.committed(), Step(10));
  EXPECT_EQ(again.coordinator.ledger().held(), bench.coordinator.ledger().held());
}

TEST(Coordinator, AKeptLogGoesOnByItselfAndTakesNoOtherJobsCheckpoint) {
  Bench bench;
  bench.start();
  bench.steps(2);
  for (std::uint32_t r : {0u, 1u, 2u}) bench.down(r);
  bench.inbox.clear();
  bench.bring(0, 2, {{0, 50}}, 2);
  EXPECT_NE(bench.refused(0).find("its checkpoint of step 2 says that samples 0-49 are trained, and by this "
                                  "coordinator's log 0-59 are: it is another job's checkpoint"),
            std::string::npos)
      << bench.refused(0);
  EXPECT_NE(bench.refused(0).find("--log-directory"), std::string::npos);
  for (std::uint32_t r : {0u, 1u, 2u}) bench.bring(r, 2, {{0, 60}}, 3);
  bench.link_all();
  EXPECT_EQ(bench.contributors(), 3u);
  EXPECT_EQ(bench.coordinator.committed(), Step(2));
  bench.steps(1);
  EXPECT_EQ(audit(trained_by_step(bench.log)).once, 90u);
}

TEST(Coordinator, ReplicasThatBringOtherSamplesAtOneStepAreRefused) {
  Bench bench;
  bench.bring(0, 8, {{0, 240}});
  bench.bring(1, 8, {{0, 230}});
  EXPECT_NE(bench.refused(1).find("its checkpoint of step 8 says that samples 0-229 are trained, and that of replica 0 "
                                  "rank 0, which came first, says 0-239: start all ranks of all replicas from one"),
            std::string::npos)
      << bench.refused(1);
  bench.inbox.clear();
  bench.bring(2, 8, {{0, 10}, {20, 30}, {40, 50}, {60, 70}, {80, 90}});
  EXPECT_NE(bench.refused(2).find("says that samples 50 of those below 90 are trained"), std::string::npos)
      << bench.refused(2);
  bench.bring(1, 7, {{0, 210}}, 2);  // an older checkpoint of the same job
  bench.bring(2, 8, {{0, 240}});
  bench.link_all();
  EXPECT_EQ(bench.contributors(), 2u);
  EXPECT_EQ(bench.coordinator.members().size(), 3u) << "it catches up";
  EXPECT_EQ(bench.coordinator.ledger().trained().text(), "0-239");
}

TEST(Coordinator, ACheckpointThatDoesNotSayWhichSamplesAreTrainedIsRefused) {
  Bench bench;
  bench.bring(0, 8, {});
  EXPECT_NE(bench.refused(0).find("the state of step 8 and does not say which samples are trained"), std::string::npos)
      << bench.refused(0);
  bench.bring(1, 0, {{0, 10}});
  EXPECT_NE(bench.refused(1).find("state of step 0 and says that samples 0-9 are trained"), std::string::npos)
      << bench.refused(1);
}

// While it waited to be admitted nobody needed its checkpoint; then all who contributed were lost.
TEST(Coordinator, WhoWaitedWithAnotherJobsCheckpointIsNoStart) {
  Bench bench;
  bench.start();
  bench.steps(2);
  bench.down(2);
  bench.bring(2, 1, {{0, 25}}, 2);
  ASSERT_EQ(bench.refused(2), "") << "it would have caught up";
  for (std::uint32_t r : {0u, 1u}) bench.down(r);
  for (std::uint32_t r : {0u, 1u}) bench.up(r, 2, 0);
  bench.link_all();
  EXPECT_EQ(bench.coordinator.wants_roll_back(), Step(0)) << "and not step 1";
  EXPECT_TRUE(bench.waits_for("replica 2: its checkpoint of step 1 says that other samples are trained"));
}

TEST(Coordinator, BehindTheCheckpointThatItBeganWithItTakesTheSamplesOfAnEarlierOne) {
  Bench bench;
  for (std::uint32_t r : {0u, 1u, 2u}) bench.up(r, 1, 8);
  bench.link_all();
  bench.steps(2);
  Bench told(bench.log, {.roll_back_to = Step(5)});
  for (std::uint32_t r : {0u, 1u, 2u}) told.down(r);
  for (std::uint32_t r : {0u, 1u, 2u}) told.up(r, 2, 5);
  told.link_all();
  ASSERT_EQ(told.contributors(), 3u);
  EXPECT_EQ(told.coordinator.committed(), Step(5));
  EXPECT_EQ(*told.coordinator.ledger().batch_of(ReplicaId(0)), (Batch{{150, 160}}));
  told.steps(1);
  std::vector<proto::LogRecord> all = bench.log;
  all.insert(all.end(), told.log.begin(), told.log.end());
  EXPECT_EQ(audit(trained_by_step(all)).once, 180u);
  EXPECT_EQ(rolled_back(all).steps, 5u);
  EXPECT_EQ(rolled_back(all).samples, 150u);
  Bench again(all);
  EXPECT_EQ(again.coordinator.ledger().held(), told.coordinator.ledger().held());
}

// Checkpoints of what was given up lie about: going on from there would take back the operator's word.
TEST(Coordinator, NothingGoesOnFromAStepThatWasRolledBack) {
  Bench first;
  first.start();
  first.steps(3);
  Bench bench(first.log, {.roll_back_to = Step(1)});
  for (std::uint32_t r : {0u, 1u, 2u}) bench.down(r);
  for (std::uint32_t r : {0u, 1u, 2u}) bench.up(r, 2, 1);
  bench.link_all();
  ASSERT_EQ(bench.coordinator.committed(), Step(1));
  for (std::uint32_t r : {0u, 1u, 2u}) bench.down(r, 2);
  for (std::uint32_t r : {0u, 1u, 2u}) bench.up(r, 3, 3);
  bench.link_all();
  EXPECT_EQ(bench.contributors(), 0u);
  EXPECT_EQ(bench.coordinator.committed(), Step(1));
  EXPECT_TRUE(
      bench.waits_for("replica 2: it has come with the state of step 3, and step 1 is the last that is committed"));

  bench.down(0, 3);
  bench.up(0, 4, 1);
  bench.link_all();
  EXPECT_EQ(bench.contributors(), 1u) << "the others catch up";
  EXPECT_EQ(bench.coordinator.members().size(), 3u);
}

// Another --log-directory than before, or none: those who have the job's state are not sent away for it.
TEST(Coordinator, WithALogOfAnotherJobItSendsNobodyAway) {
  Bench first;
  first.start();
  first.steps(3);
  Bench other({}, {.id = 78});
  for (std::uint32_t r : {0u, 1u, 2u}) other.back_from(first, r);
  other.pass(60s);
  EXPECT_FALSE(other.evicted_anybody());
  EXPECT_FALSE(other.coordinator.started());
  EXPECT_TRUE(other.waits_for("belongs to job 000000000000004d, which has committed step 3; this log is of job"));

  // Whoever ends one of them may start it for this job.
  for (std::uint32_t r : {0u, 1u, 2u}) other.down(r), other.down(r, 1, 0);
  EXPECT_FALSE(other.waits_for("belongs to job"));
  for (std::uint32_t r : {0u, 1u, 2u}) other.up(r, 2);
  other.link_all();
  EXPECT_EQ(other.contributors(), 3u);
}

TEST(Coordinator, AStrayProcessOfAnotherJobIsNothingToOneThatRuns) {
  Bench old({}, {.id = 78});
  old.start();
  old.steps(1);
  Bench bench;
  bench.start();
  bench.back_from(old, 1);
  bench.steps(2);
  EXPECT_EQ(bench.coordinator.committed(), Step(2));
  EXPECT_TRUE(bench.evicted_anybody()) << "that process has no business here";
  EXPECT_EQ(bench.coordinator.members().size(), 3u);
}

// What it would decide with an older copy has been decided otherwise.
TEST(Coordinator, WithAnOlderCopyOfItsLogItDecidesNothing) {
  Bench bench;
  bench.start();
  bench.steps(3);
  const auto copy = bench.log;
  bench.steps(2);
  Bench again(copy);
  for (std::uint32_t r : {0u, 1u, 2u}) again.back_from(bench, r);
  again.link_all();
  again.steps(2);
  for (std::uint32_t r : {0u, 1u}) again.down(r);
  for (std::uint32_t r : {0u, 1u}) again.up(r, 2);
  again.pass(60s);
  EXPECT_TRUE(again.log.empty());
  EXPECT_FALSE(again.evicted_anybody());
  EXPECT_TRUE(
      again.waits_for("the log is an older copy: it ends with step 3 in epoch 1, and replica 0 rank 0 has "
                      "heard of step 5 in epoch 1"));

  Bench whole(bench.log);
  for (std::uint32_t r : {0u, 1u, 2u}) whole.back_from(bench, r);
  whole.incarnations = bench.incarnations;
  whole.steps(1);
  EXPECT_EQ(whole.coordinator.committed(), Step(6));
}

TEST(Coordinator, AVersionThatIsNoStepIsRefused) {
  Bench bench;
  proto::FromNode message;
  auto& up = *message.mutable_rank_up();
  up.set_replica(2);
  up.set_instance(200);
  up.set_plan_hash(9);
  up.set_version(std::uint64_t{1} << 61);
  bench.send(2, message);
  EXPECT_NE(bench.refusal(2).find("steps are numbered up to"), std::string::npos) << bench.refusal(2);
}

// ---- what all must declare alike

TEST(Coordinator, AMajorityThatDeclaresAlikeStartsAndWhoDiffersHearsInWhichTensor) {
  for (const std::uint32_t wrong : {0u, 1u, 2u}) {  // whoever comes first, or last
    Bench bench;
    for (std::uint32_t r : {0u, 1u, 2u}) bench.up(r, 1, 0, 5, r == wrong ? 8 : 9);
    for (std::uint32_t r : {0u, 1u, 2u})
      if (bench.asked_to_declare(r)) bench.declare(r, r == wrong ? 1000 : 1024);
    const std::uint32_t first = wrong == 0 ? 1 : 0, second = wrong == 2 ? 1 : 2;
    EXPECT_NE(bench.refusal(wrong).find(fmt::format(
                  "differ from those of replicas {}, {}: tensor 'w' has 1000 elements of float32, 1 moments, bucket 0 "
                  "here, and 1024 elements of float32, 1 moments, bucket 0 there",
                  first, second)),
              std::string::npos)
        << bench.refusal(wrong);
    EXPECT_EQ(bench.refusal(first) + bench.refusal(second), "");
    bench.incarnations.erase(wrong);
    bench.link_all();
    EXPECT_EQ(bench.contributors(), 2u) << "they don't wait for who was refused";
    ASSERT_EQ(bench.coordinator.refused().size(), 1u);
    EXPECT_EQ(bench.coordinator.refused().begin()->first, ReplicaId(wrong));
    // It is mended, and catches up.
    bench.up(wrong, 2);
    bench.link_all();
    EXPECT_TRUE(bench.coordinator.refused().empty());
    for (auto r : {first, second}) bench.reduced(r);
    EXPECT_EQ(bench.coordinator.members().size(), 3u);
  }
}

TEST(Coordinator, AMajorityThatIsThereBindsWhoComesLaterAndWaitsForWhoHasNotCome) {
  Bench bench;
  for (std::uint32_t r : {0u, 1u}) bench.up(r);
  bench.link_all();
  EXPECT_EQ(bench.contributors(), 0u);
  bench.rank_up(2, 0, 1, 0, 5, 8);
  EXPECT_EQ(bench.refusal(2), "") << "it is asked first";
  EXPECT_TRUE(bench.asked_to_declare(2));
  bench.pass(600ms);  // and does not answer
  EXPECT_NE(bench.refusal(2).find("differ from those of replicas 0, 1: in one that was not told"), std::string::npos);
}

TEST(Coordinator, WithoutAMajorityItWaitsAndSaysWhoDiffersInWhat) {
  Bench bench;
  for (std::uint32_t r : {0u, 1u, 2u}) bench.up(r, 1, 0, 5, 8 + r);
  for (std::uint32_t r : {0u, 1u, 2u}) {
    EXPECT_TRUE(bench.asked_to_declare(r));
    bench.declare(r, 1000 + r);
  }
  bench.link_all();
  bench.pass(5s);
  EXPECT_FALSE(bench.coordinator.started());
  for (std::uint32_t r : {0u, 1u, 2u}) EXPECT_EQ(bench.refusal(r), "");
  EXPECT_TRUE(
      bench.waits_for("replica 0 and replica 2 declare different things, and more than half of the job's 3 "
                      "replicas must declare the same: of replica 2, its tensors or buckets differ from those "
                      "of replica 0: tensor 'w' has 1002 elements"));
  // One of them is started again with what another declares.
  bench.down(2);
  bench.up(2, 2, 0, 5, 9);
  bench.declare(1, 1001);
  EXPECT_NE(bench.refusal(0).find("tensor 'w' has 1000 elements"), std::string::npos) << bench.refusal(0);
  bench.incarnations.erase(0);
  bench.link_all();
  EXPECT_EQ(bench.contributors(), 2u);
}

TEST(Coordinator, OfAReplicaWhoseRanksDifferTheOneThatDiffersFromTheMajorityIsRefused) {
  Bench bench;
  bench.rank_up(0, 0, 1, 0, 5, 8);
  bench.rank_up(0, 1, 1, 0, 5, 9);
  EXPECT_TRUE(bench.waits_for("replica 0: its own ranks differ"));
  for (std::uint32_t r : {1u, 2u}) bench.up(r);
  bench.pass(600ms);
  EXPECT_NE(bench.refusal(0), "");
  EXPECT_TRUE(bench.waits_for("replica 0: 1 of 2 ranks have registered; rank 0 was refused: its tensors"))
      << fmt::format("{}", fmt::join(bench.coordinator.waiting_for(bench.now), "; "));
  bench.rank_up(0, 0, 2, 0);
  bench.link_all();
  EXPECT_EQ(bench.contributors(), 3u);
}

// They differed while some of them came, so that nobody was told of anybody.
TEST(Coordinator, WhenNobodyDiffersAnyMoreAllAreToldOfAll) {
  Bench bench;
  bench.up(0, 1, 0, 5, 8);
  for (std::uint32_t r : {1u}) bench.up(r);
  const auto heard_of = [&](std::uint64_t node, std::uint32_t replica) {
    const auto& told = bench.inbox[node];
    return std::any_of(told.begin(), told.end(), [&](const proto::ToNode& sent) {
      return std::any_of(sent.peers().peers().begin(), sent.peers().peers().end(),
                         [&](const auto& peer) { return peer.replica() == replica; });
    });
  };
  EXPECT_FALSE(heard_of(0, 1)) << "they could not connect";
  bench.down(0);
  bench.up(0, 2);
  bench.up(2);
  for (std::uint64_t node : {0, 1, 2})
    for (std::uint32_t replica : {0u, 1u, 2u})
      if (node != replica) EXPECT_TRUE(heard_of(node, replica)) << node << " of " << replica;
}

// While the job runs, what it has declared binds: a newcomer is not its judge.
TEST(Coordinator, WhoHasAnotherPlanThanTheJobThatRunsPutsNobodyOut) {
  Bench bench;
  bench.start();
  bench.pass(1500ms, {0, 1});
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  bench.up(2, 2, 0, 5, 8);  // in the place of one that may be taken back
  bench.declare(0, 1000, 1), bench.declare(2, 1001, 2);
  EXPECT_NE(bench.refusal(2).find("tensor 'w' has 1001 elements"), std::string::npos) << bench.refusal(2);
  EXPECT_EQ(bench.coordinator.suspended().size(), 1u);
  EXPECT_FALSE(bench.coordinator.suspended()[0].ended);
}

TEST(Coordinator, WhoIsNotReachedIsNamedWithTheReason) {
  Bench bench;
  for (std::uint32_t r : {0u, 1u, 2u}) bench.up(r);
  bench.link_all();
  ASSERT_TRUE(bench.coordinator.started());
  Bench other;
  for (std::uint32_t r : {0u, 1u, 2u}) other.up(r);
  proto::FromNode message;
  auto& status = *message.mutable_replica_status();
  status.set_replica(1);
  status.set_incarnation(other.incarnations[1]);
  RankSet(1).to(status.mutable_ranks());
  auto& one = *status.add_unreached();
  one.set_rank(1);
  one.set_replica(0);
  one.set_incarnation(other.incarnations[0]);
  one.set_why("no such file");
  other.send(1, message);
  EXPECT_TRUE(other.waits_for("replica 1 rank 1: it can't connect with replica 0 rank 1: no such file"));
  other.link_all();
  EXPECT_FALSE(other.waits_for("can't connect")) << "now it can";
}

TEST(Coordinator, WhoComesToAFinishedJobHearsThatItIsOver) {
  Bench bench({}, {.steps = 3});
  bench.start();
  bench.steps(3);
  ASSERT_TRUE(bench.coordinator.finished());
  EXPECT_TRUE(bench.coordinator.waiting_for(bench.now).empty());
  bench.down(1);
  bench.inbox.clear();
  bench.up(1, 2);
  const auto& told = bench.inbox[1];
  const auto sent = std::find_if(told.begin(), told.end(), [](const auto& one) { return one.has_plan(); });
  ASSERT_NE(sent, told.end());
  Rank rank(ReplicaId(1));
  EXPECT_EQ(rank.on_plan(sent->plan()), Rank::Meaning::nothing) << "it has not been registered";
  rank.on_registered(Incarnation(bench.incarnations[1]));
  EXPECT_EQ(rank.on_plan(sent->plan()), Rank::Meaning::over);
}

// Rank 0 of the same replica had heard the end, and left; rank 1's daemon was away.
TEST(Coordinator, ARankThatComesBackAfterTheEndHearsItAlsoWhereAnotherOfItsReplicaHasLeft) {
  Bench bench({}, {.steps = 1});
  bench.start();
  bench.steps(1);
  ASSERT_TRUE(bench.coordinator.finished());
  bench.down(1, 1, 0);
  bench.inbox.clear();
  bench.back_with(1, 1, 11, 1);
  EXPECT_FALSE(bench.evicted_anybody());
  ASSERT_FALSE(bench.inbox[11].empty());
  EXPECT_TRUE(bench.inbox[11].back().plan().finished());
}

TEST(Coordinator, AfterTheEndNobodyIsWaitedForNorHeldForAlsoAfterItsRestart) {
  Bench first({}, {.steps = 2});
  first.start();
  first.steps(2);
  Bench bench(first.log, {.steps = 2});
  bench.pass(3s, {});
  EXPECT_TRUE(bench.coordinator.waiting_for(bench.now).empty());
  EXPECT_TRUE(bench.coordinator.blocked_on().empty());
}

// ---- two processes for one place

// Replica 1 on node 1, and a second process for its rank 0 behind another daemon.
struct Rivals : Bench {
  Rivals() {
    for (std::uint32_t r : {0u, 2u}) up(r);
    for (std::uint32_t rank : {0u, 1u}) send(1, of(1, rank, 1, 501));
    link_all();
    EXPECT_EQ(contributors(), 3u);
    inbox.clear();
  }
  static proto::FromNode of(std::uint32_t replica, std::uint32_t rank, std::uint64_t instance, std::uint64_t daemon) {
    auto message = introduction(replica, rank, instance);
    auto& its = *message.mutable_rank_up();
    its.set_daemon(daemon);
    its.set_node("node" + std::to_string(daemon));
    its.set_pid(static_cast<std::int32_t>(daemon));
    return message;
  }
  void second() { send(9, of(1, 0, 2, 509)); }
  void alive() {
    proto::FromNode message;
    message.mutable_alive()->set_replica(1);
    message.mutable_alive()->set_instance(100);
    message.mutable_alive()->set_silent_ms(7);
    send(1, message);
  }
  bool asked() const {
    const auto told = inbox.find(1);
    return told != inbox.end() &&
           std::any_of(told->second.begin(), told->second.end(), [](const auto& sent) { return sent.has_inquiry(); });
  }
  std::string refusal() {
    for (const auto& sent : inbox[9])
      if (sent.has_refused()) return sent.refused().reason();
    return "";
  }
  bool registered() {
    return std::any_of(inbox[9].begin(), inbox[9].end(), [](const auto& sent) { return sent.has_registered(); });
  }
};

TEST(Coordinator, ASecondProcessForAPlaceIsRefusedWhenTheFirstOnesDaemonSaysThatItLives) {
  Rivals job;
  job.second();
  EXPECT_TRUE(job.asked());
  EXPECT_EQ(job.refusal(), "");
  EXPECT_TRUE(job.waits_for("process 509 on node node509 asks for the place of process 501 on node node501"));
  job.alive();
  EXPECT_NE(job.refusal().find("process 501 on node node501 is replica 1 rank 0, and gave its last sign of life 7 ms"),
            std::string::npos)
      << job.refusal();
  EXPECT_FALSE(job.registered());
  job.pass(3s, {0, 1, 2, 9});
  job.steps(1);
  EXPECT_EQ(job.coordinator.committed(), Step(1)) << "nobody was put out for it";
}

TEST(Coordinator, ASecondProcessForAPlaceGetsItAtOnceWhenTheFirstHasEnded) {
  Rivals job;
  job.second();
  job.down(1, 1, 0);  // its daemon had yet to tell
  EXPECT_TRUE(job.registered());
  EXPECT_EQ(job.refusal(), "");
}

TEST(Coordinator, ASecondProcessForAPlaceGetsItWhenTheFirstIsGoneForLongerThanTheSilence) {
  for (const bool lost : {true, false}) {  // its connection has ended, or its node stands still
    Rivals job;
    if (lost) job.keep(job.coordinator.on_node_lost(NodeId(1), job.now));
    job.second();
    job.pass(900ms, {0, 2, 9});
    EXPECT_FALSE(job.registered()) << "the first may come back";
    job.pass(300ms, {0, 2, 9});
    EXPECT_TRUE(job.registered()) << lost;
  }
}

TEST(Coordinator, ASecondProcessForAPlaceIsRefusedWhenTheFirstComesBackInTime) {
  Rivals job;
  job.keep(job.coordinator.on_node_lost(NodeId(1), job.now));
  job.second();
  for (std::uint32_t rank : {0u, 1u}) {
    auto message = Rivals::of(1, rank, 1, 502);
    message.mutable_rank_up()->set_incarnation(job.incarnations[1]);
    job.send(1, message);
  }
  job.pass(100ms, {0, 1, 2, 9});
  EXPECT_TRUE(job.asked());
  job.alive();
  EXPECT_NE(job.refusal(), "");
}

TEST(Coordinator, OfManyProcessesForAPlaceNotAllAreRemembered) {
  Rivals job;
  for (std::uint64_t other = 0; other < 20; ++other) job.send(9, Rivals::of(1, 0, 2 + other, 600 + other));
  EXPECT_NE(job.refusal().find("several processes ask for its place already"), std::string::npos);
  job.down(1, 1, 0);
  EXPECT_TRUE(job.registered());
}

TEST(Coordinator, WhatNobodyDeclaresAnyMoreIsForgotten) {
  Bench bench;
  bench.start();
  for (std::uint64_t instance = 2; instance < 60; ++instance) {
    bench.down(1, instance - 1);
    bench.up(1, instance, 0, 5, 100 + instance);
    bench.pass(625ms);
    EXPECT_NE(bench.refusal(1), "");
  }
  bench.up(1, 99);
  bench.link_all();
  for (auto r : {0u, 2u}) bench.reduced(r);
  EXPECT_EQ(bench.coordinator.members().size(), 3u);
}

// One daemon has one process in a place: it knows that the other has ended.
TEST(Coordinator, AProcessThatIsStartedAgainBehindTheSameDaemonIsTakenAtOnce) {
  Rivals job;
  job.send(1, Rivals::of(1, 0, 2, 501));
  EXPECT_TRUE(std::any_of(job.inbox[1].begin(), job.inbox[1].end(), [](const auto& m) { return m.has_registered(); }));
}

TEST(Coordinator, AfterALossOfEverybodyItDoesNotWaitForReplicasThatDoNotComeForLong) {
  Bench bench;
  bench.start();
  for (std::uint32_t r : {0u, 1u, 2u}) bench.down(r);
  for (std::uint32_t r : {0u, 1u}) bench.up(r, 2);
  bench.incarnations.erase(2);
  bench.link_all();
  bench.pass(10s);
  EXPECT_EQ(bench.contributors(), 0u);
  bench.pass(6s);
  EXPECT_EQ(bench.contributors(), 2u);
}

TEST(Coordinator, WhoWasStoppedHoldsThatAgainstNobody) {
  Bench bench;
  bench.start();
  bench.pass(1s);
  bench.now += 3500ms;  // this process was stopped; every node kept talking, and it is all queued
  bench.keep(bench.coordinator.on_tick(bench.now));
  bench.pass(2s);
  EXPECT_EQ(bench.contributors(), 3u);
  bench.steps(1);
  EXPECT_EQ(bench.coordinator.committed(), Step(1));
}

TEST(Coordinator, ALateTickThatComesBeforeAllThatIsQueuedJudgesNobody) {
  Bench bench;
  bench.start();
  bench.pass(1s);
  bench.now += 3500ms;
  bench.keep(bench.coordinator.on_tick(bench.now));
  for (std::uint64_t node : {0, 1, 2}) bench.keep(bench.coordinator.on_node_lost(NodeId(node), bench.now));
  bench.pass(900ms, {});
  EXPECT_EQ(bench.contributors(), 3u) << "they lost it while it was paused, and have their silence to come back";
}

TEST(Coordinator, TheLastHolderIsNeverOutForSilence) {
  Bench bench;
  bench.start();
  bench.steps(2);
  bench.down(1);
  bench.down(2);
  ASSERT_EQ(bench.contributors(), 1u);
  bench.pass(10s, {1, 2});  // node 0 is silent
  EXPECT_EQ(bench.contributors(), 1u);
  EXPECT_EQ(bench.coordinator.blocked_on(), std::vector{ReplicaId(0)});
  EXPECT_TRUE(bench.waits_for("replica 0: it is silent, and nobody else has the state of step 2"));
  bench.back(0, 10);
  bench.reduced(0, 10);
  EXPECT_EQ(bench.coordinator.committed(), Step(3));
}

TEST(Coordinator, WhenAllAreSilentNobodyIsOutAndTheFirstToComeBackGoesOn) {
  Bench bench;
  bench.start();
  bench.steps(1);
  bench.pass(5s, {});
  EXPECT_EQ(bench.contributors(), 3u);
  bench.back(1, 11);
  bench.pass(1s, {11});
  ASSERT_NO_FATAL_FAILURE(bench.expect_alone(1));
  bench.reduced(1, 11);
  EXPECT_EQ(bench.coordinator.committed(), Step(2));
}

TEST(Coordinator, AJoinerThatHasCaughtUpGoesOnAloneWhereEverybodyElseHasDied) {
  Bench bench;
  bench.start();
  bench.steps(2);
  bench.join_again({0, 2});
  ASSERT_EQ(bench.coordinator.members().size(), 3u);
  bench.caught_up(1);
  const Batch lost = *bench.coordinator.ledger().batch_of(ReplicaId(0));
  bench.down(0);
  EXPECT_EQ(bench.contributors(), 1u) << "replica 2";
  bench.down(2);
  ASSERT_NO_FATAL_FAILURE(bench.expect_alone(1));
  EXPECT_EQ(*bench.coordinator.ledger().batch_of(ReplicaId(1)), lost) << "samples of the step that is repeated";
  bench.reduced(1);
  EXPECT_EQ(bench.coordinator.committed(), Step(4));
  EXPECT_EQ(rolled_back(bench.log).steps, 0u);
}

// Its daemon was started again, and has yet to find out what the one before it knew.
TEST(Coordinator, ThatAJoinerHasCaughtUpIsNotForgottenWithItsDaemon) {
  Bench bench;
  bench.start();
  bench.steps(2);
  bench.join_again({0, 2});
  bench.caught_up(1);
  bench.back(1, 11, 2);
  for (std::uint32_t rank = 0; rank < bench.config.ranks; ++rank) bench.stand(1, rank, false);
  bench.down(0), bench.down(2);
  ASSERT_NO_FATAL_FAILURE(bench.expect_alone(1));
}

TEST(Coordinator, AJoinerWithHalfAStateStartsAgainWhereEverybodyElseHasDied) {
  Bench bench;
  bench.start();
  bench.steps(2);
  bench.join_again({0, 2});
  bench.stand(1, 0, true);
  bench.inbox[1].clear();
  bench.down(0), bench.down(2);
  EXPECT_EQ(bench.contributors(), 0u);
  ASSERT_FALSE(bench.inbox[1].empty());
  EXPECT_TRUE(std::any_of(bench.inbox[1].begin(), bench.inbox[1].end(), [](const auto& m) { return m.has_evicted(); }));
}

TEST(Coordinator, AJoinerThatHasCaughtUpGoesOnWhereTheLastContributorIsSilentOrHangs) {
  for (const bool hangs : {false, true}) {
    Bench bench;
    bench.start_with_a_joiner();
    ASSERT_EQ(bench.coordinator.members().size(), 2u);
    bench.caught_up(1);
    if (hangs) bench.accuse(1, 0);
    bench.pass(1500ms, hangs ? std::vector<std::uint64_t>{0, 1} : std::vector<std::uint64_t>{1});
    ASSERT_EQ(bench.coordinator.members().size(), 1u) << hangs;
    EXPECT_EQ(bench.coordinator.members()[0].replica, ReplicaId(1));
    ASSERT_EQ(bench.coordinator.suspended().size(), 1u) << "it may be taken back until the next commit";
    bench.reduced(1);
    EXPECT_EQ(bench.coordinator.committed(), Step(4));
  }
}

TEST(Coordinator, AJoinerThatHasCaughtUpIsNotOutForSilenceWhileNoContributorIsThere) {
  Bench bench;
  bench.start_with_a_joiner();
  bench.caught_up(1);
  bench.pass(5s, {});
  EXPECT_EQ(bench.coordinator.members().size(), 2u);
  bench.back(1, 11, 2);
  bench.caught_up(1);
  bench.pass(1s, {11});
  ASSERT_NO_FATAL_FAILURE(bench.expect_alone(1));
  bench.reduced(1, 11);
  EXPECT_EQ(bench.coordinator.committed(), Step(4));
}

TEST(Coordinator, AJoinerMaySayAfterTheCoordinatorsRestartThatItHasCaughtUp) {
  for (const bool says : {true, false}) {
    Bench first;
    first.start_with_a_joiner();
    Bench bench(first.log);
    bench.incarnations = first.incarnations;
    bench.back(0, 10);
    bench.down(0);
    EXPECT_EQ(bench.contributors(), 0u);
    bench.back(1, 11, 2);
    for (std::uint32_t rank = 0; rank < bench.config.ranks; ++rank) bench.stand(1, rank, says);
    bench.pass(1500ms, {1, 11});
    ASSERT_EQ(bench.contributors(), says ? 1u : 0u);
    if (!says) continue;
    bench.reduced(1, 11);
    EXPECT_EQ(bench.coordinator.committed(), Step(4));
    EXPECT_EQ(rolled_back(bench.log).steps, 0u);
  }
}

TEST(Coordinator, AJoinerThatMayHaveCaughtUpIsWaitedForAfterTheCoordinatorsRestart) {
  for (const bool had : {true, false}) {
    Bench first;
    first.start_with_a_joiner();
    Bench bench(first.log);
    bench.incarnations = first.incarnations;
    bench.back(0, 10);
    bench.down(0);
    bench.back_with(1, 0, 11, 2);  // its other rank's daemon is silent for long
    bench.stand(1, 0, true);
    bench.pass(10s, {11});
    EXPECT_EQ(bench.coordinator.blocked_on(), std::vector{ReplicaId(1)});
    EXPECT_TRUE(bench.waits_for("replica 1: it is silent"));
    bench.inbox[10].clear();  // replica 0 has lost a rank, and its other one heard of it
    EXPECT_FALSE(bench.evicted_anybody());
    bench.back_with(1, 1, 12, 2);
    bench.stand(1, 1, had);
    bench.pass(500ms, {11, 12});
    ASSERT_EQ(bench.contributors(), had ? 1u : 0u);
    EXPECT_EQ(bench.evicted_anybody(), !had) << "with half a state it starts again";
    if (!had) continue;
    bench.reduced(1, 11);
    EXPECT_EQ(bench.coordinator.committed(), Step(4));
  }
}

// Nobody knows whether it had: it is given up at an operator's word, as a step that it may have is.
TEST(Coordinator, AJoinerThatOnlyMayHaveCaughtUpIsGivenUpAtAnOperatorsWord) {
  for (const bool told : {false, true}) {
    Bench first;
    first.start_with_a_joiner();
    Bench bench(first.log, {.roll_back_to = told ? std::optional(Step(0)) : std::nullopt});
    bench.incarnations = first.incarnations;
    bench.back(0, 10);
    bench.down(0);
    bench.pass(14s, {});
    EXPECT_EQ(bench.coordinator.blocked_on(), std::vector{ReplicaId(1)});
    bench.pass(3s, {});
    EXPECT_EQ(bench.coordinator.members().empty(), told);
  }
}

TEST(Coordinator, WhoIsOutForSilenceIsTakenBackWhenTheOthersDieBeforeTheNextCommit) {
  Bench bench;
  bench.start();
  bench.steps(1);
  const Batch its = *bench.coordinator.ledger().batch_of(ReplicaId(0));
  bench.pass(1500ms, {1, 2});
  ASSERT_EQ(bench.contributors(), 2u);
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  bench.inbox[0].clear();
  bench.down(1);
  bench.down(2);
  ASSERT_NO_FATAL_FAILURE(bench.expect_alone(0));
  EXPECT_EQ(*bench.coordinator.ledger().batch_of(ReplicaId(0)), its) << "its gradients are of these samples";
  bench.back(0, 10);
  bench.reduced(0, 10);
  EXPECT_EQ(bench.coordinator.committed(), Step(2));
}

TEST(Coordinator, AJoinerThatHasCaughtUpIsTakenBackWhereTheLastContributorIsSilentAfterIt) {
  for (const bool restarts : {false, true}) {
    Bench first;
    first.start_with_a_joiner();
    first.caught_up(1);
    first.pass(1500ms, {0, 2});
    ASSERT_EQ(first.coordinator.suspended().size(), 1u);
    EXPECT_EQ(first.coordinator.suspended()[0].replica, ReplicaId(1));
    Bench again(restarts ? first.log : std::vector<proto::LogRecord>{});
    Bench& bench = restarts ? again : first;
    bench.incarnations = first.incarnations;
    bench.inbox.clear();
    bench.pass(3s, {2});  // both are away
    EXPECT_EQ(bench.coordinator.blocked_on(), std::vector{ReplicaId(0)});
    bench.back(1, 11, 2);
    bench.pass(1s, {11});
    ASSERT_NO_FATAL_FAILURE(bench.expect_alone(1)) << restarts;
    EXPECT_FALSE(bench.evicted_anybody());
    bench.reduced(1, 11);
    EXPECT_EQ(bench.coordinator.committed(), Step(4));
  }
}

// The log knows that it has caught up, though it has not been heard since.
TEST(Coordinator, AJoinerThatHasCaughtUpIsNoneAfterTheCoordinatorsRestart) {
  Bench first;
  first.start_with_a_joiner();
  first.caught_up(1);
  Bench bench(first.log);
  bench.incarnations = first.incarnations;
  bench.back(0, 10);
  bench.pass(1500ms, {10});
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  bench.down(0);
  ASSERT_NO_FATAL_FAILURE(bench.expect_alone(1));
  EXPECT_EQ(bench.coordinator.blocked_on(), std::vector{ReplicaId(1)});
}

// Its state went with its process.
TEST(Coordinator, WhoIsOutForSilenceAndThenEndsIsNotTakenBack) {
  Bench bench;
  bench.start();
  bench.steps(1);
  bench.pass(1500ms, {0, 1});
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  bench.down(2);
  for (std::uint32_t r : {0u, 1u}) bench.down(r);
  EXPECT_TRUE(bench.coordinator.members().empty());
  EXPECT_TRUE(bench.coordinator.blocked_on().empty());
}

TEST(Coordinator, WhoIsOutForSilenceIsEvictedByTheCommitWithoutIt) {
  Bench bench;
  bench.start();
  bench.pass(1500ms, {1, 2});
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  bench.reduced(1);
  bench.reduced(2);
  EXPECT_EQ(bench.coordinator.committed(), Step(1));
  EXPECT_TRUE(bench.coordinator.suspended().empty());
  bench.back(0, 10);
  EXPECT_TRUE(bench.inbox[10].back().has_evicted());
}

TEST(Coordinator, WhoIsOutForNowIsKnownAfterTheCoordinatorsRestart) {
  Bench bench;
  bench.start();
  bench.steps(1);
  bench.pass(1500ms, {1, 2});
  Bench again(bench.log);
  again.incarnations = bench.incarnations;
  again.up(1, 7);
  again.up(2, 7);  // the other two were started again
  ASSERT_EQ(again.contributors(), 1u);
  again.back(0, 10);
  again.reduced(0, 10);
  EXPECT_EQ(again.coordinator.committed(), Step(2));
}

TEST(Coordinator, AConnectionThatBrokeIsMendedInAnEpochOfTheSameMembers) {
  Bench bench;
  bench.start();
  const Epoch before = bench.coordinator.epoch();
  bench.accuse(0, 2, /*lost=*/true);
  bench.accuse(2, 0, /*lost=*/true);
  bench.pass(200ms);
  EXPECT_EQ(bench.coordinator.epoch(), before.next());
  EXPECT_EQ(bench.contributors(), 3u);
  // It breaks again and again: one of the two has to go.
  for (int i = 0; i < 10 && bench.contributors() == 3; ++i) {
    bench.accuse(0, 2, /*lost=*/true);
    bench.accuse(2, 0, /*lost=*/true);
    bench.pass(400ms);
  }
  EXPECT_EQ(bench.contributors(), 2u);
}

TEST(Coordinator, WhoLeavesAFinishedJobMakesNoNewEpoch) {
  Bench bench({}, {.steps = 2});
  bench.start();
  bench.steps(2);
  ASSERT_TRUE(bench.coordinator.finished());
  const Epoch last = bench.coordinator.epoch();
  bench.accuse(0, 2, /*lost=*/true);
  bench.pass(3s, {0});
  EXPECT_EQ(bench.coordinator.epoch(), last);
}

TEST(Coordinator, WhoWasRegisteredBeforeTheFirstStartSurvivesTheCoordinatorsRestart) {
  Bench bench;
  bench.up(0);
  bench.up(1);
  Bench again(bench.log);
  again.incarnations = bench.incarnations;
  again.back(0, 0);
  again.back(1, 1);
  again.up(2);
  again.link_all();
  EXPECT_EQ(again.contributors(), 3u);
}

TEST(Coordinator, ALogWhoseSamplesDoNotFollowFromItsRecordsIsRefused) {
  Bench bench;
  bench.start();
  bench.steps(1);
  for (auto& record : bench.log)
    if (record.has_committed()) record.mutable_committed()->mutable_members(0)->mutable_batch(0)->set_begin(1);
  Coordinator other(bench.config);
  auto recovered = other.recover(bench.log, bench.now);
  ASSERT_FALSE(recovered);
  EXPECT_EQ(recovered.error().code, ErrorCode::corrupt);
}

TEST(Coordinator, AfterItsRestartNobodyIsAnnouncedBeforeAllMembersAreBack) {
  Bench bench;
  bench.start();
  Bench again(bench.log);
  again.incarnations = bench.incarnations;
  const auto back = [&](std::uint32_t replica) { again.back(replica, replica); };
  const auto announced = [&] {
    return std::any_of(again.inbox[0].begin(), again.inbox[0].end(), [](const auto& m) { return m.has_peers(); });
  };
  back(0);
  back(1);
  EXPECT_FALSE(announced()) << "replicas 0 and 1 would fence replica 2";
  back(2);
  EXPECT_TRUE(announced());
  EXPECT_EQ(again.coordinator.members().size(), 3u);
  for (std::uint32_t r : {0u, 1u, 2u}) again.reduced(r);
  EXPECT_EQ(again.coordinator.committed(), Step(1));
}

TEST(Coordinator, ALogOfAnotherJobIsRefused) {
  Bench bench;
  bench.start();
  proto::LogRecord job;
  job.mutable_job()->set_replicas(5);
  Coordinator other(bench.config);
  auto recovered = other.recover({job}, bench.now);
  ASSERT_FALSE(recovered);
  EXPECT_EQ(recovered.error().code, ErrorCode::mismatch);
}

}  // namespace
}  // namespace rejoin::membership
