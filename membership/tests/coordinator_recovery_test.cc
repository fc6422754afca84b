// After the coordinator's restart: what it waits for before it goes on without somebody who may have the state.
#include <functional>

#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {
namespace {

// The last contributor has ended. The joiner's ranks register, and that they have caught up comes later: their nodes
// stand still in between, or a segment was lost and is sent again.
TEST(Coordinator, AJoinerWhoseRanksHaveYetToSayWhereTheyStandIsWaitedFor) {
  for (const Duration late : {Duration(200ms), Duration(400ms), Duration(900ms), Duration(3s)}) {
    Bench first;
    first.start_with_a_joiner();
    Bench bench(first.log);
    bench.lose_the_contributor_of(first);
    bench.pass(1200ms, {10});
    bench.inbox.clear();
    bench.back_with(1, 0, 11, 2), bench.back_with(1, 1, 12, 2);
    bench.stand(1, 0, true, 11);
    bench.pass(late, {10, 11});
    EXPECT_FALSE(bench.evicted_anybody());
    if (late > bench.config.silence) bench.back_with(1, 1, 12, 2);  // it was taken for gone, and connects anew
    bench.stand(1, 1, true, 12);
    bench.pass(1s, {10, 11, 12});
    bench.expect_alone(1);
  }
}

// What it says is heard, and is not that.
TEST(Coordinator, AJoinerWhoseRanksHaveNotCaughtUpIsNotWaitedFor) {
  for (const bool silent : {false, true}) {
    Bench first;
    first.start_with_a_joiner();
    Bench bench(first.log);
    bench.incarnations = first.incarnations;
    bench.back(0, 10), bench.back(1, 11, 2);
    bench.down(0);
    if (!silent) bench.stand(1, 0, false, 11);
    bench.pass(6s, {10, 11});
    EXPECT_TRUE(bench.coordinator.members().empty());
  }
}

// ---- nobody was heard for a while

// A job of three that has committed a step, by this coordinator or by one that was started again, and whose nodes are
// all lost: at once, or they were heard last one after the other.
enum class Loss : std::uint8_t { restart, closed, silent };
void with_nobody_heard(const std::function<void(Bench&, Epoch, const std::string&)>& then) {
  for (const auto loss : {Loss::restart, Loss::closed, Loss::silent})
    for (const Duration lasting : {Duration(2500ms), Duration(8s)}) {
      Bench before;
      before.start();
      before.steps(1);
      before.pass(1s);
      Bench after(before.log);
      after.incarnations = before.incarnations;
      Bench& bench = loss == Loss::restart ? after : before;
      const Epoch epoch = before.coordinator.epoch();
      for (std::uint64_t node : {0, 1, 2}) {
        if (loss == Loss::silent) bench.pass(125ms, {node});
        if (loss == Loss::closed) bench.keep(bench.coordinator.on_node_lost(NodeId(node), bench.now));
      }
      bench.pass(lasting, {});
      const std::string how = fmt::format("{} for {} ms", static_cast<int>(loss), milliseconds(lasting));
      ASSERT_EQ(bench.contributors(), 3u) << how;
      then(bench, epoch, how);
      if (testing::Test::HasFatalFailure()) return;
    }
}

TEST(Coordinator, TheTimeInWhichNobodyWasHeardIsNobodysSilence) {
  with_nobody_heard([](Bench& bench, Epoch epoch, const std::string& how) {
    bench.back(1, 11);
    bench.pass(900ms, {11});
    bench.back(0, 10);
    bench.pass(125ms, {10, 11});  // while ranks still come
    bench.back(2, 12);
    bench.pass(3s, {10, 11, 12});
    EXPECT_EQ(bench.coordinator.epoch(), epoch) << how;
    EXPECT_EQ(bench.contributors(), 3u) << how;
    EXPECT_FALSE(bench.evicted_anybody()) << how;
  });
}

TEST(Coordinator, WhoDoesNotComeWithinASilenceOfTheFirstIsOut) {
  with_nobody_heard([](Bench& bench, Epoch, const std::string& how) {
    bench.back(1, 11);
    bench.back_with(0, 0, 10, 1);  // half of it alone
    bench.pass(900ms, {10, 11});
    ASSERT_EQ(bench.contributors(), 3u) << how;
    bench.pass(500ms, {10, 11});
    ASSERT_NO_FATAL_FAILURE(bench.expect_alone(1)) << how;
    bench.reduced(1, 11);
    EXPECT_EQ(bench.coordinator.committed(), Step(2)) << how;
  });
}

// Of no replica are all ranks there: nobody can go on.
TEST(Coordinator, WhoIsThereByHalfIsNotTheFirstThatComesBack) {
  with_nobody_heard([](Bench& bench, Epoch epoch, const std::string& how) {
    bench.back_with(1, 0, 11, 1);
    bench.back_with(0, 1, 10, 1);
    bench.pass(7s, {10, 11});
    ASSERT_EQ(bench.contributors(), 3u) << how;
    bench.back_with(1, 1, 11, 1);
    bench.pass(900ms, {10, 11});
    bench.back_with(0, 0, 10, 1), bench.back(2, 12);
    bench.pass(3s, {10, 11, 12});
    EXPECT_EQ(bench.coordinator.epoch(), epoch) << how;
    EXPECT_EQ(bench.contributors(), 3u) << how;
  });
}

// The others have died. A connection that comes and goes keeps the job only for as long as nobody is heard.
TEST(Coordinator, WhoComesAndGoesAloneGoesOnAlone) {
  for (const Duration away : {Duration(250ms), Duration(500ms), Duration(1100ms)})
    with_nobody_heard([&](Bench& bench, Epoch, const std::string& how) {
      bench.back(1, 11);
      std::uint64_t node = 11;
      for (int i = 0; i < 8; ++i) {
        bench.pass(500ms, {node});
        bench.keep(bench.coordinator.on_node_lost(NodeId(node), bench.now));
        bench.pass(away, {});
        bench.back(1, ++node);
      }
      EXPECT_EQ(bench.contributors(), away > 1s ? 3u : 1u) << how;
      bench.pass(1100ms, {node});
      ASSERT_NO_FATAL_FAILURE(bench.expect_alone(1)) << how;
    });
}

// Whose process has ended is not waited for, whoever says so.
TEST(Coordinator, WhoHasEndedIsNotWaitedForWhereNobodyWasHeard) {
  with_nobody_heard([](Bench& bench, Epoch, const std::string& how) {
    bench.back(1, 11);
    for (std::uint32_t replica : {0u, 2u}) {
      proto::FromNode message;
      auto& gone = *message.mutable_rank_down();
      gone.set_replica(replica);
      gone.set_instance(100);
      gone.set_incarnation(bench.incarnations[replica]);
      gone.set_job(bench.coordinator.job());
      gone.set_ended(true);
      bench.send(10, message);
    }
    bench.pass(125ms, {10, 11});
    ASSERT_NO_FATAL_FAILURE(bench.expect_alone(1)) << how;
  });
}

// ---- ends at the time of a takeover

// A job of three that has committed a step, and another coordinator that takes up its log: replica 2 has ended.
struct TakenOver {
  Bench before;
  std::optional<Bench> after;
  explicit TakenOver(BenchOptions told = {}) {
    before.start();
    before.steps(1);
    before.pass(1s);
    after.emplace(before.log, told);
    after->incarnations = before.incarnations;
  }
  // Its daemon tells of the end of this rank, which had heard all of what was decided, or more, or nobody says what.
  void ended(std::uint32_t replica, std::uint32_t rank = 0, std::optional<std::uint64_t> more = 0) {
    proto::FromNode message;
    auto& gone = *message.mutable_rank_down();
    gone.set_replica(replica);
    gone.set_rank(rank);
    gone.set_instance(100 + rank);
    gone.set_incarnation(before.incarnations[replica]);
    gone.set_job(before.coordinator.job());
    gone.set_ended(true);
    gone.set_reason("killed");
    if (more) gone.set_heard_epoch(before.coordinator.epoch().value + *more);
    if (more) gone.set_heard_committed(before.coordinator.committed().value);
    after->send(12, message);
  }
};

TEST(Coordinator, WhoHasEndedIsNotWaitedForWhereAllOthersAreBack) {
  for (const bool first : {false, true}) {  // it is told before the others are back, or after that
    TakenOver job;
    Bench& bench = *job.after;
    const auto end = [&] { job.ended(2, 0), job.ended(2, 1); };
    if (first) end();
    bench.back(0, 10), bench.back(1, 11);
    EXPECT_EQ(bench.contributors(), first ? 2u : 3u) << first;
    if (!first) end();
    EXPECT_EQ(bench.contributors(), 2u) << first;
    EXPECT_EQ(bench.coordinator.epoch(), job.before.coordinator.epoch().next());
    EXPECT_NE(bench.warnings.find("replica 2 is out: rank 0: killed"), std::string::npos) << bench.warnings;
    bench.reduced(0, 10), bench.reduced(1, 11);
    EXPECT_EQ(bench.coordinator.committed(), Step(2)) << first;
    EXPECT_FALSE(bench.evicted_anybody());
  }
}

// Of two replicas.
TEST(Coordinator, WhoeverHaveEndedTogetherAreNotWaitedFor) {
  TakenOver job;
  for (std::uint32_t replica : {1u, 2u}) job.ended(replica, 0), job.ended(replica, 1);
  EXPECT_EQ(job.after->contributors(), 3u);  // somebody has to go on
  job.after->back(0, 10);
  ASSERT_NO_FATAL_FAILURE(job.after->expect_alone(0));
  job.after->reduced(0, 10);
  EXPECT_EQ(job.after->coordinator.committed(), Step(2));
}

// Its other rank may know more than the log, and so may whoever has ended, as far as nobody says what it had heard.
TEST(Coordinator, WhoHasEndedIsWaitedForWhereTheLogMayBeAnOlderCopy) {
  using Case = std::function<void(TakenOver&)>;
  const Case cases[] = {[](auto& job) { job.ended(2, 0); },
                        [](auto& job) { job.ended(2, 0), job.ended(2, 1, std::nullopt); },
                        [](auto& job) { job.ended(2, 0), job.ended(2, 1, 1); },
                        // One of before is told of behind one that had heard more.
                        [](auto& job) {
                          ++job.before.incarnations[2];
                          job.ended(2, 0, 2), job.ended(2, 1, 2);
                          --job.before.incarnations[2];
                          job.ended(2, 0), job.ended(2, 1);
                        }};
  for (const auto& tell : cases) {
    TakenOver job;
    Bench& bench = *job.after;
    bench.back(0, 10), bench.back(1, 11);
    tell(job);
    bench.pass(900ms, {10, 11, 12});
    EXPECT_EQ(bench.contributors(), 3u);
    bench.pass(500ms, {10, 11, 12});
    EXPECT_EQ(bench.contributors(), 2u);
  }
}

// The other rank of its replica is there.
TEST(Coordinator, WhoHasLostARankIsNotWaitedForWhereAllOthersAreBack) {
  TakenOver job;
  Bench& bench = *job.after;
  job.ended(2, 1);
  bench.back(0, 10), bench.back(1, 11);
  EXPECT_EQ(bench.contributors(), 3u);
  bench.back_with(2, 0, 12, 1);
  EXPECT_EQ(bench.contributors(), 2u);
  EXPECT_TRUE(bench.evicted_anybody());
}

// Who was the first to come back, and is lost with the way to all others again, is no reason to go on without them.
TEST(Coordinator, WhoIsLostAgainBeforeTheOthersHaveComePutsOutNobody) {
  for (const bool closed : {false, true})
    with_nobody_heard([&](Bench& bench, Epoch epoch, const std::string& how) {
      bench.back(1, 11);
      bench.pass(125ms, {11});
      if (closed) bench.keep(bench.coordinator.on_node_lost(NodeId(11), bench.now));
      bench.pass(3s, {});
      ASSERT_EQ(bench.contributors(), 3u) << how << closed;
      bench.back(0, 20);
      bench.pass(900ms, {20});
      bench.back(1, 21), bench.back(2, 22);
      bench.pass(3s, {20, 21, 22});
      EXPECT_EQ(bench.coordinator.epoch(), epoch) << how << closed;
      EXPECT_EQ(bench.contributors(), 3u) << how << closed;
    });
}

// It has missed the last commit, and those that wait for it in the next step have no patience left. They wait anew.
TEST(Coordinator, WhoComesBackLastHasTimeToDoTheStepThatOthersWaitIn) {
  with_nobody_heard([](Bench& bench, Epoch epoch, const std::string& how) {
    bench.back(1, 11);
    bench.pass(125ms, {11});
    bench.back(0, 10);
    bench.pass(750ms, {10, 11});
    bench.back(2, 12);
    bench.accuse(0, 2, false, false, 10), bench.accuse(1, 2, false, false, 11);
    bench.pass(3s, {10, 11, 12});
    EXPECT_EQ(bench.coordinator.epoch(), Epoch(epoch.value + 1)) << how;
    ASSERT_EQ(bench.contributors(), 3u) << how;
    bench.accuse(0, 2, false, false, 10);
    bench.pass(500ms, {10, 11, 12});
    EXPECT_EQ(bench.contributors(), 2u) << "it hangs: " << how;
  });
}

// A connection that broke again before the replica was there, on another of its ranks.
TEST(Coordinator, ARankThatFlapsBeforeTheFirstReplicaIsThereTakesNobodysTime) {
  with_nobody_heard([](Bench& bench, Epoch epoch, const std::string& how) {
    bench.back_with(1, 1, 11, 1);
    bench.pass(125ms, {11});
    bench.keep(bench.coordinator.on_node_lost(NodeId(11), bench.now));
    bench.back_with(1, 0, 20, 1), bench.back_with(1, 1, 20, 1);
    bench.pass(750ms, {20});
    bench.back(0, 10), bench.back(2, 12);
    bench.pass(3s, {20, 10, 12});
    EXPECT_EQ(bench.coordinator.epoch(), epoch) << how;
    EXPECT_EQ(bench.contributors(), 3u) << how;
  });
}

// No node was lost by then, or none knows it. What lies between heartbeats as a rule is still theirs.
TEST(Coordinator, AShorterTimeInWhichNobodyWasHeardIsNobodysSilenceEither) {
  for (const bool anew : {false, true})  // over connections beside those of before, or over those
    for (const Duration cut : {Duration(500ms), Duration(750ms), Duration(937ms)}) {
      if (!anew && cut > 800ms) continue;
      Bench bench;
      bench.start();
      bench.steps(1);
      bench.pass(1s);
      const Epoch epoch = bench.coordinator.epoch();
      bench.pass(188ms, {1});  // its heartbeat was the last
      bench.pass(cut, {});
      if (anew) bench.back(1, 11);
      bench.pass(312ms, {anew ? 11u : 1u});
      if (anew) bench.back(0, 10), bench.back(2, 12);
      bench.pass(2s, anew ? std::vector<std::uint64_t>{10, 11, 12} : std::vector<std::uint64_t>{0, 1, 2});
      EXPECT_EQ(bench.coordinator.epoch(), epoch) << anew << milliseconds(cut);
      EXPECT_EQ(bench.contributors(), 3u) << anew << milliseconds(cut);
    }
}

// It was heard all the time, and has the state now.
TEST(Coordinator, AJoinerThatCatchesUpGivesAContributorThatIsGoneNoMoreTime) {
  Bench bench;
  bench.start_with_a_joiner();
  bench.pass(500ms, {0, 1});
  bench.pass(937ms, {1});
  bench.caught_up(1);
  bench.pass(250ms, {1});
  EXPECT_NO_FATAL_FAILURE(bench.expect_alone(1));
}

// It has only been late to say that it lives, each time; the others have died.
TEST(Coordinator, WhoIsHeardWithGapsKeepsNobodyIn) {
  Bench bench;
  bench.start();
  bench.steps(1);
  bench.pass(1s);
  for (int i = 0; i < 8; ++i) bench.pass(500ms, {}), bench.pass(62ms, {1});
  EXPECT_NO_FATAL_FAILURE(bench.expect_alone(1));
}

// What was said before is no older than what has been heard since.
TEST(Coordinator, WhoWasAccusedBeforeNobodyWasHeardMayComeBackToAnswer) {
  Bench bench;
  bench.start();
  bench.steps(1);
  bench.pass(1s);
  const Epoch epoch = bench.coordinator.epoch();
  bench.accuse(0, 1);
  for (std::uint64_t node : {0, 1, 2}) bench.keep(bench.coordinator.on_node_lost(NodeId(node), bench.now));
  bench.pass(4s, {});
  bench.back(0, 10);
  bench.pass(900ms, {10});
  bench.back(1, 11), bench.back(2, 12);
  for (std::uint32_t replica : {0u, 1u, 2u}) bench.reduced(replica, 10 + replica);
  EXPECT_EQ(bench.coordinator.epoch(), epoch);
  EXPECT_EQ(bench.coordinator.committed(), Step(2));
}

}  // namespace
}  // namespace rejoin::membership
