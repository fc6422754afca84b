// Several joiners at once, which pass on to each other what they have proven. What must hold: same-bits,
// bounded-memory, and that contributors send each byte about once, however many joiners there are.
#include "catchup/tests/cluster.h"

namespace rejoin::catchup {
namespace {

constexpr std::uint32_t kTensors = 240;  // each a slice
constexpr double kLimit = 5e6;           // bytes/s of what each sends

struct Joined {
  double seconds = 0, by_contributors = 0, by_joiners = 0;  // bytes: of one state
};

struct Joiners : Cluster {
  std::vector<Replica*> joiners;
  std::size_t contributors;
  int events = 20;

  Joiners(std::uint64_t seed, std::size_t those_who_have_it, std::size_t k, double rate = kLimit,
          std::uint32_t of_tensors = kTensors)
      : Cluster(seed), contributors(those_who_have_it) {
    limit = rate;
    model = model_of(of_tensors);
    for (std::size_t i = 0; i < contributors; ++i) add(true);
    train(1);
    for (std::size_t i = 0; i < k; ++i) joiners.push_back(&add(false));
    catch_up(joiners);
  }
  const Replica& contributor() const { return *replicas[0]; }
  CatchUpProgress progress(const Replica& joiner) {
    return *joiner.service->progress({joiner.id, RankId(0)}, clock.now());
  }
  bool all_caught_up() const {
    return std::all_of(joiners.begin(), joiners.end(), [](const auto* joiner) { return joiner->caught_up; });
  }
  // A moment of some microseconds: the stream works, and now and then all make a step.
  void go_on() {
    pump(events);
    clock.advance(std::chrono::microseconds(5 * events));
    if ((moments_ += events) % 800 == 0) train(0);
  }
  template <typename Until>
  bool go_on_until(Until until, Duration at_most = std::chrono::seconds(20)) {
    for (const TimePoint begun = clock.now(); clock.now() - begun < at_most; go_on())
      if (until()) return true;
    return false;
  }
  void leave(Replica& joiner) {  // killed
    fabric.kill(*joiner.on_fabric);
    std::erase(joiners, &joiner);
    auto& place = replicas[joiner.id.value];
    place->service.reset();
    place.reset();
  }
  void expect_same_bits() const {
    for (const auto* joiner : joiners) EXPECT_TRUE(same_bits(*joiner, contributor()));
  }
  double served(std::size_t from, std::size_t to) const {
    std::uint64_t bytes = 0;
    for (std::size_t i = from; i < to; ++i) bytes += replicas[i]->service->bytes_served();
    return static_cast<double>(bytes) / static_cast<double>(model->bytes());
  }

 private:
  int moments_ = 0;
};

Joined join(std::uint64_t seed, std::size_t contributors, std::size_t k) {
  Joiners cluster(seed, contributors, k);
  const TimePoint begun = cluster.clock.now();
  EXPECT_TRUE(cluster.go_on_until([&] { return cluster.all_caught_up(); }));
  cluster.expect_same_bits();
  for (const auto* joiner : cluster.joiners) EXPECT_EQ(cluster.progress(*joiner).refetched, 0u);
  return {seconds(cluster.clock.now() - begun), cluster.served(0, contributors),
          cluster.served(contributors, contributors + k)};
}

TEST(Chain, ManyJoinersTakeHardlyLongerThanOneAndContributorsSendEachByteAboutOnce) {
  const Joined one = join(1, 1, 1);
  EXPECT_EQ(one.by_joiners, 0);
  // How long it takes is virtual time, and the same under sanitizers.
  for (const std::size_t k : kSanitized ? std::vector<std::size_t>{4} : std::vector<std::size_t>{2, 4, 6}) {
    SCOPED_TRACE(k);
    const Joined many = join(k, 1, k);
    EXPECT_LE(many.seconds, 1.2 * one.seconds);
    EXPECT_LE(many.by_contributors, 1.2);
    EXPECT_GE(many.by_contributors + many.by_joiners, static_cast<double>(k));
    std::printf("%zu joiners: %.3f s after %.3f s of one; contributors sent %.2f, joiners %.2f times the state\n", k,
                many.seconds, one.seconds, many.by_contributors, many.by_joiners);
  }
}

// Wherever states are.
struct ChainOf : CatchUp {};
INSTANTIATE_TEST_SUITE_P(Memory, ChainOf, testing::Values(Memory{.scattered = true}, Memory{.on_gpu = true}),
                         [](const auto& i) { return std::string(i.param.on_gpu ? "gpu" : "host_scattered"); });

TEST_P(ChainOf, JoinersEndWithTheSameBitsWhileEveryoneTrainsOn) {
  Cluster cluster(3, true, memory);
  cluster.compression = Compression::always;
  cluster.add(true), cluster.add(true);
  cluster.train(1);
  Replica &first = cluster.add(false), &second = cluster.add(false);
  cluster.catch_up({&first, &second});
  cluster.train_until_caught_up(first, 200, 6);
  cluster.train_until_caught_up(second, 200, 6);
  for (const auto* joiner : {&first, &second}) {
    ASSERT_TRUE(joiner->caught_up);
    EXPECT_TRUE(cluster.same_bits(*joiner, *cluster.replicas[0]));
  }
  EXPECT_GT(first.service->bytes_passed_on() + second.service->bytes_passed_on(), 0u);
}

TEST(Chain, AMemberMayDieAtAnyMoment) {
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE(seed);
    Joiners cluster(seed, 1, 3);
    Replica& victim = *cluster.joiners[seed % 3];
    ASSERT_TRUE(cluster.go_on_until([&] { return cluster.progress(victim).slices >= 20 * seed; }));
    cluster.leave(victim);
    ASSERT_TRUE(cluster.go_on_until([&] { return cluster.all_caught_up(); }));
    cluster.expect_same_bits();
  }
}

// Its daemon, its trainer or both, for good or for a while. No plan says so meanwhile.
TEST(Chain, AMemberThatStopsIsRoutedAround) {
  for (const bool daemon : {true, false})
    for (const bool goes_on : {true, false}) {
      SCOPED_TRACE(testing::Message() << (daemon ? "daemon" : "trainer") << (goes_on ? ", goes on" : ""));
      Joiners cluster(5, 1, 3);
      Replica& victim = *cluster.joiners[1];
      const auto begun = cluster.clock.now();
      const auto owed_by_fellows = [&] {
        for (std::uint32_t t = 0; t < kTensors; ++t) {
          const auto status = local::SliceStatus::unpack(victim.owner->page().slice_statuses()[t].load());
          for (const auto* other : cluster.joiners)
            if (status.requested_from(other->id.value)) return true;
        }
        return false;
      };
      cluster.events = 1;
      ASSERT_TRUE(cluster.go_on_until([&] { return cluster.progress(victim).slices >= 60 && owed_by_fellows(); }));
      cluster.events = 20;
      if (daemon) victim.daemon_stopped = true, cluster.fabric.stop(*victim.on_fabric);
      else victim.trainer_stopped = true;
      std::erase(cluster.joiners, &victim);
      if (goes_on) {
        ASSERT_TRUE(cluster.go_on_until([&, until = cluster.clock.now() + std::chrono::milliseconds(1500)] {
          return cluster.clock.now() >= until;
        }));
        if (daemon) victim.daemon_stopped = false, cluster.fabric.resume(*victim.on_fabric);
        cluster.go_on();
        if (daemon) EXPECT_EQ(cluster.progress(victim).fellows, 2u) << "it holds its own absence against others";
      }
      ASSERT_TRUE(cluster.go_on_until([&] { return cluster.all_caught_up(); }));
      EXPECT_LE(seconds(cluster.clock.now() - begun), 2.5);
      cluster.expect_same_bits();
    }
}

// Found by the simulator: where fewer slices than four had come, or fewer than four from each, how often they usually
// come was reckoned up to now, so that no wait was ever a long one.
TEST(Chain, OneThatStopsIsRoutedAroundWhenHardlyAnythingHasCome) {
  for (const bool has_sent : {false, true}) {
    SCOPED_TRACE(has_sent);
    Joiners cluster(9, 1, 2, kLimit, 6);
    Replica &victim = *cluster.joiners[1], &other = *cluster.joiners[0];
    cluster.events = 1;
    if (has_sent) ASSERT_TRUE(cluster.go_on_until([&] { return cluster.progress(other).from_joiners > 0; }));
    victim.daemon_stopped = true, cluster.fabric.stop(*victim.on_fabric);
    std::erase(cluster.joiners, &victim);
    cluster.events = 20;
    EXPECT_LT(cluster.progress(other).slices, 6u);
    EXPECT_TRUE(cluster.go_on_until([&] { return cluster.all_caught_up(); }, std::chrono::milliseconds(2500)));
    cluster.expect_same_bits();
  }
}

// What it sends is damaged on its way: found by the digest that came with it.
TEST(Chain, WhatIsDamagedOnItsWayIsFetchedAgain) {
  Joiners cluster(6, 1, 2);
  const auto damaged = [&] {
    const auto state = cluster.progress(*cluster.joiners[0]);
    if (state.refetched == 0 && state.from_joiners > 0)
      cluster.fabric.damage_next_write(*cluster.joiners[0]->on_fabric);
    return cluster.all_caught_up();
  };
  ASSERT_TRUE(cluster.go_on_until(damaged));
  EXPECT_GE(cluster.progress(*cluster.joiners[0]).refetched, 1u);
  cluster.expect_same_bits();
}

// Its bytes are wrong although it has proven them, and so is its digest of them.
TEST(Chain, AWrongByteOfAJoinerIsFoundByAContributorsDigestAndSpreadsNoFurther) {
  Joiners cluster(7, 1, 3);
  cluster.events = 1;
  Replica& wrong = *cluster.joiners[0];
  std::erase(cluster.joiners, &wrong);
  const auto state_of = [](const Replica& replica, std::uint32_t slice) {
    return local::SliceStatus::unpack(replica.owner->page().slice_statuses()[slice].load()).state;
  };
  std::set<std::uint32_t> flipped;
  ASSERT_TRUE(cluster.go_on_until([&] {
    for (std::uint32_t t = 0; t < kTensors; ++t) {
      if (state_of(wrong, t) != local::SliceState::arrived || flipped.contains(t)) continue;
      if (std::ranges::any_of(cluster.joiners,
                              [&](const auto* one) { return state_of(*one, t) != local::SliceState::absent; }))
        continue;
      flipped.insert(t);
      wrong.change_bytes(wrong.owner->column(t, 0).subspan(3, 1), [](auto bytes) { bytes[0] ^= std::byte{0x40}; });
    }
    return cluster.all_caught_up();
  }));
  std::uint32_t refetched = 0;
  for (const auto* joiner : cluster.joiners) refetched += cluster.progress(*joiner).refetched;
  EXPECT_GE(refetched, 1u) << "nothing wrong was sent of " << flipped.size() << " slices";
  EXPECT_LT(refetched, 20u) << "whoever has sent something wrong is asked no more";
  cluster.expect_same_bits();
}

TEST(Chain, AMemberThatIsPromotedServesOnAsAContributor) {
  Joiners cluster(8, 1, 2);
  Replica &first = *cluster.joiners[0], &second = cluster.add(false);
  cluster.joiners = {&first};
  ASSERT_TRUE(cluster.go_on_until([&] { return first.caught_up; }));
  cluster.joiners = {&first, &second};
  cluster.catch_up(cluster.joiners);
  ASSERT_TRUE(cluster.go_on_until([&] { return cluster.progress(second).from_joiners > 0; }));
  first.contributes = true;
  first.service->finish({first.id, RankId(0)});
  cluster.joiners = {&second};
  cluster.catch_up(cluster.joiners);
  ASSERT_TRUE(cluster.go_on_until([&] { return second.caught_up; }));
  EXPECT_EQ(cluster.progress(second).sources, 2u) << "both were asked for digests";
  cluster.expect_same_bits();
}

// All of its state lies there, from a life before, and has been compared with nobody.
TEST(Chain, NobodyIsServedWhatIsNotProven) {
  Joiners cluster(9, 1, 2);
  Replica &asked = *cluster.joiners[0], &asks = *cluster.joiners[1];
  asked.service->finish({asked.id, RankId(0)});
  for (std::uint32_t t = 0; t < kTensors; ++t)
    asked.owner->page().slice_statuses()[t].store(
        local::SliceStatus{local::SliceState::current, cluster.step}.packed());
  asked.service->catch_up({asked.id, RankId(0)}, {{ReplicaId(7), Incarnation(1), {"sim:99"}}}, Step(cluster.step),
                          cluster.clock.now());
  // As if the plan said that it contributes: so everything is wanted of it.
  asks.service->catch_up({asks.id, RankId(0)}, {{asked.id, Incarnation(1), asked.address}}, Step(cluster.step),
                         cluster.clock.now());
  ASSERT_FALSE(cluster.go_on_until([&] { return cluster.progress(asks).slices > 0; }, std::chrono::milliseconds(100)));
  EXPECT_EQ(asked.service->bytes_served(), 0u);
}

// It is fetched again, or in doubt, while it is being sent.
TEST(Chain, NobodyIsToldThatBytesAreThereWhichWereWithdrawnUnderWay) {
  for (const bool withdrawn : {false, true}) {
    SCOPED_TRACE(withdrawn);
    Cluster cluster(11);
    const Replica& joining = cluster.add(true);
    auto view = *local::View::of(*joining.owner);
    auto engine = cluster.fabric.make_engine(), asking = cluster.fabric.make_engine();
    ASSERT_TRUE(asking->connect(*engine->listen({}), {}));
    std::optional<transport::EndpointId> endpoint;
    while (!endpoint) {
      ASSERT_TRUE(cluster.fabric.step());
      for (const auto& event : engine->poll())
        if (event.kind == transport::EventKind::accepted) endpoint = event.endpoint;
    }
    const auto local = [&](std::span<std::byte> memory) {
      return *engine->register_region(memory, device::MemoryKind::host, transport::Access::local);
    };
    std::vector<transport::RegionId> state;
    for (const auto range : view.memory_ranges()) state.push_back(local(range));
    Proofs proofs;
    proofs.begin(view.manifest().slices().size());
    proofs.add(0);
    joining.owner->page().slice_statuses()[0].store(local::SliceStatus{local::SliceState::current, 0}.packed());
    Pacer pacer(0);
    Source source(*engine, *endpoint, {&view, state, local(view.shadow()), &proofs}, Compression::never, pacer,
                  cluster.clock, deadlines::kSilence);
    Bytes memory(view.manifest().bytes());
    const auto target =
        asking->remote(*asking->register_region(memory, device::MemoryKind::host, transport::Access::remote_write));
    proto::Fetch fetch;
    fetch.add_slices(0);
    fetch.add_regions()->set_key(target.key);
    fetch.mutable_regions(0)->set_length(target.length);
    for (std::uint32_t column = 0; column < 3; ++column)
      fetch.add_region_indexes(0), fetch.add_offsets(column * 400'000);
    ASSERT_TRUE(source.on_fetch(fetch));
    source.work(cluster.clock.now());
    if (withdrawn) proofs.withdraw(0);
    bool told = false;
    while (cluster.fabric.step()) {
      for (const auto& event : engine->poll())
        if (event.kind == transport::EventKind::completed)
          source.on_write_completed(event.value, !event.error, cluster.clock.now());
      source.work(cluster.clock.now());
      for (const auto& event : asking->poll()) told = told || event.kind == transport::EventKind::message;
    }
    EXPECT_EQ(told, !withdrawn);
    EXPECT_EQ(source.failed(), withdrawn) << "the connection is to be closed";
  }
}

// A joiner's kept gradients stay within their budget, however many send to it.
TEST(Chain, KeptGradientsStayWithinTheirBudget) {
  Joiners cluster(10, 1, 0);
  constexpr std::uint64_t budget = 100'000;
  for (int i = 0; i < 4; ++i) cluster.joiners.push_back(&cluster.add(false, budget));
  cluster.catch_up(cluster.joiners);
  std::uint64_t most = 0;
  ASSERT_TRUE(cluster.go_on_until([&] {
    for (const auto* joiner : cluster.joiners) most = std::max(most, joiner->gradient_log->bytes());
    return cluster.all_caught_up();
  }));
  EXPECT_GT(most, 0u);
  EXPECT_LE(most, budget);
  cluster.expect_same_bits();
}

}  // namespace
}  // namespace rejoin::catchup
