// The joiner's state is compared with its sources' before it counts as complete.
#include "base/digest.h"
#include "catchup/tests/cluster.h"

namespace rejoin::catchup {
namespace {

// Lets events happen until this is so, within a bound.
template <typename Is>
bool pump_until(Cluster& cluster, Is is) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (int i = 0; cluster.on_gpu ? std::chrono::steady_clock::now() < deadline : i < 5000; ++i) {
    if (is()) return true;
    cluster.pump(1);
  }
  return is();
}

// Trains until one of the joiner's slices has arrived and has yet to be brought up to date, and flips a bit of it, a
// high one, since a low one may vanish in the rounding of the updates that do so. Nothing: there was none.
std::optional<std::uint32_t> flip_when_arrived(Cluster& cluster, Replica& joiner) {
  const auto& slices = joiner.owner->manifest().slices();
  std::optional<std::uint32_t> flipped;
  pump_until(cluster, [&, i = 0]() mutable {
    if (++i % 20 == 0) cluster.train(0);
    for (std::uint32_t s = 0; s < slices.size() && !flipped; ++s)
      if (const auto status = joiner.status(s);
          status.state == local::SliceState::arrived && status.version() < joiner.owner->clock().version)
        flipped = s;
    return flipped || joiner.caught_up;
  });
  if (flipped)
    joiner.change_bytes(joiner.owner->column(slices[*flipped].range, 0).subspan(3, 1),
                        [](std::span<std::byte> byte) { byte[0] ^= std::byte{0x40}; });
  return flipped;
}

TEST_P(CatchUp, AFlippedBitIsFoundByVerificationAndFetchedAgain) {
  bool flipped = false;
  for (std::uint64_t seed = 3; !flipped; ++seed) {
    SCOPED_TRACE(seed);
    ASSERT_LT(seed, on_gpu ? 20u : 4u);
    Cluster cluster(seed, true, memory);
    cluster.add(true), cluster.add(true);
    cluster.train(1);
    Replica& joiner = cluster.add(false);
    cluster.catch_up(joiner);
    flipped = flip_when_arrived(cluster, joiner).has_value();
    cluster.train_until_caught_up(joiner, 250, 20);
    ASSERT_TRUE(joiner.caught_up);
    EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
    if (flipped) EXPECT_GE(joiner.service->progress({joiner.id, RankId(0)}, cluster.clock.now())->refetched, 1u);
  }
}

// Sources say that it is wrong when the trainer's next update has been given it already.
TEST_P(CatchUp, WhatIsFoundWrongWhileAnUpdateWritesToItIsFetchedAfterIt) {
  Cluster cluster(4, true, memory);
  cluster.smaller = true;
  Replica& source = cluster.add(true);
  cluster.train(1);
  Replica& joiner = cluster.add(false);
  cluster.catch_up(joiner);
  const auto wrong = flip_when_arrived(cluster, joiner);
  ASSERT_TRUE(wrong);
  cluster.train(0);
  ASSERT_EQ(joiner.status(*wrong).state, local::SliceState::current);
  const auto asked_about = [&](const local::Pin& pin) {
    const local::Slice& slice = joiner.owner->manifest().slices()[*wrong];
    return pin.state == local::PinState::pending && pin.part >= slice.first_part &&
           pin.part < slice.first_part + slice.parts;
  };
  ASSERT_TRUE(pump_until(cluster, [&] { return std::ranges::any_of(joiner.owner->page().pins, asked_about); }));
  joiner.daemon_stopped = true;
  cluster.pump(200);  // the source answers
  joiner.begin_update(Step(++cluster.step));
  source.update(Step(cluster.step));
  joiner.daemon_stopped = false;
  ASSERT_TRUE(pump_until(cluster, [&] { return joiner.status(*wrong).state != local::SliceState::current; }));
  cluster.pump(1000);
  EXPECT_EQ(joiner.status(*wrong).state, local::SliceState::absent);
  joiner.end_update();
  cluster.train_until_caught_up(joiner, 200, 20);
  ASSERT_TRUE(joiner.caught_up);
  EXPECT_TRUE(cluster.same_bits(joiner, source));
}

// A daemon that is started anew finds the slice void, and doesn't know under which update it has become so.
TEST_P(CatchUp, ADaemonThatIsStartedWithinAnUpdateAsksForNothingBeforeItIsOver) {
  Cluster cluster(5, true, memory);
  cluster.smaller = true;
  Replica& source = cluster.add(true);
  cluster.train(1);
  Replica& joiner = cluster.add(false);
  cluster.train(1);
  joiner.begin_update(Step(++cluster.step));
  source.update(Step(cluster.step));
  cluster.catch_up(joiner);
  cluster.pump(1000);
  EXPECT_EQ(joiner.status(0).state, local::SliceState::absent);
  joiner.end_update();
  cluster.train_until_caught_up(joiner, 200, 20);
  ASSERT_TRUE(joiner.caught_up);
  EXPECT_TRUE(cluster.same_bits(joiner, source));
}

TEST_P(CatchUp, AReplicaThatStartsFromNothingHasCaughtUpBeforeItsFirstUpdate) {
  Cluster cluster(9, true, memory);
  cluster.smaller = true;
  cluster.add(true), cluster.add(true);
  cluster.train(1), cluster.train(1);
  Replica& joiner = cluster.add(false);
  joiner.owner->set_version(0);
  cluster.catch_up(joiner);
  ASSERT_TRUE(pump_until(cluster, [&] { return joiner.caught_up; }));
  EXPECT_EQ(joiner.owner->clock().version, 0u);
  EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
  cluster.train(1);
  EXPECT_EQ(joiner.owner->clock().version, 3u);
  EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
}

// Its sources are a step ahead, and can't be asked any more what they had.
TEST_P(CatchUp, WhatNobodyElseHasAnyMoreIsVerifiedWhenTheReplicaHasMadeItsUpdate) {
  Cluster cluster(10, true, memory);
  cluster.smaller = true;
  cluster.add(true), cluster.add(true);
  cluster.train(1);
  Replica& joiner = cluster.add(false);
  joiner.owner->set_version(0);
  cluster.catch_up(joiner);
  ASSERT_TRUE(pump_until(cluster, [&] { return joiner.status(0).state == local::SliceState::arrived; }));
  ++cluster.step;
  for (const std::size_t source : {0, 1}) cluster.replicas[source]->update(Step(cluster.step));
  cluster.pump(200);
  if (!on_gpu) EXPECT_FALSE(joiner.caught_up);
  joiner.update(Step(cluster.step));
  cluster.train_until_caught_up(joiner, 200, 20);
  ASSERT_TRUE(joiner.caught_up);
  EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[0]));
}

TEST_P(CatchUp, SourcesThatDifferAreReportedAndNotTrustedBeforeTheOneThatIsWrongHasGone) {
  for (const std::uint32_t wrong : {0u, 1u}) {
    SCOPED_TRACE(wrong);
    Cluster cluster(6 + wrong, true, memory);
    cluster.add(true), cluster.add(true);
    cluster.train(1);
    Replica& drifted = *cluster.replicas[wrong];
    const float other = 0.25f;  // in tensor "b", moment 1
    ASSERT_TRUE(drifted.access->write(drifted.owner->column(1, 1).data() + 4000, bytes_of(other)));
    Replica& joiner = cluster.add(false);
    cluster.catch_up(joiner);
    std::vector<std::pair<RankKey, Drift>> drifts;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    const auto go_on = [&](int i) { return on_gpu ? std::chrono::steady_clock::now() < deadline : i < 400; };
    for (int i = 0; go_on(i) && drifts.empty(); ++i) {
      cluster.train(6);
      drifts = joiner.service->take_drifts();
    }
    ASSERT_EQ(drifts.size(), 1u);
    const Drift& drift = drifts[0].second;
    EXPECT_EQ(drift.tensor, "b");
    EXPECT_LE(drift.first, 1000u);
    EXPECT_GT(drift.first + drift.count, 1000u);
    ASSERT_EQ(drift.digests.size(), 2u);
    EXPECT_NE(drift.digests[0].second, drift.digests[1].second);
    EXPECT_LT(drift.offset, drift.total);
    const auto refetched = joiner.service->progress({joiner.id, RankId(0)}, cluster.clock.now())->refetched;
    for (int i = 0; i < (on_gpu || kSanitized ? 20 : 100); ++i) cluster.train(6);
    EXPECT_FALSE(joiner.caught_up) << "its sources differ";
    EXPECT_EQ(joiner.service->progress({joiner.id, RankId(0)}, cluster.clock.now())->refetched, refetched)
        << "fetched again, it would fit one of them";
    drifted.contributes = false;
    cluster.catch_up(joiner);
    cluster.train_until_caught_up(joiner, 400, 6);
    ASSERT_TRUE(joiner.caught_up);
    EXPECT_TRUE(cluster.same_bits(joiner, *cluster.replicas[1 - wrong]));
  }
}

// As far as they say so: however many slices differ, each costs a line and an audit.
TEST(CatchUpService, OfSourcesThatDifferEverywhereOneSliceASecondIsReported) {
  Cluster cluster(12);
  cluster.model = model_of(40);
  cluster.add(true);
  const Replica& drifted = cluster.add(true);
  cluster.train(1);
  drifted.for_columns([](auto, auto, std::span<std::byte> column) { column[3] ^= std::byte{0x40}; });
  Replica& joiner = cluster.add(false);
  cluster.catch_up(joiner);
  const auto reported = [&] {
    for (int i = 0; i < 100; ++i) cluster.train(6);
    return joiner.service->take_drifts().size();
  };
  EXPECT_EQ(reported(), 1u);
  cluster.clock.advance(std::chrono::milliseconds(1001));
  EXPECT_EQ(reported(), 1u);
}

// A joiner and one source, which says whatever it is told to.
struct Told : testing::Test {
  Cluster cluster{14};
  Replica& trainer = cluster.add(false);
  local::View view = *local::View::of(*trainer.owner);
  std::unique_ptr<transport::Engine> engine = cluster.fabric.make_engine(), source = cluster.fabric.make_engine();
  transport::EndpointId endpoint = *engine->connect(*source->listen({}), {});
  Proofs proofs;
  std::optional<Joiner> joiner;
  const ReplicaId id{7};

  void SetUp() override { begin(Step(0)); }
  void begin(Step committed) {
    std::vector<transport::RegionId> state;
    for (const auto range : view.memory_ranges())
      state.push_back(*engine->register_region(range, device::MemoryKind::host, transport::Access::remote_write));
    joiner.emplace(*engine, view, state, proofs, committed, deadlines::kSilence, cluster.clock.now());
    joiner->expect({{id, Incarnation(1)}}, cluster.clock.now());
    while (cluster.fabric.step()) engine->poll();
    joiner->on_source_up(id, endpoint);
    joiner->work(cluster.clock.now(), false);
    ASSERT_TRUE(trainer.status(0).requested_from(id.value));
  }
  // The first slice is there, as it lies there.
  Result<> tell(std::uint64_t version) { return tell(id, version); }
  Result<> tell(ReplicaId from, std::uint64_t version) {
    proto::Stream message;
    auto& sent = *message.mutable_sent();
    sent.set_version(version);
    for (const auto digest : digests()) {
      sent.add_digests(digest);
      sent.add_generations(0);
    }
    return joiner->on_message(from, message);
  }
  // … and this one has the same, by its answer to the question of this number.
  Result<> agree(ReplicaId from, std::uint64_t number) {
    std::uint64_t whole = 0;
    for (const auto digest : digests()) whole = combine_digests(whole, digest);
    proto::Stream message;
    message.mutable_verify_reply()->set_request(number);
    message.mutable_verify_reply()->add_digests(whole);
    return joiner->on_message(from, message);
  }
  std::vector<std::uint64_t> digests() {  // of its parts
    const auto& manifest = view.manifest();
    std::vector<std::uint64_t> all;
    for (std::uint32_t i = 0; i < manifest.slices()[0].parts; ++i) {
      const local::Columns columns[] = {view.columns(manifest.part(0, i))};
      all.push_back(view.digests(columns)[0]);
    }
    return all;
  }
  std::uint32_t verified() const { return joiner->progress(cluster.clock.now()).verified; }
};

TEST_F(Told, AVersionThatNoSourceCanHaveIsNotBelievedOnceTheTrainerGoesOn) {
  ASSERT_TRUE(tell(1000));
  joiner->work(cluster.clock.now(), false);
  EXPECT_EQ(trainer.status(0).version(), 1000u) << "the trainer may have stood for long";
  while (cluster.fabric.step())
    for (const auto& event : source->poll())
      if (proto::Stream message; event.kind == transport::EventKind::message &&
                                 message.ParseFromArray(event.message.data(), static_cast<int>(event.message.size())))
        EXPECT_FALSE(message.has_verify()) << "nobody could answer";
  trainer.update(Step(1));
  joiner->work(cluster.clock.now(), false);
  EXPECT_EQ(trainer.status(0).state, local::SliceState::absent) << "it waits to be fetched again";
  EXPECT_EQ(joiner->progress(cluster.clock.now()).verified, 0u);
}

TEST_F(Told, AVersionThatHasNoRoomIsNonsense) {
  EXPECT_FALSE(tell(local::SliceStatus::kVersions));
  EXPECT_TRUE(tell(1));
}

// What it said before was of the bytes that were given up.
TEST_F(Told, WhatIsFetchedAgainIsComparedAgainWithWhoHadAgreed) {
  const ReplicaId other{8};
  joiner->expect({{id, Incarnation(1)}, {other, Incarnation(1)}}, cluster.clock.now());
  joiner->on_source_up(other, *engine->connect(*source->listen({}), {}));
  ASSERT_TRUE(tell(id, 0));
  joiner->work(cluster.clock.now(), false);
  ASSERT_TRUE(agree(other, 1));
  joiner->work(cluster.clock.now(), false);
  ASSERT_EQ(verified(), 1u);
  trainer.owner->page().slice_statuses()[0].store(local::SliceStatus{local::SliceState::abandoned, 0}.packed());
  trainer.update(Step(1));
  joiner->work(cluster.clock.now(), false);
  ASSERT_EQ(verified(), 0u);
  const ReplicaId asked = trainer.status(0).requested_from(id.value) ? id : other;
  ASSERT_TRUE(tell(asked, 1));
  joiner->work(cluster.clock.now(), false);
  EXPECT_EQ(trainer.status(0).state, local::SliceState::arrived);
  EXPECT_EQ(verified(), 0u) << "replica " << asked.value << " alone says that it is right";
  ASSERT_TRUE(agree(asked == id ? other : id, 2));
  joiner->work(cluster.clock.now(), false);
  EXPECT_EQ(verified(), 1u);
}

// Its state is another one, and may be older.
TEST_F(Told, WhatASourceHasAgreedWithInAnotherLifeIsComparedAgain) {
  const ReplicaId other{8};
  const auto expect = [&](Incarnation life) {
    joiner->expect({{id, life}, {other, Incarnation(1)}}, cluster.clock.now());
  };
  expect(Incarnation(1));
  ASSERT_TRUE(tell(0));
  joiner->work(cluster.clock.now(), false);
  expect(Incarnation(2));
  joiner->on_source_up(other, *engine->connect(*source->listen({}), {}));
  joiner->work(cluster.clock.now(), false);
  for (std::uint64_t number : {1, 2}) ASSERT_TRUE(agree(other, number));
  joiner->work(cluster.clock.now(), false);
  EXPECT_EQ(verified(), 0u);
}

// Its trainer has made steps while the daemon registered the state, which takes seconds where it is large.
struct ToldBehind : Told {
  void SetUp() override {
    trainer.owner->set_version(10);
    begin(Step(5));
  }
};

TEST_F(ToldBehind, WhatIsNewerThanTheCommitThatTheJoinerBeganWithIsNoNonsense) {
  ASSERT_TRUE(tell(10));
  joiner->work(cluster.clock.now(), false);
  trainer.begin_update(Step(11));
  joiner->work(cluster.clock.now(), false);
  EXPECT_EQ(trainer.status(0).state, local::SliceState::arrived);
  trainer.end_update();
  joiner->work(cluster.clock.now(), false);
  EXPECT_NE(trainer.status(0).state, local::SliceState::absent);
}

// Found by the simulator: the joiner may be the last that has the state by then, and nobody is there to verify it with.
TEST(CatchUpService, ThatAStateIsCompleteOutlivesTheDaemonThatVerifiedIt) {
  Cluster cluster(7);
  cluster.add(true);
  cluster.train(1);
  Replica& joiner = cluster.add(false);
  cluster.catch_up(joiner);
  cluster.train_until_caught_up(joiner, 200, 20);
  ASSERT_TRUE(joiner.caught_up);
  cluster.train(1);
  joiner.caught_up = false;
  const auto restart = [&] {
    joiner.service =
        std::make_unique<Service>(*joiner.engine, transport::Secret::of({5, 0}), Service::Options{}, cluster.clock);
    const catchup::RankKey key{joiner.id, RankId(0)};
    EXPECT_TRUE(joiner.service->add_rank(key, 2, *local::View::of(*joiner.owner)));
    joiner.service->catch_up(key, {}, Step(cluster.step), cluster.clock.now());
    cluster.pump(100);
  };
  restart();
  EXPECT_TRUE(joiner.caught_up);
  // But not where the trainer has given up a part of it since.
  joiner.caught_up = false;
  joiner.owner->page().slice_statuses()[0].store(local::SliceStatus{local::SliceState::abandoned, 0}.packed());
  restart();
  EXPECT_FALSE(joiner.caught_up);
}

}  // namespace
}  // namespace rejoin::catchup
