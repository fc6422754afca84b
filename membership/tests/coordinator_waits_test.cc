// What trainers are told that their job, or their replica, waits for.
#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {
namespace {

// What a node's trainers are told that the job waits for.
std::vector<std::string> told_to(Bench& bench, std::uint64_t node) {
  std::vector<std::string> all;
  for (const auto& sent : bench.inbox[node])
    if (sent.has_waits()) all.push_back(sent.waits().why());
  return all;
}

TEST(CoordinatorStatus, TrainersHearOnceWhyTheirJobDoesNotStart) {
  Bench bench;
  bench.up(0);
  const auto heard = [&] { return told_to(bench, 0); };
  bench.pass(1500ms);
  EXPECT_TRUE(heard().empty()) << "as a rule they come one after another";
  bench.pass(5s);
  ASSERT_EQ(heard().size(), 1u);
  EXPECT_EQ(heard()[0], "replica 1: 0 of 2 ranks have registered; replica 2: 0 of 2 ranks have registered");
  bench.up(1);
  bench.pass(5s);
  ASSERT_EQ(heard().size(), 2u);
  EXPECT_EQ(heard()[1].find("replica 2: 0 of 2 ranks have registered"), 0u) << heard()[1];
  bench.up(2);
  bench.link_all();
  bench.pass(5s);
  EXPECT_EQ(heard().size(), 2u);
}

// As of a job whose --ranks is larger than the trainers are: what nobody was there to hear is told when somebody is.
TEST(CoordinatorStatus, ATrainerThatComesLaterHearsWhatItsJobHasWaitedForBefore) {
  Bench bench({}, {.replicas = 1});
  bench.pass(5s, {});
  bench.rank_up(0, 0, 1, 0);
  bench.pass(1500ms);
  EXPECT_TRUE(told_to(bench, 0).empty()) << "the others may be about to come";
  bench.pass(30s);
  EXPECT_EQ(told_to(bench, 0), std::vector<std::string>{"replica 0: 1 of 2 ranks have registered, rank 1 has not"});
}

TEST(CoordinatorStatus, ATrainerThatComesWhileTheJobWaitsForTheSameAsBeforeHearsItToo) {
  Bench bench({}, {.replicas = 20, .ranks = 1});
  bench.up(10);
  bench.pass(5s, {10});
  const auto heard = told_to(bench, 10);
  ASSERT_EQ(heard.size(), 1u);
  bench.up(11);
  bench.pass(1500ms, {10, 11});
  EXPECT_TRUE(told_to(bench, 11).empty());
  bench.pass(30s, {10, 11});
  EXPECT_EQ(told_to(bench, 11), heard) << "the first eight are named";
  EXPECT_EQ(told_to(bench, 10), heard) << "once";
}

// As where one replica dies at its start again and again.
TEST(CoordinatorStatus, TrainersHearWhatChangesAllTheTimeOnceInAWhile) {
  Bench bench({}, {.ranks = 1});
  bench.up(0);
  for (std::uint64_t instance = 2; instance < 42; ++instance) {
    bench.up(1, instance);
    bench.pass(500ms);
    bench.down(1, instance, 0);
    bench.pass(500ms);
  }
  EXPECT_GE(told_to(bench, 0).size(), 4u) << "in 40 silences";
  EXPECT_LE(told_to(bench, 0).size(), 5u);
}

// Its supervisor has started one rank again, and nobody the other one.
TEST(CoordinatorStatus, WhoComesBackAloneHearsWhomItsReplicaWaitsFor) {
  Bench bench;
  bench.start();
  bench.down(1);
  for (auto replica : {0u, 2u}) bench.reduced(replica);
  bench.rank_up(1, 0, 2, 0);
  bench.pass(1900ms);
  EXPECT_TRUE(told_to(bench, 1).empty()) << "as a rule they come one after another";
  bench.pass(5s);
  EXPECT_EQ(told_to(bench, 1),
            std::vector<std::string>{"nobody and goes on; replica 1 is taken in when all of its 2 ranks have "
                                     "registered: rank 1 has not"});
  EXPECT_TRUE(told_to(bench, 0).empty() && told_to(bench, 2).empty());
  bench.rank_up(1, 1, 2, 0);
  bench.pass(5s);
  EXPECT_EQ(told_to(bench, 1).size(), 1u);
}

TEST(CoordinatorStatus, TrainersHearThatTheLogIsAnOlderCopy) {
  Bench first;
  first.start();
  first.steps(3);
  const auto older = first.log;
  first.steps(2);
  Bench again(older);
  for (std::uint32_t replica = 0; replica < 3; ++replica) again.back_from(first, replica);
  again.pass(5s);
  for (std::uint32_t replica = 0; replica < 3; ++replica) {
    const auto heard = told_to(again, replica);
    ASSERT_EQ(heard.size(), 1u) << replica;
    EXPECT_NE(heard[0].find("the log is an older copy"), std::string::npos) << heard[0];
  }
}

}  // namespace
}  // namespace rejoin::membership
