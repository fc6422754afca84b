// An operator's word to roll back: of which loss it is, and when it is over.
#include <memory>

#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {
namespace {

// It stays in the settings of who forgets it, and the job has gone on.
TEST(Coordinator, AnOperatorsWordToRollBackIsUsedOnce) {
  Bench first;
  first.start();
  first.steps(3);
  const auto from_checkpoint = [](Bench& bench, std::uint64_t step, std::uint64_t life) {
    for (std::uint32_t r : {0u, 1u, 2u}) bench.down(r, life - 1);
    bench.nobody_comes_back();
    bench.all_come(life, step);
  };
  Bench bench(first.log, {.roll_back_to = Step(1)});
  from_checkpoint(bench, 1, 2);
  ASSERT_EQ(bench.coordinator.committed(), Step(1));
  bench.steps(3);
  ASSERT_EQ(bench.coordinator.committed(), Step(4));

  auto log = first.log;
  log.insert(log.end(), bench.log.begin(), bench.log.end());
  Bench again(log, {.roll_back_to = Step(1)});
  from_checkpoint(again, 2, 3);
  EXPECT_EQ(again.coordinator.committed(), Step(4)) << "rolled back without being asked";
  EXPECT_EQ(again.coordinator.wants_roll_back(), Step(2));

  // It names a later step than the job has gone back to, and may be older than that all the same.
  Bench without_number(log, {.roll_back_to = Step(2)});
  from_checkpoint(without_number, 2, 3);
  EXPECT_EQ(without_number.coordinator.committed(), Step(4)) << "rolled back without being asked";

  Bench asked(log, {.roll_back_to = JobConfig::RollBack(Step(2), 6)});
  from_checkpoint(asked, 2, 3);
  EXPECT_EQ(asked.coordinator.committed(), Step(2));
}

TEST(Coordinator, AWordToRollBackThatIsGivenIsNotAskedForWhileReplicasAreMissing) {
  Bench first;
  first.start();
  first.steps(3);
  for (auto replica : {0u, 1u, 2u}) first.down(replica);
  Bench bench(first.log, {.roll_back_to = Step(1)});
  bench.up(1, 2, 1);
  bench.pass(1s);
  EXPECT_TRUE(bench.waits_for("replica 0: 0 of 2 ranks have registered"));
  EXPECT_TRUE(bench.waits_for(
      "--roll-back-to 1 is given: the job goes on from step 1 when all replicas have come, or without those that have "
      "not, in 14 s"));
  EXPECT_FALSE(bench.waits_for("an operator's word"));
  bench.pass(15s);
  EXPECT_EQ(bench.coordinator.committed(), Step(1));

  Bench other(first.log, {.roll_back_to = Step(2)});
  other.up(1, 2, 1);
  other.pass(1s);
  EXPECT_TRUE(other.waits_for("a later checkpoint, or an operator's word")) << "it allows step 2, and not step 1";
}

// Also where it names the very step that there is: a job without checkpoints always starts from step 0.
TEST(Coordinator, AUsedWordToRollBackAllowsNothingOnceAStepIsCommittedAndTheStatusNamesAnother) {
  const auto lost = [](const std::vector<proto::LogRecord>& log, std::optional<JobConfig::RollBack> word) {
    auto bench = std::make_unique<Bench>(log, BenchOptions{.roll_back_to = word});
    bench->nobody_comes_back();
    bench->all_come(5, 0);
    return bench;
  };
  Bench first;
  first.start();
  first.steps(3);
  const JobConfig::RollBack named(Step(0), 3);
  for (const JobConfig::RollBack& word : {JobConfig::RollBack(Step(0)), named})
    for (const bool compacted : {false, true}) {
      auto log = first.log;
      const auto goes_on_with = [&](Bench& bench) {
        log.insert(log.end(), bench.log.begin(), bench.log.end());
        if (!compacted) return;
        Coordinator whole(bench.config);
        ASSERT_TRUE(whole.recover(log, bench.now));
        log = {whole.snapshot()};
      };
      const auto once = lost(log, word);
      ASSERT_EQ(once->coordinator.committed(), Step(0));
      goes_on_with(*once);
      // It has died before the next commit, and its word holds.
      const auto between = lost(log, word);
      ASSERT_EQ(between->contributors(), 3u) << word.text();
      between->steps(5);
      ASSERT_EQ(between->coordinator.committed(), Step(5));
      goes_on_with(*between);

      const auto again = lost(log, word);
      EXPECT_EQ(again->coordinator.committed(), Step(5)) << "rolled back without being asked: " << word.text();
      EXPECT_NE(again->warnings.find("allows nothing any more: it was for an earlier loss"), std::string::npos)
          << again->warnings;
      EXPECT_TRUE(again->waits_for("with --roll-back-to 0@8 to give up 5 steps (its --roll-back-to " + word.text() +
                                   " was for an earlier loss)"));
      const auto asked = lost(log, JobConfig::RollBack(Step(0), 8));
      EXPECT_EQ(asked->coordinator.committed(), Step(0));
      EXPECT_EQ(asked->contributors(), 3u);
    }
}

// It went back to a later one than the word allows, and died before the next commit: all others die, too.
TEST(Coordinator, AWordToRollBackHoldsUntilAStepIsCommittedThoughTheCoordinatorDies) {
  Bench first;
  first.start();
  first.steps(4);
  for (const bool restarts : {false, true}) {
    auto bench = std::make_unique<Bench>(first.log, BenchOptions{.roll_back_to = Step(1)});
    bench->nobody_comes_back();
    bench->all_come(2, 3);
    ASSERT_EQ(bench->coordinator.committed(), Step(3));
    if (restarts) {
      auto log = first.log;
      log.insert(log.end(), bench->log.begin(), bench->log.end());
      bench = std::make_unique<Bench>(log, BenchOptions{.roll_back_to = Step(1)});
      bench->nobody_comes_back();
    } else {
      for (std::uint32_t r : {0u, 1u, 2u}) bench->down(r, 2);
    }
    bench->all_come(3, 2);
    EXPECT_EQ(bench->coordinator.committed(), Step(2)) << restarts;
    EXPECT_EQ(bench->contributors(), 3u);
  }
}

// After its restart the last contributor ends, and a joiner that may have caught up is away for long.
TEST(Coordinator, AWordThatWasUsedOrAllowsNothingGivesUpNobody) {
  Bench first;
  first.start();
  first.steps(3);
  Bench told(first.log, {.roll_back_to = Step(1)});
  told.nobody_comes_back();
  told.all_come(2, 1);
  told.steps(5);
  for (std::uint32_t r : {1u, 2u}) told.down(r, 2);
  told.up(1, 3);
  told.link_all();
  told.reduced(0);
  ASSERT_EQ(told.coordinator.committed(), Step(7));
  ASSERT_EQ(told.coordinator.members().size(), 2u);
  auto log = first.log;
  log.insert(log.end(), told.log.begin(), told.log.end());
  for (const std::uint64_t word : {1u, 7u, 1000u}) {
    Bench bench(log, {.roll_back_to = Step(word)});
    bench.incarnations = told.incarnations;
    bench.back(0, 10, 2);
    bench.down(0, 2);
    bench.pass(17s, {});
    bench.inbox.clear();
    bench.back(1, 11, 3);
    for (std::uint32_t rank : {0u, 1u}) bench.stand(1, rank, true, 11);
    bench.pass(2s, {11});
    EXPECT_FALSE(bench.evicted_anybody()) << word;
    bench.expect_alone(1);
  }
}

// All come back, and the job goes on; what is lost long after is another loss.
TEST(Coordinator, AnOperatorsWordToRollBackEndsWithTheNextCommit) {
  for (const std::uint64_t word : {3u, 1u}) {
    Bench first;
    first.start();
    first.steps(3);
    Bench bench(first.log, {.roll_back_to = Step(word)});
    bench.incarnations = first.incarnations;
    for (std::uint32_t r : {0u, 1u, 2u}) bench.back(r, r);
    bench.link_all();
    bench.steps(5);
    EXPECT_EQ(bench.news.find("--roll-back-to 1 allows nothing any more: the job has gone on") != std::string::npos,
              word == 1)
        << bench.news;
    for (std::uint32_t r : {0u, 1u, 2u}) bench.down(r);
    bench.all_come(2, 4);
    EXPECT_EQ(bench.coordinator.committed(), Step(8));
    EXPECT_EQ(bench.coordinator.wants_roll_back(), Step(4));
  }
}

}  // namespace
}  // namespace rejoin::membership
