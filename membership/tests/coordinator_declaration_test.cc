// What all must declare alike, and what who comes after the end hears.
#include "membership/rank.h"
#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {
namespace {

TEST(Coordinator, AMajorityThatDeclaresAlikeStartsAndWhoDiffersHearsInWhichTensor) {
  for (const std::uint32_t wrong : {0u, 1u, 2u}) {  // whoever comes first, or last
    Bench bench;
    for (std::uint32_t r : {0u, 1u, 2u}) bench.up(r, 1, 0, 5, r == wrong ? 8 : 9);
    for (std::uint32_t r : {0u, 1u, 2u})
      if (bench.asked_to_declare(r)) bench.declare(r, r == wrong ? 1000 : 1024);
    const std::uint32_t first = wrong == 0 ? 1 : 0, second = wrong == 2 ? 1 : 2;
    EXPECT_NE(bench.refusal(wrong).find(fmt::format(
                  "differ from those of rank 1 of replicas {}, {}: tensor 'w' has 1000 elements of float32, 1 moments, "
                  "bucket 0 here, and 1024 elements of float32, 1 moments, bucket 0 there",
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
  EXPECT_NE(bench.refusal(2).find("differ from those of rank 0 of replicas 0, 1: where, is not known here"),
            std::string::npos);
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
      bench.waits_for("replica 0 and replica 2: they declare different things, and more than half of the job's 3 "
                      "replicas must declare the same: of rank 0 of replica 2, its tensors or buckets differ "
                      "from those of rank 0 of replica 0: tensor 'w' has 1002 elements"));
  // One of them is started again with what another declares.
  bench.down(2);
  bench.up(2, 2, 0, 5, 9);
  bench.declare(1, 1001);
  EXPECT_NE(bench.refusal(0).find("tensor 'w' has 1000 elements"), std::string::npos) << bench.refusal(0);
  bench.incarnations.erase(0);
  bench.link_all();
  EXPECT_EQ(bench.contributors(), 2u);
}

// They are stages of a pipeline.
TEST(Coordinator, RanksOfAReplicaMayDeclareDifferentThingsIfTheyAreTheSameInAllReplicas) {
  Bench bench;
  for (std::uint32_t r : {0u, 1u, 2u})
    for (std::uint32_t rank : {0u, 1u}) bench.rank_up(r, rank, 1, 0, 5, 8 + rank);
  for (std::uint32_t r : {0u, 1u, 2u}) EXPECT_FALSE(bench.asked_to_declare(r)) << "nobody differs";
  bench.link_all();
  EXPECT_EQ(bench.contributors(), 3u);
  const auto declared = std::ranges::find_if(bench.log, [](const auto& one) { return one.has_declared(); });
  ASSERT_TRUE(declared != bench.log.end() && declared != bench.log.begin());
  EXPECT_TRUE(std::prev(declared)->has_needs()) << "a release that knows one declaration for all is not to read it";
  // The log has them by rank, and who comes back with those of another one is refused.
  for (const auto& log : {bench.log, {bench.coordinator.snapshot()}}) {
    Bench again(log);
    for (std::uint32_t rank : {0u, 1u}) {
      auto message = Bench::introduction(0, rank, 1, 5, 8 + rank);
      message.mutable_rank_up()->set_incarnation(bench.incarnations.at(0));
      again.send(0, message);
    }
    EXPECT_EQ(again.refusal(0), "");
    again.rank_up(2, 1, 2, 0, 5, 8);
    again.pass(3s);
    EXPECT_NE(again.refusal(2).find("differ from those of rank 1 of replica 0"), std::string::npos) << again.refusal(2);
  }
}

TEST(Coordinator, WhereAnEarlierReleaseMayTakeOverAJobOfStagesDoesNotStart) {
  Bench bench;
  bench.coordinator.set_protocol_of_coordinators(Spoken());
  for (std::uint32_t r : {0u, 1u, 2u})
    for (std::uint32_t rank : {0u, 1u}) bench.rank_up(r, rank, 1, 0, 5, 8 + rank);
  bench.link_all();
  EXPECT_EQ(bench.contributors(), 0u);
  EXPECT_TRUE(bench.waits_for("coordinators that all speak protocol 16: ranks of a replica declare different things"));
  bench.coordinator.set_protocol_of_coordinators(Spoken(16));
  bench.pass(100ms);
  EXPECT_EQ(bench.contributors(), 3u);
}

// Each pair of a whole replica's ranks would say the same once more.
TEST(Coordinator, OfReplicasThatDifferInAllRanksItIsToldOnce) {
  Bench bench({}, {.replicas = 4, .ranks = 4});
  for (std::uint32_t r : {0u, 1u, 2u, 3u}) bench.up(r, 1, 0, 5, r < 2 ? 8 : 9);
  const auto lines = bench.coordinator.waiting_for(bench.now);
  EXPECT_EQ(std::ranges::count_if(lines, [](const auto& one) { return one.find("declare different") != one.npos; }), 1)
      << fmt::format("{}", fmt::join(lines, "; "));
}

TEST(Coordinator, OfAReplicaWhoseRanksAreAnotherOnesWrongWayRoundBothAreRefused) {
  Bench bench;
  for (std::uint32_t r : {0u, 1u, 2u})
    for (std::uint32_t rank : {0u, 1u}) bench.rank_up(r, rank, 1, 0, 5, 8 + (r == 2 ? 1 - rank : rank));
  bench.pass(600ms);
  EXPECT_NE(bench.refusal(2).find("of replicas 0, 1"), std::string::npos) << bench.refusal(2);
  bench.incarnations.erase(2);
  bench.link_all();
  EXPECT_EQ(bench.contributors(), 2u);
}

TEST(Coordinator, OfAReplicaWhoseRanksDifferTheOneThatDiffersFromTheMajorityIsRefused) {
  Bench bench;
  bench.rank_up(0, 0, 1, 0, 5, 8);
  bench.rank_up(0, 1, 1, 0, 5, 9);
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
  bench.pass(bench.config.silence / 8);
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

}  // namespace
}  // namespace rejoin::membership
