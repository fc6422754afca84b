// Differences among replicas at the coordinator: a step is repeated, the job stops, an operator decides.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "membership/coordinator.h"
#include "membership/log.h"
#include "membership/tests/coordinator_bench.h"
#include "membership/tests/drift_report.h"

namespace rejoin::membership {
namespace {

using namespace std::chrono_literals;

// Two replicas of one rank, at the coordinator.
struct Pair {
  JobConfig config{.replicas = 2, .ranks = 1, .audit = {.period = 2}};
  std::unique_ptr<Coordinator> coordinator;
  TimePoint now{1s};
  std::vector<proto::LogRecord> log;
  std::map<std::uint32_t, proto::Plan> plans;  // the last that each node has heard
  std::map<std::uint32_t, std::uint64_t> incarnations;
  std::set<std::uint32_t> evicted;

  Pair() { restart(); }
  void restart(std::optional<JobConfig::Drop> drop = {}) {
    config.drop = drop;
    coordinator = std::make_unique<Coordinator>(config);
    const auto recovered = coordinator->recover(log, now);
    ASSERT_TRUE(recovered) << recovered.error().message;
    plans.clear();
  }
  void send(std::uint32_t replica, const proto::FromNode& message) {
    const Actions actions = coordinator->on_message(NodeId(replica), message, now);
    log.insert(log.end(), actions.append.begin(), actions.append.end());
    for (const auto& [nodes, sent] : actions.send)
      for (auto node : nodes) {
        const auto to = static_cast<std::uint32_t>(node.value);
        if (sent.has_registered()) incarnations[to] = sent.registered().incarnation();
        if (sent.has_plan()) plans[to] = sent.plan();
        if (sent.has_evicted()) evicted.insert(to);
      }
  }
  void tick() {
    const Actions actions = coordinator->on_tick(now);
    log.insert(log.end(), actions.append.begin(), actions.append.end());
  }
  void up(std::uint32_t replica) {
    proto::FromNode message;
    auto& rank = *message.mutable_rank_up();
    rank.set_replica(replica);
    rank.set_instance(replica + 1);
    rank.set_plan_hash(9);
    if (incarnations.contains(replica)) rank.set_incarnation(incarnations[replica]);
    send(replica, message);
  }
  void link() {
    for (std::uint32_t replica : {0u, 1u}) {
      proto::FromNode message;
      auto& status = *message.mutable_replica_status();
      status.set_replica(replica);
      status.set_incarnation(incarnations[replica]);
      RankSet(0).to(status.mutable_ranks());
      Incarnations links;
      links.insert(incarnations[1 - replica]);
      links.to(status.mutable_links());
      send(replica, message);
    }
  }
  void down(std::uint32_t replica) {
    proto::FromNode message;
    message.mutable_rank_down()->set_replica(replica);
    message.mutable_rank_down()->set_instance(replica + 1);
    message.mutable_rank_down()->set_ended(true);
    send(replica, message);
  }
  // A step's result differs over the hop between the two, of which replica 1 is the receiver.
  void flip() {
    reduced(0, 1, 5), reduced(1, 2, 5);
    for (std::uint32_t replica : {0u, 1u}) {
      proto::FromNode message;
      auto& details = *message.mutable_details();
      details.set_replica(replica);
      details.set_epoch(plans[replica].inspect().epoch());
      details.add_buckets()->add_segments()->set_digest(replica);
      send(replica, message);
    }
  }
  void reduced(std::uint32_t replica, std::uint64_t reduced, std::uint64_t state) {
    proto::FromNode message;
    auto& done = *message.mutable_reduced() = report({reduced}, {state});
    done.set_replica(replica);
    done.set_incarnation(incarnations[replica]);
    done.set_epoch(coordinator->epoch().value);
    done.set_step(coordinator->committed().value + 1);
    send(replica, message);
  }
};

TEST(Coordinator, AStepWhoseResultsDifferIsRepeatedByTheSameMembersInANewEpoch) {
  Pair job;
  job.up(0), job.up(1), job.link();
  ASSERT_TRUE(job.coordinator->started());
  const Epoch epoch = job.coordinator->epoch();
  job.reduced(0, 1, 5), job.reduced(1, 2, 5);
  EXPECT_EQ(job.coordinator->committed(), Step(0));
  EXPECT_EQ(job.coordinator->epoch(), epoch.next());
  EXPECT_EQ(job.coordinator->members().size(), 2u);
  EXPECT_EQ(job.plans[0].inspect().epoch(), epoch.value);
  EXPECT_EQ(job.plans[0].members(0).batch(0).begin(), 0u) << "with the same samples";
  job.reduced(0, 1, 5), job.reduced(1, 1, 5);
  EXPECT_EQ(job.coordinator->committed(), Step(1));
  EXPECT_FALSE(job.plans[0].has_inspect());
}

// Nobody has committed anything without it, and its results agree now.
TEST(Coordinator, WhoIsOutForItsHopsIsTakenBackWhereTheOthersAreLostBeforeTheStepIsCommitted) {
  for (const bool restarts : {false, true})
    for (const bool lost : {false, true}) {
      Pair job;
      job.up(0), job.up(1), job.link();
      job.reduced(0, 1, 5), job.reduced(1, 1, 5);
      for (int time = 0; time < 3; ++time) job.flip();
      job.reduced(0, 1, 5), job.reduced(1, 1, 5);
      ASSERT_EQ(job.coordinator->suspended().size(), 1u);
      EXPECT_EQ(job.coordinator->suspended()[0].replica, ReplicaId(1));
      EXPECT_EQ(job.plans[1].suspended_size(), 1) << "it is told so";
      if (restarts) {
        job.restart();
        job.up(0), job.up(1);
        EXPECT_EQ(job.coordinator->suspended().at(0).reason.find("its results differed 3 times, in step 2, "), 0u)
            << job.coordinator->suspended()[0].reason;
      }
      EXPECT_TRUE(job.evicted.empty()) << "a process that is sent away ends, and its state with it";
      if (lost) job.down(0);
      else job.reduced(0, 1, 5);
      EXPECT_EQ(job.evicted.contains(1), !lost);
      ASSERT_EQ(job.coordinator->members().size(), 1u);
      EXPECT_EQ(job.coordinator->members()[0].replica, ReplicaId(lost ? 1 : 0));
      if (lost) job.reduced(1, 1, 5);
      EXPECT_EQ(job.coordinator->committed(), Step(2));
    }
}

TEST(Coordinator, AJoinerThatHasNotCaughtUpIsOutForItsOwnHopsAtOnce) {
  Pair job;
  job.up(0), job.up(1), job.link();
  job.reduced(0, 1, 5), job.reduced(1, 1, 5);
  for (int time = 0; time < 2; ++time) job.flip();
  job.reduced(0, 1, 5), job.reduced(1, 1, 5);
  job.down(1);
  job.incarnations.erase(1);
  job.up(1), job.link();
  job.reduced(0, 1, 5);
  ASSERT_EQ(job.coordinator->members().size(), 2u);
  job.evicted.clear();
  job.flip();
  job.reduced(0, 1, 5), job.reduced(1, 1, 0);
  EXPECT_TRUE(job.evicted.empty()) << "the two strikes before are those of the process before it";
  ASSERT_EQ(job.coordinator->members().size(), 2u);
  for (int time = 0; time < 2; ++time) job.flip();
  job.reduced(0, 1, 5), job.reduced(1, 1, 0);
  EXPECT_TRUE(job.coordinator->suspended().empty());
  EXPECT_TRUE(job.evicted.contains(1));
}

// Its audit begins anew, and some replicas have heard of the phase before: what they say of their states is of
// different parts.
TEST(Coordinator, ARestartInTheMiddleOfAStepIsNotTakenForDrift) {
  Pair job;
  job.up(0), job.up(1), job.link();
  job.reduced(0, 1, 5), job.reduced(1, 1, 5);
  ASSERT_EQ(job.coordinator->committed(), Step(1));
  job.restart();
  job.up(0), job.up(1);
  const Epoch epoch = job.coordinator->epoch();
  job.reduced(0, 1, 5), job.reduced(1, 1, 6);
  EXPECT_EQ(job.coordinator->committed(), Step(2));
  EXPECT_EQ(job.coordinator->epoch(), epoch);
  job.reduced(0, 1, 5), job.reduced(1, 1, 6);
  EXPECT_EQ(job.coordinator->committed(), Step(2)) << "from the next step on they are compared again";
}

TEST(Coordinator, WhoseStateDiffersWithoutAMajorityStopsTheJobThroughRestartsUntilOneIsDropped) {
  Pair job;
  job.up(0), job.up(1), job.link();
  job.reduced(0, 1, 5), job.reduced(1, 1, 5);
  ASSERT_EQ(job.coordinator->committed(), Step(1));
  for (int time = 0; time < 3; ++time) job.reduced(0, 1, 5), job.reduced(1, 1, 6);
  ASSERT_TRUE(job.coordinator->stopped());
  EXPECT_EQ(job.plans[1].stopped(), *job.coordinator->stopped());
  EXPECT_NE(job.coordinator->waiting_for(job.now).at(0).find("an operator's decision"), std::string::npos);
  // Also where they agree again: nobody knows which of them has been wrong since when.
  job.reduced(0, 1, 5), job.reduced(1, 1, 5);
  EXPECT_EQ(job.coordinator->committed(), Step(1));
  job.restart();
  job.up(0), job.up(1);
  EXPECT_TRUE(job.coordinator->stopped());
  job.restart(JobConfig::Drop{ReplicaId(0), Step(2)});  // not what the operator has seen
  EXPECT_TRUE(job.coordinator->stopped());
  {
    // It has ended since, as people were asked to see to.
    Pair ended = [&] {
      Pair pair;
      pair.log = job.log;
      pair.incarnations = job.incarnations;
      return pair;
    }();
    ended.restart();
    ended.up(0), ended.up(1);
    ended.down(0);
    ended.restart(JobConfig::Drop{ReplicaId(0), Step(1)});
    EXPECT_FALSE(ended.coordinator->stopped());
  }
  Coordinator given_nonsense({.replicas = 2, .ranks = 1, .drop = JobConfig::Drop{ReplicaId(7), Step(1)}});
  const auto refused = given_nonsense.recover(job.log, job.now);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::mismatch) << "it never becomes right: nobody is to start it again";
  EXPECT_NE(refused.error().message.find("replica 7 is none of those that differ, which are 0, 1"), std::string::npos)
      << refused.error().message;
  job.restart(JobConfig::Drop{ReplicaId(0), Step(1)});
  EXPECT_FALSE(job.coordinator->stopped());
  job.up(1), job.up(0);
  EXPECT_TRUE(job.evicted.contains(0));
  EXPECT_FALSE(job.evicted.contains(1));
  ASSERT_EQ(job.coordinator->members().size(), 1u);
  EXPECT_EQ(job.coordinator->members()[0].replica, ReplicaId(1));
  job.reduced(1, 1, 6);
  EXPECT_EQ(job.coordinator->committed(), Step(2));
  job.restart(JobConfig::Drop{ReplicaId(1), Step(2)});  // it is not stopped: nothing to decide
  job.up(1);
  EXPECT_EQ(job.coordinator->members().size(), 1u);
}

// The right one's node is away for a little more than a silence, while nothing is committed.
TEST(Coordinator, AnOperatorMayDropTheWrongReplicaThoughTheRightOneIsOutForNow) {
  for (const bool back : {false, true}) {
    Pair job;
    job.up(0), job.up(1), job.link();
    job.reduced(0, 1, 5), job.reduced(1, 1, 5);
    for (int time = 0; time < 3; ++time) job.reduced(0, 1, 5), job.reduced(1, 1, 6);
    ASSERT_TRUE(job.coordinator->stopped());
    for (const TimePoint until = job.now + job.config.silence + 500ms; job.now < until;) {
      job.now += 50ms;
      proto::FromNode heartbeat;
      heartbeat.mutable_heartbeat();
      job.send(0, heartbeat);
      job.tick();
    }
    ASSERT_EQ(job.coordinator->suspended().size(), 1u);
    if (back) {
      job.up(1);
      EXPECT_EQ(job.coordinator->members().size(), 2u) << "nothing was committed without it";
      EXPECT_TRUE(job.coordinator->stopped());
    }
    job.restart(JobConfig::Drop{ReplicaId(0), Step(1)});
    EXPECT_FALSE(job.coordinator->stopped());
    job.tick();
    job.restart();  // the log says the same
    job.up(1), job.up(0);
    EXPECT_TRUE(job.evicted.contains(0));
    EXPECT_FALSE(job.evicted.contains(1));
    job.reduced(1, 1, 6);
    EXPECT_EQ(job.coordinator->committed(), Step(2));
  }
}

// The states that differed have gone with their processes.
TEST(Coordinator, AJobThatHasStoppedGoesOnFromACheckpointWithNewProcesses) {
  for (const bool restarts : {false, true}) {
    Pair job;
    job.up(0), job.up(1), job.link();
    job.reduced(0, 1, 5), job.reduced(1, 1, 5);
    for (int time = 0; time < 3; ++time) job.reduced(0, 1, 5), job.reduced(1, 1, 6);
    ASSERT_TRUE(job.coordinator->stopped());
    job.config.roll_back_to = Step(0);
    job.restart();
    job.up(0), job.up(1);
    job.down(0), job.down(1);
    EXPECT_FALSE(job.coordinator->stopped());
    if (restarts) job.restart();
    EXPECT_FALSE(job.coordinator->stopped());
    job.incarnations.clear();
    job.up(0), job.up(1), job.link();
    job.reduced(0, 1, 5), job.reduced(1, 1, 5);
    EXPECT_EQ(job.coordinator->committed(), Step(1));
  }
}

// It is out for silence when the operator says so, and is no member that could be put out.
TEST(Coordinator, WhoIsDroppedWhileItIsOutForNowIsNotTakenBackWhoeverIsLostLater) {
  Bench bench;
  bench.start();
  bench.steps(1);
  bench.pass(1500ms, {1, 2});
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  auto log = bench.log;
  proto::LogRecord stopped;
  stopped.mutable_stopped()->set_step(1);
  stopped.mutable_stopped()->set_reason("their states differ");
  for (std::uint32_t r : {0u, 1u, 2u}) stopped.mutable_stopped()->add_replicas(r);
  log.push_back(stopped);
  Bench told(log, {.drop = JobConfig::Drop{ReplicaId(0), Step(1)}});
  EXPECT_FALSE(told.coordinator.stopped());
  told.incarnations = bench.incarnations;
  for (std::uint32_t r : {0u, 1u, 2u}) told.back(r, r);
  told.down(1);
  ASSERT_EQ(told.coordinator.members().size(), 1u);
  log.insert(log.end(), told.log.begin(), told.log.end());
  told.down(2);
  EXPECT_TRUE(told.coordinator.members().empty());

  Bench again(log);  // after the epoch without replica 1
  again.incarnations = bench.incarnations;
  for (std::uint32_t r : {0u, 2u}) again.back(r, r);
  ASSERT_EQ(again.coordinator.members().size(), 1u);
  again.down(2);
  EXPECT_TRUE(again.coordinator.members().empty());
}

// It had samples when it was put out, and nobody is left who might give it back.
TEST(Coordinator, SamplesOfWhoWasOutForNowAndIsLostAreTrainedAfterARestart) {
  Bench bench;
  bench.start();
  bench.steps(1);
  bench.pass(1500ms, {1, 2});
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  bench.down(0);
  for (std::uint32_t r : {1u, 2u}) bench.down(r);
  ASSERT_TRUE(bench.coordinator.members().empty());
  Bench again(bench.log);
  EXPECT_EQ(again.coordinator.ledger().held(), bench.coordinator.ledger().held());
  for (std::uint32_t r : {0u, 1u, 2u}) again.up(r, 2, 1);
  again.link_all();
  again.steps(2);
  ASSERT_EQ(again.coordinator.committed(), Step(3));
  auto log = bench.log;
  log.insert(log.end(), again.log.begin(), again.log.end());
  EXPECT_EQ(audit(trained_by_step(log)).lost, 0u);
}

}  // namespace
}  // namespace rejoin::membership
