// Contributors whose daemon's catch-up thread stands still, in a driver that does not return, say, while their replicas
// contribute. What must hold: they keep nobody out for long, nothing of theirs lands after they were given up, and who
// only waits for its trainer is waited for.
#include <map>
#include <utility>

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

// Sources differed for a while: their slice is compared among all that can say what they have.
TEST_F(StandingSource, OneThatIsConnectedKeepsNoSliceSuspectThatDiffered) {
  Replica& third = cluster.add(true);
  third.owner->set_version(cluster.step);
  const auto make_same = [&] {
    const auto& right = *cluster.replicas[0]->owner;
    third.for_columns([&](std::uint32_t t, std::uint32_t c, std::span<std::byte> column) {
      std::ranges::copy(right.column(t, c), column.begin());
    });
  };
  make_same();
  cluster.catch_up(*joiner);
  const auto go_on = [&](auto is, Duration at_most) {
    for (const TimePoint began = cluster.clock.now(); !is() && cluster.clock.now() - began < at_most;) {
      cluster.clock.advance(std::chrono::milliseconds(20));
      cluster.pump(10);
    }
    return is();
  };
  source->daemon_stopped = true;
  third.owner->column(7, 0)[0] ^= std::byte{1};
  std::size_t drifts = 0;
  EXPECT_TRUE(go_on([&] { return (drifts += joiner->service->take_drifts().size()) > 0; }, 4 * kFiveSilences));
  ASSERT_EQ(progress().sources, 3u) << "its call was taken";
  make_same();
  EXPECT_TRUE(go_on([&] { return joiner->caught_up; }, 4 * kFiveSilences));
  EXPECT_TRUE(cluster.same_bits(*joiner, *cluster.replicas[0]));
}

// A joiner, and sources that say what they are told to.
struct ToldSource : testing::Test {
  Cluster cluster{22};
  local::View view = view_of_joiner(cluster);
  std::unique_ptr<transport::Engine> engine = cluster.fabric.make_engine(), source = cluster.fabric.make_engine();
  const transport::Address address = *source->listen({});
  Proofs proofs;
  Duration silence = deadlines::kSilence, turn = std::chrono::milliseconds(100);
  std::optional<Joiner> joiner;
  std::map<ReplicaId, transport::EndpointId> sources;
  const ReplicaId id{7};
  int asked = 0, fetches = 0;  // for signs, and for slices
  enum class Answers { none, signs, digests };

  static local::View view_of_joiner(Cluster& cluster) {
    cluster.model = model_of(60);
    return *local::View::of(*cluster.add(false).owner);
  }
  void SetUp() override { begin({id}); }
  void begin(const std::set<ReplicaId>& ids) {
    sources.clear();
    std::vector<transport::RegionId> state;
    for (const auto range : view.memory_ranges())
      state.push_back(*engine->register_region(range, device::MemoryKind::host, transport::Access::remote_write));
    joiner.emplace(*engine, view, state, proofs, Step(0), silence, cluster.clock.now());
    std::map<ReplicaId, Incarnation> expected;
    for (const auto each : ids) expected[each] = Incarnation(1);
    joiner->expect(expected, cluster.clock.now());
    for (const auto each : ids) connect(each);
  }
  void connect(ReplicaId to) {
    sources[to] = *engine->connect(address, {});
    while (cluster.fabric.step()) engine->poll();
    joiner->on_source_up(to, sources[to]);
  }
  // As the service does it.
  void connect_anew(ReplicaId to) {
    engine->close(sources.at(to));
    joiner->on_source_down(to);
    connect(to);
  }
  // Who was given up meanwhile, and until then.
  std::size_t go_on(Duration lasting, Answers answers) {
    std::size_t given_up = 0;
    for (const TimePoint began = cluster.clock.now(); cluster.clock.now() - began < lasting && given_up == 0;) {
      cluster.clock.advance(turn);
      joiner->work(cluster.clock.now(), false);
      given_up = joiner->take_given_up().size();
      while (cluster.fabric.step())
        for (const auto& event : source->poll())
          if (proto::Stream message; event.kind == transport::EventKind::message &&
                                     message.ParseFromArray(event.message.data(), int(event.message.size())))
            take(message, answers);
    }
    return given_up;
  }
  void take(const proto::Stream& message, Answers answers) {
    fetches += message.fetch().slices_size() > 0;
    asked += message.fetch().sign();
    proto::Stream answer;
    if (message.fetch().sign() && answers == Answers::signs) answer.mutable_sign();
    if (message.has_verify() && answers == Answers::digests) answer.mutable_verify_reply()->set_too_late(true);
    if (answer.kind_case() != proto::Stream::KIND_NOT_SET) EXPECT_TRUE(joiner->on_message(id, answer));
  }
};

TEST_F(ToldSource, ThatGivesSignsIsWaitedForUntilItGivesNone) {
  EXPECT_EQ(go_on(3 * kFiveSilences, Answers::signs), 0u);
  EXPECT_GT(asked, 5);
  const int before = asked;
  EXPECT_EQ(go_on(kFiveSilences + silence, Answers::none), 1u);
  EXPECT_LE(asked, before + 1) << "nothing piles up at who stands still";
}

TEST_F(ToldSource, ThatHasSaidNothingStandsStill) { EXPECT_EQ(go_on(kFiveSilences + silence, Answers::none), 1u); }

TEST_F(ToldSource, ThatStandsStillIsFoundWithTheShortestSilence) {
  silence = turn = std::chrono::milliseconds(100);
  turn /= 5;  // as seldom as the stream's thread looks
  begin({id});
  EXPECT_EQ(go_on(6 * silence, Answers::none), 1u);
}

TEST_F(ToldSource, OfAnOlderReleaseGivesNoSignsAndIsWaitedFor) {
  proto::Stream message;
  message.mutable_verify_reply()->set_request(77);
  ASSERT_TRUE(joiner->on_message(id, message));
  EXPECT_EQ(go_on(3 * kFiveSilences, Answers::none), 0u);
  EXPECT_EQ(asked, 1);
}

TEST_F(ToldSource, OfAnOlderReleaseThatWasGivenUpBeforeItSaidAnythingIsAskedAgain) {
  ASSERT_EQ(go_on(kFiveSilences + silence, Answers::none), 1u);
  connect_anew(id);
  fetches = 0;
  go_on(silence, Answers::none);
  EXPECT_EQ(fetches, 0) << "it may stand still, although the call was taken";
  connect_anew(id);
  EXPECT_EQ(go_on(3 * kFiveSilences, Answers::digests), 0u);
  EXPECT_GT(fetches, 0);
  EXPECT_FALSE(joiner->unreached_since(cluster.clock.now()));
}

// Over a slow link all signs are behind what all send.
TEST_F(ToldSource, ThatLivedAfterAllHasTwiceAsLongEachTime) {
  for (int times = 1; times <= 8; times *= 2) {
    EXPECT_EQ(go_on(times * kFiveSilences, Answers::none), 0u) << times;
    ASSERT_EQ(go_on(times * kFiveSilences + silence, Answers::none), 1u);
    connect_anew(id);
    go_on(turn, Answers::signs);
  }
}

TEST_F(ToldSource, HasMoreTimeBeforeTheFirstSliceTheMoreSendOverTheLink) {
  begin({ReplicaId(1), ReplicaId(2), ReplicaId(3), ReplicaId(4)});
  EXPECT_EQ(go_on(4 * kFiveSilences, Answers::none), 0u);
  EXPECT_EQ(go_on(silence, Answers::none), 4u);
}

TEST_F(ToldSource, IsToBeEndedWhenItDoesNotAnswerASecondConnectionEither) {
  const auto level = logger().level();
  logger().set_level(spdlog::level::warn);
  const auto logged = [&](Duration lasting) {
    testing::internal::CaptureStdout();
    const std::size_t given_up = go_on(lasting, Answers::none);
    logger().flush();
    return std::pair{given_up, testing::internal::GetCapturedStdout()};
  };
  const auto [given_up, first] = logged(kFiveSilences + silence);
  connect_anew(id);
  const auto [again, second] = logged(2 * kFiveSilences);
  logger().set_level(level);
  EXPECT_EQ(given_up, 1u);
  EXPECT_NE(first.find("before it is heard again"), std::string::npos) << first;
  EXPECT_EQ(first.find("end that daemon"), std::string::npos) << first;
  EXPECT_NE(second.find("nor when it was called again; if that lasts, end that daemon"), std::string::npos) << second;
}

}  // namespace
}  // namespace rejoin::catchup
