// Contributors whose daemon's catch-up thread stands still, in a driver that does not return, say, while their replicas
// contribute. What must hold: they keep nobody out for long, nothing of theirs lands after they were given up, and who
// only waits for its trainer is waited for.
#include "catchup/tests/cluster.h"

namespace rejoin::catchup {
namespace {

constexpr Duration kFiveSilences = deadlines::kUnreachableSource.of(deadlines::kSilence);

struct StandingSource : testing::Test {
  Cluster cluster{21};
  Replica* source = nullptr;
  Replica* joiner = nullptr;

  void SetUp() override {
    cluster.model = model_of(60);
    cluster.add(true);
    source = &cluster.add(true);
    cluster.train(1);
    joiner = &cluster.add(false);
    cluster.catch_up(*joiner);
  }
  CatchUpProgress progress() { return *joiner->service->progress({joiner->id, RankId(0)}, cluster.clock.now()); }
  bool owed_by_source() const {
    for (std::uint32_t t = 0; t < 60; ++t)
      if (joiner->status(t).requested_from(source->id.value)) return true;
    return false;
  }
  // All make steps meanwhile.
  Duration until_caught_up(Duration at_most) {
    const TimePoint began = cluster.clock.now();
    while (!joiner->caught_up && cluster.clock.now() - began < at_most) {
      cluster.clock.advance(std::chrono::milliseconds(100));
      cluster.train(10);
    }
    return cluster.clock.now() - began;
  }
};

TEST_F(StandingSource, OneThatOwesSlicesKeepsAJoinerOutForFiveSilencesAtMost) {
  for (int i = 0; i < 5000 && (progress().slices < 20 || !owed_by_source()); ++i) cluster.pump(1);
  ASSERT_TRUE(owed_by_source());
  source->daemon_stopped = true;
  EXPECT_LE(until_caught_up(4 * kFiveSilences), kFiveSilences + deadlines::kSilence);
  ASSERT_TRUE(joiner->caught_up);
  source->daemon_stopped = false;
  for (int i = 0; i < 20; ++i) cluster.train(20);
  EXPECT_TRUE(cluster.same_bits(*joiner, *cluster.replicas[0])) << "it goes on, and what it still writes is fenced";
}

TEST_F(StandingSource, OneThatOwesDigestsKeepsAJoinerOutForFiveSilencesAtMost) {
  joiner->begin_update(Step(cluster.step + 1));  // nothing can be compared yet
  cluster.replicas[0]->update(Step(cluster.step + 1)), source->update(Step(cluster.step + 1));
  ++cluster.step;
  for (int i = 0; i < 5000 && progress().slices < 60; ++i) cluster.pump(1);
  ASSERT_EQ(progress().slices, 60u);
  source->daemon_stopped = true;
  joiner->end_update();
  EXPECT_LE(until_caught_up(4 * kFiveSilences), kFiveSilences + deadlines::kSilence);
  ASSERT_TRUE(joiner->caught_up);
  EXPECT_TRUE(cluster.same_bits(*joiner, *cluster.replicas[0]));
}

TEST_F(StandingSource, OneThatGoesOnIsASourceAgainAndIsComparedWith) {
  for (int i = 0; i < 5000 && (progress().slices < 20 || !owed_by_source()); ++i) cluster.pump(1);
  source->daemon_stopped = true;
  joiner->trainer_stopped = true;  // so that it can't be through
  const auto go_on = [&](Duration lasting) {
    for (const TimePoint began = cluster.clock.now(); cluster.clock.now() - began < lasting;) {
      cluster.clock.advance(std::chrono::milliseconds(100));
      cluster.pump(10);
    }
  };
  cluster.replicas[0]->daemon_stopped = true;
  go_on(kFiveSilences - deadlines::kSilence);
  EXPECT_EQ(progress().unreached, "");
  go_on(2 * deadlines::kSilence);
  EXPECT_NE(progress().unreached, "") << "both stand";
  source->daemon_stopped = false;
  go_on(deadlines::kSilence);
  EXPECT_EQ(progress().unreached, "");
  cluster.replicas[0]->daemon_stopped = false;
  joiner->trainer_stopped = false;
  until_caught_up(kFiveSilences);
  ASSERT_TRUE(joiner->caught_up);
  EXPECT_EQ(progress().sources_used, 2u);
  EXPECT_TRUE(cluster.same_bits(*joiner, *source));
}

// It evaluates for long, or holds a checkpoint: its daemon is there.
TEST_F(StandingSource, OneThatWaitsForItsTrainerIsWaitedFor) {
  source->trainer_stopped = true;
  cluster.train(200);
  for (const TimePoint began = cluster.clock.now(); cluster.clock.now() - began < 4 * kFiveSilences;) {
    cluster.clock.advance(std::chrono::milliseconds(100));
    cluster.pump(20);
    ASSERT_EQ(progress().sources, 2u);
  }
  EXPECT_TRUE(owed_by_source() || progress().verified < 60);
  source->trainer_stopped = false;
  source->update(Step(cluster.step));
  until_caught_up(kFiveSilences);
  ASSERT_TRUE(joiner->caught_up);
  EXPECT_TRUE(cluster.same_bits(*joiner, *source));
}

// A joiner, and a source that says what it is told to.
struct ToldSource : testing::Test {
  Cluster cluster{22};
  Replica& trainer = cluster.add(false);
  local::View view = *local::View::of(*trainer.owner);
  std::unique_ptr<transport::Engine> engine = cluster.fabric.make_engine(), source = cluster.fabric.make_engine();
  Proofs proofs;
  std::optional<Joiner> joiner;
  const ReplicaId id{7};
  int asked = 0;  // for signs

  void SetUp() override {
    const auto endpoint = *engine->connect(*source->listen({}), {});
    std::vector<transport::RegionId> state;
    for (const auto range : view.memory_ranges())
      state.push_back(*engine->register_region(range, device::MemoryKind::host, transport::Access::remote_write));
    joiner.emplace(*engine, view, state, proofs, Step(0), deadlines::kSilence, cluster.clock.now());
    joiner->expect({{id, Incarnation(1)}}, cluster.clock.now());
    while (cluster.fabric.step()) engine->poll();
    joiner->on_source_up(id, endpoint);
  }
  void go_on(Duration lasting, bool answers) {
    for (const TimePoint began = cluster.clock.now(); cluster.clock.now() - began < lasting;) {
      cluster.clock.advance(std::chrono::milliseconds(100));
      joiner->work(cluster.clock.now(), false);
      while (cluster.fabric.step())
        for (const auto& event : source->poll())
          if (proto::Stream message; event.kind == transport::EventKind::message &&
                                     message.ParseFromArray(event.message.data(), int(event.message.size())) &&
                                     message.fetch().sign()) {
            ++asked;
            proto::Stream sign;
            sign.mutable_sign();
            if (answers) EXPECT_TRUE(joiner->on_message(id, sign));
          }
    }
  }
};

TEST_F(ToldSource, ThatGivesSignsIsWaitedForUntilItGivesNone) {
  go_on(3 * kFiveSilences, true);
  EXPECT_GT(asked, 5);
  EXPECT_TRUE(joiner->take_given_up().empty());
  const int before = asked;
  go_on(kFiveSilences + deadlines::kSilence, false);
  EXPECT_EQ(joiner->take_given_up().size(), 1u);
  EXPECT_LE(asked, before + 1) << "nothing piles up at who stands still";
}

TEST_F(ToldSource, ThatHasSaidNothingStandsStill) {
  go_on(kFiveSilences + deadlines::kSilence, false);
  EXPECT_EQ(joiner->take_given_up().size(), 1u);
}

TEST_F(ToldSource, OfAnOlderReleaseGivesNoSignsAndIsWaitedFor) {
  proto::Stream message;
  message.mutable_verify_reply()->set_request(77);
  ASSERT_TRUE(joiner->on_message(id, message));
  go_on(3 * kFiveSilences, false);
  EXPECT_TRUE(joiner->take_given_up().empty());
  EXPECT_EQ(asked, 1);
}

}  // namespace
}  // namespace rejoin::catchup
