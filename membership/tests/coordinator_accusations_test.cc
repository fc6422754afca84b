// Members that wait for each other, or have lost each other.
#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {
namespace {

TEST(Coordinator, OfAWaitForGraphTheOneThatWaitsForNobodyIsOut) {
  Bench bench;
  bench.start();
  bench.accuse(0, 2);  // waits for 2, which itself waits for 1
  bench.accuse(2, 1);
  bench.pass(300ms);
  ASSERT_EQ(bench.coordinator.members().size(), 2u);
  EXPECT_EQ(bench.coordinator.members()[0].replica, ReplicaId(0));
  EXPECT_EQ(bench.coordinator.members()[1].replica, ReplicaId(2));
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  EXPECT_EQ(bench.coordinator.suspended()[0].reason,
            "it hangs: its processes are heard, wait for nobody and do not go on; replica 2 waits for chunk 3 of 9 of "
            "the reduce-scatter");
}

// The other one has done its part, and hears the same reason when its replica is out.
TEST(Coordinator, OfAReplicaThatHangsTheRanksThatHaveNotReducedAreNamed) {
  Bench bench;
  bench.start();
  bench.reduced_by(1, 1);
  bench.accuse(0, 2), bench.accuse(2, 1);
  bench.pass(300ms);
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  EXPECT_NE(bench.coordinator.suspended()[0].reason.find("do not go on; rank 0 (process 0 on node ) has not reduced"),
            std::string::npos)
      << bench.coordinator.suspended()[0].reason;
}

// Of a process that has been there for few steps: it has more patience, and says all the same whom it waits for.
TEST(Coordinator, WhoHasNotWaitedForTooLongDoesNotHang) {
  Bench bench;
  bench.start();
  for (int i = 0; i < 8 && bench.coordinator.members().size() == 3; ++i) {
    bench.accuse(0, 1);
    bench.accuse(1, 2, /*lost=*/false, /*only_waiting=*/true);
    bench.accuse(2, 0);  // it has another wait than the one that keeps it
    bench.accuse(0, 2);
    bench.pass(63ms);
  }
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  EXPECT_EQ(bench.coordinator.suspended()[0].reason.find("it hangs"), std::string::npos)
      << bench.coordinator.suspended()[0].reason;
}

TEST(Coordinator, OfWhoHasNotWaitedForTooLongItIsTheOneThatItWaitsForThatHangs) {
  Bench bench;
  bench.start();
  for (int i = 0; i < 8 && bench.coordinator.members().size() == 3; ++i) {
    bench.accuse(0, 2);
    bench.accuse(2, 1, /*lost=*/false, /*only_waiting=*/true);
    if (i > 2) bench.accuse(0, 1);
    bench.pass(63ms);
  }
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  EXPECT_EQ(bench.coordinator.suspended()[0].replica, ReplicaId(1));
}

// Its patience is over a moment after that of who waits for it.
TEST(Coordinator, OfWhoHasWaitedForTooLongJustNowItIsTheOneThatItWaitsForThatHangs) {
  Bench bench;
  bench.start();
  bench.accuse(0, 1);
  bench.pass(63ms);
  bench.accuse(1, 2);
  bench.pass(500ms);
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  EXPECT_EQ(bench.coordinator.suspended()[0].replica, ReplicaId(2)) << bench.coordinator.suspended()[0].reason;
}

// What it waited for has come since.
TEST(Coordinator, AWaitThatWasNotTooLongAndIsOverTellsNothing) {
  Bench bench;
  bench.start();
  bench.accuse(1, 2, /*lost=*/false, /*only_waiting=*/true);
  bench.pass(300ms);
  bench.accuse(0, 1);
  bench.accuse(2, 1);
  bench.pass(300ms);
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  EXPECT_EQ(bench.coordinator.suspended()[0].reason.find("it hangs"), 0u) << bench.coordinator.suspended()[0].reason;
}

// What it has to say may be on its way still, and it may be another one that hangs.
TEST(Coordinator, WhoseNodeIsNotHeardIsNotJudgedForWhatItHasNotSaid) {
  Bench bench;
  bench.start();
  bench.pass(250ms);
  bench.pass(400ms, {0, 2});  // nothing comes from node 1
  bench.accuse(0, 1);
  bench.pass(500ms, {0, 2});
  ASSERT_EQ(bench.coordinator.members().size(), 3u) << bench.warnings;
  bench.pass(63ms);  // it is heard, and what it had to say comes behind that
  ASSERT_EQ(bench.coordinator.members().size(), 3u) << bench.warnings;
  bench.accuse(1, 2, /*lost=*/false, /*only_waiting=*/true);
  bench.pass(63ms);
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  EXPECT_EQ(bench.coordinator.suspended()[0].replica, ReplicaId(2));
}

TEST(Coordinator, WhoIsHeardAgainAndSaysNothingHangs) {
  Bench bench;
  bench.start();
  bench.pass(400ms, {0, 2});
  bench.accuse(0, 1);
  bench.pass(300ms, {0, 2});
  bench.pass(125ms);
  ASSERT_EQ(bench.coordinator.members().size(), 3u) << bench.warnings;
  bench.pass(125ms);
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  EXPECT_EQ(bench.coordinator.suspended()[0].reason.find("it hangs: its processes are heard"), 0u)
      << bench.coordinator.suspended()[0].reason;
}

// The others stand meanwhile.
TEST(Coordinator, WhoIsHeardNowAndThenHasASilenceToSayWhyItDoesNotGoOn) {
  Bench bench;
  bench.start();
  bench.pass(400ms, {0, 2});
  bench.accuse(0, 1);
  for (int i = 0; i < 2; ++i) {
    bench.pass(438ms, {0, 2});
    bench.pass(63ms);
    ASSERT_EQ(bench.coordinator.members().size(), 3u) << i << bench.warnings;
  }
  bench.pass(375ms, {0, 2});
  ASSERT_EQ(bench.coordinator.suspended().size(), 1u);
  EXPECT_EQ(bench.coordinator.suspended()[0].replica, ReplicaId(1));
  EXPECT_EQ(bench.coordinator.suspended()[0].reason.find("it hangs"), std::string::npos);
}

// It is the connection that broke, or a process that is done with the step.
TEST(Coordinator, WhoIsLostOrHasReducedIsNotSaidToHang) {
  for (const bool lost : {true, false}) {
    Bench bench;
    bench.start();
    if (!lost) bench.reduced(1);
    bench.accuse(0, 1, lost);
    bench.accuse(2, 1, lost);
    for (int i = 0; i < 8 && bench.coordinator.members().size() == 3; ++i) {
      bench.pass(300ms);
      bench.accuse(0, 1, lost);
      bench.accuse(2, 1, lost);
    }
    ASSERT_EQ(bench.coordinator.suspended().size(), 1u) << lost;
    EXPECT_EQ(bench.coordinator.suspended()[0].reason.find("it hangs"), std::string::npos)
        << bench.coordinator.suspended()[0].reason;
  }
}

// One end may have lost it to a process that has died, which its daemon is about to report.
TEST(Coordinator, AConnectionThatBothItsEndsHaveLostIsMadeAnewAtOnceAndAgainAfterASixteenthOfTheSilence) {
  Bench bench;
  bench.start();
  const auto begun = [&, first = bench.coordinator.epoch().value] { return bench.coordinator.epoch().value - first; };
  bench.accuse(0, 1, /*lost=*/true);
  bench.accuse(0, 2, /*lost=*/true);
  bench.accuse(1, 0);
  EXPECT_EQ(begun(), 0u) << "an end that waits has not lost it";
  bench.accuse(1, 0, /*lost=*/true);
  EXPECT_EQ(begun(), 1u);
  EXPECT_EQ(bench.log.back().epoch().reason(), "replicas 0 and 1 connect again: connection reset");
  bench.accuse(0, 1, /*lost=*/true), bench.accuse(1, 0, /*lost=*/true);
  EXPECT_EQ(begun(), 1u) << "what breaks at once again would use up the tries";
  bench.pass(63ms);
  EXPECT_EQ(begun(), 2u);
  for (std::uint64_t more : {3u, 4u}) {
    bench.accuse(0, 1, /*lost=*/true), bench.accuse(1, 0, /*lost=*/true);
    bench.pass(63ms);
    EXPECT_EQ(begun(), more) << "three tries besides the one at once";
  }
  bench.steps(1);
  bench.accuse(0, 1, /*lost=*/true), bench.accuse(1, 0, /*lost=*/true);
  EXPECT_EQ(begun(), 5u);
  EXPECT_EQ(bench.coordinator.members().size(), 3u);
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

}  // namespace
}  // namespace rejoin::membership
