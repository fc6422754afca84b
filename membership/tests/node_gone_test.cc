// What others hear of a process that has ended, whenever it has.
#include <gtest/gtest.h>

#include "membership/node.h"
#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {
namespace {

struct Daemon {
  Node node{"node", 1s, 1};
  TimePoint now{1s};

  void up(std::uint64_t connection, std::uint64_t instance = 1, std::uint64_t incarnation = 5, std::uint64_t job = 7) {
    proto::FromNode message;
    auto& its = *message.mutable_rank_up();
    its.set_instance(instance);
    its.set_incarnation(incarnation);
    its.set_job(job);
    its.set_heard_epoch(incarnation != 0 ? 2 : 0);
    (void)node.on_rank_message(RankConnection(connection), message, now);
  }
  auto gone(std::uint64_t connection, Node::Gone how) {
    return node.on_rank_gone(RankConnection(connection), "it went", how).to_coordinator;
  }
  void come_and_end() {
    up(1);
    (void)gone(1, Node::Gone::ended);
  }
  void registered(std::uint64_t instance, std::uint64_t incarnation, std::uint64_t job) {
    proto::ToNode message;
    message.mutable_registered()->set_instance(instance);
    message.mutable_registered()->set_incarnation(incarnation);
    message.mutable_registered()->set_job(job);
    (void)node.on_coordinator_message(message, now);
  }
  std::uint64_t epoch = 3;
  void plan(std::uint64_t committed, bool member, std::uint64_t job = 7, bool finished = false) {
    proto::ToNode message;
    auto& plan = *message.mutable_plan();
    plan.set_job(job);
    plan.set_epoch(epoch);
    plan.set_committed(committed);
    plan.set_finished(finished);
    if (member) plan.add_members()->set_incarnation(5);
    (void)node.on_coordinator_message(message, now);
  }
  // What it says of ends when it introduces itself.
  std::vector<proto::RankDown> said() {
    std::vector<proto::RankDown> ends;
    for (const auto& message : node.on_coordinator_up(now).to_coordinator)
      if (message.has_rank_down()) ends.push_back(message.rank_down());
    return ends;
  }
};

TEST(NodeGone, AnEndIsSaidToWhomeverItIsConnectedWithNext) {
  for (const auto how : {Node::Gone::ended, Node::Gone::left}) {
    Daemon of;
    of.up(1);
    EXPECT_TRUE(of.gone(1, how).empty()) << "nobody is there to hear it";
    for (int times = 0; times < 2; ++times) {
      const auto ends = of.said();
      ASSERT_EQ(ends.size(), 1u);
      EXPECT_TRUE(ends[0].ended());
      EXPECT_EQ(ends[0].left(), how == Node::Gone::left);
      EXPECT_EQ(ends[0].incarnation(), 5u);
      EXPECT_EQ(ends[0].job(), 7u);
    }
  }
}

// Until then it may be wanted back.
TEST(NodeGone, AnEndIsOldNewsWhenAStepWasCommittedWithoutIt) {
  Daemon of;
  of.come_and_end();
  of.plan(3, true), of.plan(4, true);
  EXPECT_EQ(of.said().size(), 1u) << "it is a member";
  of.plan(4, false);
  of.plan(9, false, 8);
  EXPECT_EQ(of.said().size(), 1u) << "out, and nothing is committed since but another job's";
  of.plan(5, false);
  EXPECT_TRUE(of.said().empty());
}

TEST(NodeGone, AFinishedJobHasNoUseForEnds) {
  Daemon of;
  of.come_and_end();
  of.plan(4, true, 7, true);
  EXPECT_TRUE(of.said().empty());
}

// Its supervisor has started it again meanwhile, as often as that takes.
TEST(NodeGone, TheEndOfWhoWasAMemberIsSaidWhoeverHadItsPlaceSince) {
  Daemon of;
  of.plan(3, true);
  of.come_and_end();
  for (std::uint64_t later = 2; later < 20; ++later) {
    of.up(later, later, later % 2 == 0 ? 0 : 10 + later);
    (void)of.gone(later, Node::Gone::ended);
  }
  const auto ends = of.said();
  ASSERT_EQ(ends.size(), 2u) << "and that of the last one that was registered";
  EXPECT_EQ(ends[0].incarnation(), 5u);
  EXPECT_EQ(ends[1].incarnation(), 29u);
}

TEST(NodeGone, WhoHasRegisteredInAPlaceHasItAndNobodyAsksForThoseOfBefore) {
  Daemon of;
  of.come_and_end();
  of.up(2, 2, 0);
  EXPECT_EQ(of.said().size(), 1u);
  of.registered(2, 6, 7);
  EXPECT_TRUE(of.said().empty());
}

// Found by the simulator: the other job's coordinator answered where its own, which was away, is called. That one
// waited for the process for ever.
TEST(NodeGone, WhomAnotherJobHasRegisteredInAPlaceSaysNothingOfAnEndBeforeIt) {
  Daemon of;
  of.plan(3, true);
  of.come_and_end();
  of.up(2, 2, 0);
  of.registered(2, 1, 8);
  of.epoch = 9;
  of.plan(40, false, 8);
  EXPECT_EQ(of.said().size(), 1u);
  (void)of.gone(2, Node::Gone::ended);
  const auto ends = of.said();
  ASSERT_EQ(ends.size(), 2u);
  EXPECT_EQ(ends[0].job(), 7u);
  EXPECT_EQ(ends[0].incarnation(), 5u);
  EXPECT_EQ(ends[1].job(), 8u);
  // Each job's own.
  of.plan(41, false, 8), of.plan(42, false, 8);
  ASSERT_EQ(of.said().size(), 1u);
  EXPECT_EQ(of.said()[0].job(), 7u);
  of.epoch = 3;
  of.plan(4, false), of.plan(5, false);
  EXPECT_TRUE(of.said().empty());
}

TEST(NodeGone, WhoIsSilentIsSaidToHaveEndedThoughAnotherJobHasRegisteredItsPlaceSince) {
  for (const std::uint64_t job : {7, 8}) {
    Daemon of;
    (void)of.said();
    of.up(1);
    (void)of.gone(1, Node::Gone::silent);
    of.up(2, 2, 0);
    of.registered(2, 6, job);
    EXPECT_EQ(of.gone(1, Node::Gone::ended).size(), job == 8 ? 1u : 0u) << "of one job the later one has the place";
  }
}

// A daemon may see many jobs, one after the other.
TEST(NodeGone, OfOtherJobsTheLastEndsAreKept) {
  Daemon of;
  for (std::uint64_t job = 100; job < 200; ++job) {
    of.up(job, job, 5, job);
    (void)of.gone(job, Node::Gone::ended);
  }
  const auto ends = of.said();
  EXPECT_LT(ends.size(), 20u);
  ASSERT_GT(ends.size(), 4u);
  EXPECT_EQ(ends.back().job(), 199u);
  EXPECT_EQ(ends.front().job(), 200 - ends.size());
}

// Others may have the numbers of who had them then.
TEST(NodeGone, EndsAreNoNewsToALogThatWasPutBackToAnOlderCopy) {
  Daemon of;
  of.plan(3, true);
  of.come_and_end();
  of.epoch = 1;
  of.plan(1, true);
  EXPECT_TRUE(of.said().empty());
}

// It hung, and was killed.
TEST(NodeGone, WhoWasSilentIsSaidToHaveEndedWhenItHas) {
  Daemon of;
  (void)of.said();
  of.up(1);
  const auto silent = of.gone(1, Node::Gone::silent);
  ASSERT_EQ(silent.size(), 1u);
  EXPECT_FALSE(silent[0].rank_down().ended());
  EXPECT_TRUE(of.said().empty());
  EXPECT_TRUE(of.gone(1, Node::Gone::silent).empty()) << "its connection is closed";
  const auto ended = of.gone(1, Node::Gone::ended);
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_TRUE(ended[0].rank_down().ended());
  EXPECT_EQ(of.said().size(), 1u);
  EXPECT_TRUE(of.gone(1, Node::Gone::ended).empty());
}

TEST(NodeGone, WhoIsBackOverAnotherConnectionHasNotEndedWithTheFirst) {
  Daemon of;
  (void)of.said();
  of.up(1);
  (void)of.gone(1, Node::Gone::silent);
  of.up(2);
  EXPECT_TRUE(of.gone(1, Node::Gone::ended).empty());
  EXPECT_TRUE(of.said().empty());
}

// ---- what a coordinator makes of it

struct Begun : Bench {
  Begun() { start(), steps(3); }
};

// One that hears of ends that an earlier one did not hear of.
struct Restarted : Bench {
  explicit Restarted(const Bench& before = Begun()) : Bench(before.log) { incarnations = before.incarnations; }
  void ended(std::uint32_t replica, std::uint64_t of_job, std::uint64_t incarnation) {
    proto::FromNode message;
    auto& down = *message.mutable_rank_down();
    down.set_replica(replica);
    down.set_instance(55);
    down.set_reason("killed");
    down.set_ended(true);
    down.set_job(of_job);
    down.set_incarnation(incarnation);
    send(replica, message);
  }
  void ended(std::uint32_t replica) { ended(replica, coordinator.job(), incarnations[replica]); }
};

TEST(NodeGone, ACoordinatorThatWasStartedSinceWaitsForNobodyWhoHasEnded) {
  Restarted after;
  after.back(0, 0), after.back(1, 1);
  after.ended(2);
  EXPECT_EQ(after.coordinator.members().size(), 3u) << "it may be another's end, by an older copy of the log";
  after.pass(1100ms);
  EXPECT_EQ(after.coordinator.members().size(), 2u);
  EXPECT_NE(after.warnings.find("replica 2 is out: rank 0: killed"), std::string::npos) << after.warnings;
  after.ended(0), after.ended(1);
  after.pass(1100ms);
  EXPECT_EQ(after.coordinator.members().size(), 2u) << "other processes have those places, who are here";
}

TEST(NodeGone, TheLastHolderThatHasEndedIsNotWaitedFor) {
  Restarted after;
  after.ended(0, after.coordinator.job(), after.incarnations[0] + 9);  // one that came after the member
  after.ended(1), after.ended(2);
  after.pass(1100ms);
  EXPECT_TRUE(after.coordinator.members().empty());
  EXPECT_NE(after.warnings.find("no process is left"), std::string::npos) << after.warnings;
}

TEST(NodeGone, AnEndOfAnotherJobOrOfAnEarlierProcessIsNobodysHere) {
  Restarted after;
  after.ended(0, after.coordinator.job() + 1, after.incarnations[0]);
  after.ended(1, 0, after.incarnations[1]);
  after.ended(2, after.coordinator.job(), after.incarnations[2] - 1);
  after.ended(2, after.coordinator.job(), 0);
  after.ended(9, after.coordinator.job(), after.incarnations[0]);
  after.pass(1100ms);
  EXPECT_EQ(after.coordinator.members().size(), 3u);
}

// A log that was put back may have given its number again, to one that is late.
TEST(NodeGone, WhoComesBackInTimeIsNotTakenForWhoHadItsNumberBefore) {
  Restarted after;
  after.ended(0);
  after.back(0, 0), after.back(1, 1), after.back(2, 2);
  after.pass(1100ms);
  EXPECT_EQ(after.coordinator.members().size(), 3u);
}

}  // namespace
}  // namespace rejoin::membership
