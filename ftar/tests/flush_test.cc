// Between two epochs: a member waits only for those that may have written to it, and to which it will write; and that
// is enough, whatever epochs each of them has seen.
#include "ftar/tests/counting_engine.h"
#include "ftar/tests/ring_cluster.h"

namespace rejoin::ftar {
namespace {

bool all_idle(const Cluster& cluster) {
  return std::ranges::all_of(cluster.ranks,
                             [](const auto& rank) { return !rank->alive || !rank->communicator->busy(); });
}

TEST(Flush, OfManyMembersEachHearsOfAFew) {
  constexpr std::uint64_t members = 40, partners = 2 + 6 + 2;  // neighbours, rounds, and whom it folds in or serves
  Cluster cluster(1, {4096, 4});
  std::vector<Counting*> counted;
  std::uint64_t transfers = 0;
  cluster.wrap = [&](std::unique_ptr<transport::Engine> engine) {
    auto made = std::make_unique<Counting>(std::move(engine), transfers);
    counted.push_back(made.get());
    return made;
  };
  for (std::uint64_t i = 0; i < members; ++i) cluster.add();
  const auto flushes = [&] {
    std::uint64_t sum = 0;
    for (auto* one : counted) sum += std::exchange(one->messages[MessageHeader::flushed], 0);
    return sum;
  };
  cluster.enter(Epoch(1), cluster.ring_members());
  ASSERT_TRUE(cluster.until([&] { return all_idle(cluster); }));
  EXPECT_LE(flushes(), members * partners);
  cluster.start(Step(1));
  ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); }));
  cluster.kill(*cluster.ranks[17]);
  cluster.enter(Epoch(2), cluster.ring_members());
  ASSERT_TRUE(cluster.until([&] { return all_idle(cluster); }));
  EXPECT_LE(flushes(), members * 2 * partners) << "of the epoch before, and of this one";
  cluster.start(Step(2));
  ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(2)); }));
  cluster.expect_result(cluster.live());
}

// Plans may get lost on their way, and the order of members is another one in each epoch.
TEST(Flush, WhoHasMissedEpochsIsNotWaitedForForEver) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    Cluster cluster(seed, seed % 2 == 0 ? std::vector<std::size_t>{3000} : std::vector<std::size_t>{3000, 5});
    if (seed % 3 == 0) cluster.options.direct_members = 0;
    for (int i = 0; i < 7; ++i) cluster.add();
    cluster.miss_epochs({.one_in = 3, .turns = 400});
    ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); })) << "seed " << seed;
    cluster.expect_result(cluster.live());
    ASSERT_FALSE(testing::Test::HasFailure()) << "seed " << seed;
  }
}

// What is said to one that is not in this epoch yet is lost on it.
TEST(Flush, WhoIsToBeWrittenToIsWaitedForAlsoWhereItWasNoPartnerBefore) {
  Cluster cluster(2, {4096});
  cluster.options.direct_bytes = 0;
  for (int i = 0; i < 7; ++i) cluster.add();
  cluster.enter(Epoch(1), cluster.ring_members());
  cluster.start(Step(1));
  ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); }));
  auto ring = cluster.ring_members();
  std::swap(ring[1], ring[3]);  // beside the first one now
  Rank& late = *cluster.ranks[3];
  const auto enter = [&](Rank& rank) {
    rank.communicator->enter(Epoch(2), ring);
    ASSERT_TRUE(rank.communicator->all_reduce(0, Step(2), ReduceOp::sum));
  };
  for (auto& rank : cluster.ranks)
    if (rank.get() != &late) enter(*rank);
  EXPECT_FALSE(cluster.until([&] { return cluster.all_done(Step(2)); }));
  enter(late);
  EXPECT_TRUE(cluster.until([&] { return cluster.all_done(Step(2)); }));
  cluster.expect_result(cluster.live());
}

// Whoever wrote here in an older epoch may have nothing to do with this member any more, and what it wrote may be late.
// Another one contributes in each epoch, so that results of an older one are wrong in this one. Sums wait where such a
// result would land: for the next member, which waits for the one that is late.
TEST(Flush, WhatIsLateFromWhoIsNoPartnerAnyMoreLandsBeforeTheEpochBegins) {
  using namespace std::chrono_literals;
  for (std::uint64_t seed = 0; seed < (kSanitized ? 10 : 40); ++seed) {
    Cluster cluster(seed, {6000});
    cluster.options.direct_bytes = 0;
    for (int i = 0; i < 8; ++i) cluster.add();
    std::uint64_t epoch = 0;
    const auto begin = [&](const std::vector<RingMember>& ring) {
      cluster.enter(Epoch(++epoch), ring);
      for (auto& rank : cluster.ranks) rank->outcomes.clear();
      cluster.start(Step(epoch));
    };
    const auto some_events = [&](std::uint64_t most) {
      for (auto turns = cluster.random() % most; turns > 0; --turns) {
        cluster.pump();
        (void)cluster.fabric.step();
      }
    };
    auto ring = cluster.ring_members();
    begin(ring);
    ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(epoch)); }));
    for (int change = 0; change < 8; ++change) {
      std::shuffle(ring.begin(), ring.end(), cluster.random);
      ring.back().role = Role::catching_up;
      begin(ring);
      some_events(3000);
      const std::size_t late = cluster.random() % 7;
      const auto behind = ring[late + 1].member;  // to which it writes
      const Rank& who = *cluster.ranks[ring[late].member.replica.value];
      cluster.fabric.slow(*who.on_fabric, 1ms, 0ms,
                          cluster.clock.now() + std::chrono::microseconds(cluster.random() % 50));
      some_events(60);
      ring.back().role = Role::contributor;
      std::swap(ring[late], ring[2]);
      std::swap(*std::ranges::find(ring, behind, &RingMember::member), ring[0]);
      begin(ring);
      ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(epoch)); })) << "seed " << seed;
      cluster.expect_result(cluster.live());
      ASSERT_FALSE(testing::Test::HasFailure()) << "seed " << seed << ", change " << change;
    }
  }
}

// A connection between two who have nothing to do with each other breaks, and is made anew: nobody waits for that, in
// this epoch or the next one.
TEST(Flush, AConnectionThatIsNotNeededMayBreak) {
  Cluster cluster(5, {4096});
  cluster.options.direct_bytes = 0;
  for (int i = 0; i < 5; ++i) cluster.add();
  cluster.enter(Epoch(1), cluster.ring_members());
  ASSERT_TRUE(cluster.until([&] { return all_idle(cluster); }));
  cluster.start(Step(1));
  auto &first = *cluster.ranks[0], &third = *cluster.ranks[2];
  first.communicator->forget(third.self);
  EXPECT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); }));
  EXPECT_TRUE(third.lost_someone());
  EXPECT_TRUE(third.communicator->connect(first.self, first.address));
  ASSERT_TRUE(cluster.until([&] { return third.communicator->connected(first.self); }));
  cluster.start(Step(2));
  EXPECT_TRUE(cluster.until([&] { return cluster.all_done(Step(2)); }));
  cluster.expect_result(cluster.live());
  std::vector<RingMember> ring;  // in which the two are neighbours
  for (auto i : {0, 2, 1, 3, 4}) ring.push_back({cluster.ranks[static_cast<std::size_t>(i)]->self, Role::contributor});
  cluster.enter(Epoch(2), ring);
  cluster.start(Step(3));
  EXPECT_TRUE(cluster.until([&] { return cluster.all_done(Step(3)); }));
  cluster.expect_result(cluster.live());
}

// Nobody hears its flush before its own writes are over, so it is not one that waits for nobody.
TEST(Flush, WhoWaitsForItsOwnWritesNamesToWhomTheyGo) {
  Cluster cluster(6, {6000});
  cluster.options.direct_bytes = 0;
  for (int i = 0; i < 4; ++i) cluster.add();
  cluster.enter(Epoch(1), cluster.ring_members());
  ASSERT_TRUE(cluster.until([&] { return all_idle(cluster); }));
  cluster.start(Step(1));
  const Communicator& first = *cluster.ranks[0]->communicator;
  ASSERT_TRUE(cluster.until([&] { return cluster.ranks[1]->communicator->stats().peers[0].chunks_received > 0; }));
  auto ring = cluster.ring_members();
  std::swap(ring[1], ring[2]);  // no neighbours any more
  cluster.enter(Epoch(2), ring);
  const auto waits = first.waits(cluster.clock.now());
  ASSERT_FALSE(waits.empty());
  EXPECT_EQ(waits[0].on, cluster.ranks[1]->self);
  EXPECT_NE(waits[0].what.find("writes to its memory from before epoch 2"), std::string::npos) << waits[0].what;
  EXPECT_TRUE(cluster.until([&] { return all_idle(cluster); }));
}

}  // namespace
}  // namespace rejoin::ftar
