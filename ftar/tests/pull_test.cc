// The all-reduce of members that look into each other's memory: when they do, what moves then, and peers that point at
// what is not theirs.
#include "ftar/operation.h"
#include "ftar/tests/counting_engine.h"
#include "ftar/tests/ring_cluster.h"

namespace rejoin::ftar {
namespace {

struct Pull : testing::Test {
  std::uint64_t writes = 0;  // before the cluster, which ends first
  std::vector<Counting*> engines;
  std::optional<std::size_t> liar;
  Cluster cluster{7, {40001}, Over::viewed};

  void SetUp() override {
    cluster.wrap = [&](std::unique_ptr<transport::Engine> engine) -> std::unique_ptr<transport::Engine> {
      auto made = std::make_unique<Counting>(std::move(engine), writes);
      made->misplace_views = liar == engines.size();
      engines.push_back(made.get());
      return made;
    };
  }
  // The writes that an all-reduce of all takes.
  std::uint64_t reduce(Role newest = Role::contributor) {
    cluster.enter(Epoch(1), cluster.ring_members(newest));
    cluster.start(Step(1));
    EXPECT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); }));
    return writes;
  }
  std::uint64_t chunks(std::uint32_t contributors) const {
    return Schedule({.bytes = 40001 * 4,
                     .contributors = contributors,
                     .members = contributors,
                     .chunk_bytes = tuned_chunk(40001 * 4, contributors, cluster.options.chunk_bytes)})
        .all_chunks();
  }
  std::uint64_t views() const {
    std::uint64_t all = 0;
    for (const auto* engine : engines) all += engine->views;
    return all;
  }
};

TEST_F(Pull, EachChunkOfTheSumIsWrittenOnceToEachOtherMemberAndNothingElseIs) {
  for (int i = 0; i < 4; ++i) cluster.add();
  EXPECT_EQ(reduce(), chunks(4) * 3);
  cluster.expect_result(cluster.live());
}

TEST_F(Pull, NobodyLooksAtWhoCatchesUp) {
  for (int i = 0; i < 4; ++i) cluster.add();
  EXPECT_EQ(reduce(Role::catching_up), chunks(3) * 3);
  cluster.expect_result({cluster.ranks[0].get(), cluster.ranks[1].get(), cluster.ranks[2].get()});
  EXPECT_EQ(engines[3]->views, 0u);
  EXPECT_EQ(views(), chunks(3) * 2);
}

// One that can't, or an older release, is enough: all reduce in a ring.
TEST_F(Pull, AllDoItOrNobody) {
  for (int i = 0; i < 4; ++i) {
    cluster.options.pull = i != 2;
    cluster.add();
  }
  EXPECT_EQ(reduce(), chunks(4) * 6);  // each chunk is added to three times, and then sent three times
  EXPECT_EQ(views(), 0u);
  cluster.expect_result(cluster.live());
}

TEST_F(Pull, MoreThanSixteenMembersReduceInARing) {
  for (int i = 0; i < 17; ++i) cluster.add();
  reduce();
  EXPECT_EQ(views(), 0u);
  cluster.expect_result(cluster.live());
}

// A peer that names what it does not have is lost, and the others go on without it.
TEST_F(Pull, WhoPointsAtWhatIsNotItsOwnIsLost) {
  liar = 1;
  for (int i = 0; i < 3; ++i) cluster.add();
  cluster.enter(Epoch(1), cluster.ring_members());
  ASSERT_TRUE(cluster.until([&] {
    return std::ranges::none_of(cluster.ranks, [](const auto& rank) { return rank->communicator->busy(); });
  }));
  cluster.start(Step(1));
  ASSERT_TRUE(cluster.until([&] { return cluster.ranks[0]->lost_someone() && cluster.ranks[2]->lost_someone(); }));
  cluster.kill(*cluster.ranks[1]);
  for (auto& rank : cluster.ranks) rank->outcomes.clear();
  cluster.enter(Epoch(2), cluster.ring_members());
  cluster.start(Step(1));
  ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); }));
  cluster.expect_result(cluster.live());
}

// A member of the job that is connected and not in this epoch's ring, and says that it runs an operation of it.
TEST_F(Pull, WhoHasNoPlaceInTheRingIsNotWrittenTo) {
  for (int i = 0; i < 3; ++i) cluster.add();
  ASSERT_TRUE(cluster.until([&] { return cluster.ranks[0]->communicator->connected(cluster.ranks[2]->self); }));
  auto ring = cluster.ring_members();
  ring.pop_back();
  for (int i = 0; i < 2; ++i) cluster.ranks[i]->communicator->enter(Epoch(1), ring);
  ASSERT_TRUE(cluster.until([&] { return !cluster.ranks[0]->communicator->busy(); }));
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(cluster.ranks[i]->communicator->all_reduce(0, Step(1), ReduceOp::sum));
  const MessageHeader ready{MessageHeader::ready, 0, 1, 1};
  ASSERT_TRUE(engines[2]->send(engines[2]->last_sent_to, bytes_of(ready)));
  ASSERT_TRUE(
      cluster.until([&] { return cluster.ranks[0]->done(Step(1)) == 1 && cluster.ranks[1]->done(Step(1)) == 1; }));
  EXPECT_EQ(writes, chunks(2));
}

}  // namespace
}  // namespace rejoin::ftar
