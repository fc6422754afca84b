// Sources that die, refuse or cannot be reached, and those that are not served from.
#include <poll.h>

#include <sstream>

#include "catchup/tests/cluster.h"

namespace rejoin::catchup {
namespace {

// Of fewer slices than may be under way from one source. It has none left when the second one is connected, unless it
// leaves that one its share.
TEST(CatchUpService, ASmallStateComesFromAllSources) {
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE(seed);
    Cluster cluster(seed);
    cluster.smaller = true;
    Replica &first = cluster.add(true), &second = cluster.add(true);
    cluster.train(1);
    Replica& joiner = cluster.add(false);
    ASSERT_LE(joiner.owner->manifest().slices().size(), 16u) << "the window";
    cluster.catch_up(joiner);
    cluster.train_until_caught_up(joiner, 200, 50);
    ASSERT_TRUE(joiner.caught_up);
    EXPECT_GT(first.service->bytes_served(), 0u);
    EXPECT_GT(second.service->bytes_served(), 0u);
    EXPECT_EQ(joiner.service->progress({joiner.id, RankId(0)}, cluster.clock.now())->sources_used, 2u);
  }
}

// A step of a trainer's wakes its daemon's thread of the stream only where somebody fetches into its memory or out of
// it.
TEST(CatchUpService, DoorbellsAreOfTrainersWhoseMemoryIsInUse) {
  Cluster cluster(1);
  Replica& source = cluster.add(true);
  cluster.train(1);
  EXPECT_TRUE(source.service->doorbells().empty());
  Replica &joiner = cluster.add(false), &other = cluster.add(false);
  cluster.catch_up({&joiner, &other});
  EXPECT_EQ(joiner.service->doorbells().size(), 1u);
  for (int i = 0; i < 100 && source.service->serving() < 2; ++i) cluster.pump(20);
  ASSERT_EQ(source.service->serving(), 2u);
  EXPECT_EQ(source.service->doorbells().size(), 1u) << "one trainer, whoever is served";
  source.service->arm_doorbells();
  pollfd doorbell{.fd = source.service->doorbells().front(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(::poll(&doorbell, 1, 0), 0);
  cluster.train(0);
  EXPECT_EQ(::poll(&doorbell, 1, 0), 1);
  for (auto* one : {&joiner, &other}) one->service->finish({one->id, RankId(0)});
  for (int i = 0; i < 100 && source.service->serving() > 0; ++i) cluster.pump(20);
  EXPECT_TRUE(source.service->doorbells().empty());
}

// Of three sources two are near; all are compared with.
struct Distances : testing::Test {
  Cluster cluster{3};
  void SetUp() override {
    cluster.distances = {{ReplicaId(0), 3}, {ReplicaId(1), 1}, {ReplicaId(2), 1}};
    for (int i = 0; i < 3; ++i) cluster.add(true);
    cluster.train(1);
  }
  std::uint64_t served_by(std::size_t source) const { return cluster.replicas[source]->service->bytes_served(); }
  // Virtual time goes by, too.
  void train_until_caught_up(const Replica& joiner, Duration each) {
    for (int i = 0; i < 600 && !joiner.caught_up; ++i) {
      cluster.clock.advance(each);
      cluster.train(20);
    }
    ASSERT_TRUE(joiner.caught_up);
    EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
  }
};

TEST_F(Distances, WhoeverIsNearIsFetchedFromAndNobodyElse) {
  Replica& joiner = cluster.add(false);
  cluster.catch_up(joiner);
  train_until_caught_up(joiner, {});
  EXPECT_EQ(served_by(0), 0u);
  EXPECT_GT(served_by(1), 0u);
  EXPECT_GT(served_by(2), 0u);
}

TEST_F(Distances, WhereNobodyTellsThemRoundTripsDo) {
  cluster.distances.clear();
  cluster.fabric.stand(*cluster.replicas[1]->on_fabric, 1);
  Replica& joiner = cluster.add(false);
  cluster.catch_up(joiner);
  train_until_caught_up(joiner, {});
  EXPECT_GT(served_by(0), 0u);
  EXPECT_EQ(served_by(1), 0u);
  EXPECT_GT(served_by(2), 0u);
}

TEST_F(Distances, ThoseThatAreToldCountBeforeRoundTrips) {
  for (std::size_t near : {1, 2}) cluster.fabric.stand(*cluster.replicas[near]->on_fabric, 1);
  Replica& joiner = cluster.add(false);
  cluster.catch_up(joiner);
  train_until_caught_up(joiner, {});
  EXPECT_EQ(served_by(0), 0u);
}

TEST_F(Distances, FartherSourcesAreAskedWhenTheNearOnesAreGone) {
  Replica& joiner = cluster.add(false);
  cluster.catch_up(joiner);
  cluster.train(1);
  for (std::size_t near : {1, 2}) {
    cluster.fabric.kill(*cluster.replicas[near]->on_fabric);
    cluster.replicas[near]->service.reset();
    cluster.replicas[near].reset();
  }
  train_until_caught_up(joiner, std::chrono::milliseconds(50));  // while the plan still has them
  EXPECT_GT(served_by(0), 0u);
}

TEST_F(Distances, FartherSourcesAreAskedWhereItWouldTakeLongWithTheNearOnesAlone) {
  Cluster slow(4);
  slow.distances = cluster.distances;
  slow.limit = 2e4;
  std::vector<local::Tensor> tensors;
  for (int t = 0; t < 200; ++t) tensors.push_back({.name = std::to_string(t), .count = 1000, .columns = 3});
  slow.model = *local::Manifest::make(tensors);  // 2.4 MB: a minute from two
  for (int i = 0; i < 3; ++i) slow.add(true);
  Replica& joiner = slow.add(false);
  slow.catch_up(joiner);
  const auto served_by_far = [&] { return slow.replicas[0]->service->bytes_served(); };
  const TimePoint start = slow.clock.now();
  for (int i = 0; i < 200 && served_by_far() == 0; ++i) {
    slow.clock.advance(std::chrono::milliseconds(100));
    slow.pump(20);
  }
  EXPECT_GT(served_by_far(), 0u);
  EXPECT_GE(slow.clock.now() - start, deadlines::kSilence) << "near ones first";
}

TEST_P(CatchUp, ASourceMayDieAtAnyMoment) {
  for (std::uint64_t seed = 1; seed <= seeds(); ++seed) {
    SCOPED_TRACE(seed);
    Cluster cluster(seed, true, memory);
    cluster.add(true), cluster.add(true);
    cluster.train(1);
    Replica& joiner = cluster.add(false);
    cluster.catch_up(joiner);
    cluster.train(static_cast<int>(seed * 3));
    cluster.fabric.kill(*cluster.replicas[1]->on_fabric);
    cluster.replicas[1]->service.reset();
    cluster.replicas[1].reset();
    cluster.train(4);
    cluster.catch_up(joiner);  // the next plan is without it
    cluster.train_until_caught_up(joiner, 300, 4);
    ASSERT_TRUE(joiner.caught_up);
    EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
  }
}

// As of a mixture of experts: each tensor is a slice of its own, and there is a message for each.
TEST(CatchUpService, TenThousandTensorsAreCaughtUpWithWhenAReplicaDiesAndComesBack) {
  std::vector<local::Tensor> tensors;
  for (std::uint32_t t = 0; t < 10'000; ++t)
    tensors.push_back({.name = "expert" + std::to_string(t), .count = 1 + t % 5, .columns = 1 + t % 3});
  Cluster cluster(11);
  cluster.model = *local::Manifest::make(std::move(tensors));
  cluster.add(true), cluster.add(true);
  cluster.train(1);
  Replica& joiner = cluster.add(false);
  cluster.catch_up(joiner);
  const auto fetched = [&](const Replica& one) {
    return one.service->progress({one.id, RankId(0)}, cluster.clock.now())->slices;
  };
  while (fetched(joiner) < 3'000) cluster.train(2'000);
  cluster.fabric.kill(*cluster.replicas[1]->on_fabric);
  cluster.replicas[1]->service.reset();
  cluster.replicas[1].reset();
  cluster.catch_up(joiner);
  cluster.train_until_caught_up(joiner, 200, 2'000);
  ASSERT_TRUE(joiner.caught_up);
  EXPECT_EQ(fetched(joiner), 10'000u);
  EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
  joiner.contributes = true;
  joiner.service->finish({joiner.id, RankId(0)});
  Replica& again = cluster.add(false);
  cluster.catch_up(again);
  cluster.train_until_caught_up(again, 200, 2'000);
  ASSERT_TRUE(again.caught_up);
  EXPECT_TRUE(cluster.same_bits(again, *cluster.replicas[0]));
}

// It refuses whenever it is asked: the joiner compares itself with the others alone, but not before five silences.
TEST(CatchUpService, ASourceThatCanNotBeReachedIsNotWaitedForForever) {
  Cluster cluster(7);
  cluster.add(true), cluster.add(true);
  cluster.train(1);
  Replica& joiner = cluster.add(false);
  cluster.catch_up(joiner);
  cluster.replicas[1]->service->serve({ReplicaId(1), RankId(0)}, std::nullopt);
  const TimePoint began = cluster.clock.now();
  while (!joiner.caught_up && cluster.clock.now() - began < std::chrono::seconds(20)) {
    cluster.clock.advance(std::chrono::milliseconds(100));
    cluster.train(4);
  }
  ASSERT_TRUE(joiner.caught_up);
  const Duration silence = Service::Options{}.silence;
  EXPECT_GE(cluster.clock.now() - began, 5 * silence);
  EXPECT_LE(cluster.clock.now() - began, 6 * silence);
  EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
}

// All has come while an update was under way, so that nothing of it is compared yet; then nobody is left to compare it
// with.
TEST(CatchUpService, WhatNobodyHasAgreedWithIsNotCompleteHoweverLongNoSourceCanBeReached) {
  Cluster cluster(7);
  cluster.model = model_of(40);
  Replica& source = cluster.add(true);
  cluster.train(1);
  Replica& joiner = cluster.add(false);
  cluster.catch_up(joiner);
  ++cluster.step;
  source.update(Step(cluster.step));
  joiner.begin_update(Step(cluster.step));
  const auto progress = [&] { return *joiner.service->progress({joiner.id, RankId(0)}, cluster.clock.now()); };
  for (int i = 0; i < 5000 && progress().slices < 40; ++i) cluster.pump(1);
  ASSERT_EQ(progress().slices, 40u);
  ASSERT_EQ(progress().verified, 0u);
  source.service->serve({source.id, RankId(0)}, std::nullopt);
  joiner.end_update();
  for (const TimePoint began = cluster.clock.now(); cluster.clock.now() - began < 7 * deadlines::kSilence;) {
    cluster.clock.advance(std::chrono::milliseconds(100));
    cluster.train(4);
  }
  EXPECT_EQ(progress().verified, 0u);
  EXPECT_FALSE(joiner.caught_up);
  source.service->serve({source.id, RankId(0)}, Incarnation(1));
  cluster.train_until_caught_up(joiner, 500, 200);
  ASSERT_TRUE(joiner.caught_up);
  EXPECT_TRUE(cluster.same_bits(joiner, source));
}

// Nor does a pause of the joiner's count, in which its connections have broken.
TEST(CatchUpService, ThatAJoinerStoodStillMakesNoSourceUnreachable) {
  Cluster cluster(13);
  cluster.model = model_of(40);
  cluster.add(true), cluster.add(true);
  cluster.train(1);
  Replica& joiner = cluster.add(false);
  cluster.catch_up(joiner);
  const auto progress = [&] { return *joiner.service->progress({joiner.id, RankId(0)}, cluster.clock.now()); };
  for (int i = 0; i < 5000 && progress().slices < 40; ++i) cluster.pump(1);
  ASSERT_EQ(progress().slices, 40u);
  ASSERT_FALSE(joiner.caught_up) << "it has not been compared with both";
  for (const std::size_t source : {0, 1}) {
    cluster.fabric.kill(*cluster.replicas[source]->on_fabric);
    cluster.replicas[source]->service.reset();
    cluster.replicas[source].reset();
  }
  joiner.daemon_stopped = true;
  cluster.clock.advance(10 * deadlines::kSilence);
  cluster.pump(100);
  joiner.daemon_stopped = false;
  cluster.pump(100);
  EXPECT_EQ(progress().sources, 0u);
  EXPECT_FALSE(joiner.caught_up);
  const TimePoint resumed = cluster.clock.now();
  while (!joiner.caught_up && cluster.clock.now() - resumed < 10 * deadlines::kSilence) {
    cluster.clock.advance(std::chrono::milliseconds(100));
    cluster.pump(1);
  }
  EXPECT_GE(cluster.clock.now() - resumed, 5 * deadlines::kSilence);
  EXPECT_TRUE(joiner.caught_up);
}

// A joiner that was made a contributor within a step has slices whose source had made an update that is still to come
// here. Another joiner fetches them, or has its own compared with them.
TEST(CatchUpService, WhoBecomesAContributorServesNoSliceThatIsAheadOfItsState) {
  for (const bool fetches : {true, false}) {
    SCOPED_TRACE(fetches);
    Cluster cluster(12);
    cluster.model = model_of(40);
    const Replica& source = cluster.add(true);
    cluster.train(1);
    Replica &first = cluster.add(false), &second = cluster.add(false);
    const RankKey of_first{first.id, RankId(0)}, of_second{second.id, RankId(0)};
    const SourceAddress at_source{source.id, Incarnation(1), source.address},
        at_first{first.id, Incarnation(1), first.address};
    const auto pump_until = [&](auto is) {
      for (int i = 0; i < 5000 && !is(); ++i) cluster.pump(1);
      return is();
    };
    const auto slices = [&] { return second.service->progress(of_second, cluster.clock.now())->slices; };
    source.service->serve({source.id, RankId(0)}, Incarnation(1));
    const std::set<SourceAddress> all = fetches ? std::set{at_first} : std::set{at_source, at_first};
    second.service->catch_up(of_second, all, Step(1), cluster.clock.now());
    if (!fetches) ASSERT_TRUE(pump_until([&] { return slices() == 40; }));
    cluster.catch_up(first);
    ASSERT_TRUE(pump_until([&] { return first.status(0).state == local::SliceState::arrived; }));
    cluster.replicas[source.id.value]->update(Step(++cluster.step));
    ASSERT_TRUE(pump_until([&] { return first.caught_up; }));
    ASSERT_EQ(first.status(0).version(), 1u);
    ASSERT_EQ(first.status(39).version(), 2u);
    first.service->finish(of_first);
    first.service->serve(of_first, Incarnation(1));
    cluster.clock.advance(std::chrono::seconds(1));  // it is asked again
    cluster.pump(2000);
    for (auto* one : {&first, &second}) one->update(Step(cluster.step));
    first.contributes = true;
    cluster.train_until_caught_up(second, 200, 20);
    ASSERT_TRUE(second.caught_up);
    EXPECT_TRUE(cluster.same_bits(second, source));
    EXPECT_EQ(second.service->progress(of_second, cluster.clock.now())->refetched, 0u);
  }
}

// Found by the simulator: a trainer that was just started again was taken for the contributor that it had been, and its
// initial state was fetched and even verified.
TEST(CatchUpService, OnlyTheIncarnationThatContributesIsServedFrom) {
  Cluster cluster(5);
  Replica& source = cluster.add(true);
  Replica& joiner = cluster.add(false);
  cluster.train(1);
  const RankKey key{source.id, RankId(0)};
  cluster.catch_up(joiner);
  source.service->serve(key, Incarnation(2));  // it was started again meanwhile
  for (int i = 0; i < 50; ++i) cluster.train(2);
  EXPECT_FALSE(joiner.caught_up);
  EXPECT_EQ(joiner.service->progress({joiner.id, RankId(0)}, cluster.clock.now())->bytes, 0u);
  source.service->serve(key, Incarnation(1));  // the joiner has gone on asking
  for (int i = 0; i < 500 && !joiner.caught_up; ++i) {
    cluster.clock.advance(std::chrono::milliseconds(1));
    cluster.train(20);
  }
  EXPECT_TRUE(joiner.caught_up);
  EXPECT_TRUE(cluster.same_bits(joiner, source));
}

TEST(CatchUpService, ASourceThatGoesOnRefusingIsLoggedSeldom) {
  const auto level = spdlog::get_level();
  spdlog::set_level(spdlog::level::info);
  Cluster cluster(5);
  Replica& source = cluster.add(true);
  Replica& joiner = cluster.add(false);
  cluster.catch_up(joiner);
  source.service->serve({source.id, RankId(0)}, Incarnation(2));
  const auto lines_of = [&](std::chrono::seconds time) {
    testing::internal::CaptureStdout();
    for (const TimePoint begun = cluster.clock.now(); cluster.clock.now() - begun < time;) {
      cluster.clock.advance(std::chrono::milliseconds(20));
      cluster.pump(10);
    }
    std::istringstream said(testing::internal::GetCapturedStdout());
    std::vector<std::string> lines;
    for (std::string line; std::getline(said, line);)
      if (line.find("replica 0 is out") != std::string::npos) lines.push_back(line);
    return lines;
  };
  EXPECT_EQ(lines_of(std::chrono::seconds(9)).size(), 1u);
  const auto later = lines_of(std::chrono::seconds(12));
  ASSERT_FALSE(later.empty());
  EXPECT_LE(later.size(), 2u);
  EXPECT_NE(later[0].find("times more since it was logged last"), std::string::npos) << later[0];
  spdlog::set_level(level);
}

}  // namespace
}  // namespace rejoin::catchup
