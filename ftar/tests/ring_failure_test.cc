// The all-reduce under failures: members that die, stop, are silent or forgotten, and epochs that change under it.
#include "ftar/tests/ring_cluster.h"

namespace rejoin::ftar {
namespace {

TEST_P(FtarRing, SurvivorsFinishFromIntactInputsWhereverAMemberDies) {
  for (std::uint64_t seed = 1; seed <= seeds(60); ++seed) {
    SCOPED_TRACE(seed);
    Cluster cluster(seed, kSizes, over);
    for (int i = 0; i < 4; ++i) cluster.add();
    cluster.enter(Epoch(1), cluster.ring_members());
    ASSERT_TRUE(cluster.until([&] {
      return cluster.ranks[0]->communicator->epoch() == Epoch(1) && !cluster.ranks[0]->communicator->busy();
    }));
    std::vector<std::vector<std::vector<float>>> inputs;
    for (auto& rank : cluster.ranks) inputs.push_back(rank->input);
    cluster.start(Step(1));
    const auto moment = static_cast<int>(cluster.random() % 400);
    cluster.pass(moment);
    Rank& victim = *cluster.ranks[seed % 4];
    cluster.kill(victim);
    ASSERT_TRUE(cluster.until([&] {
      return std::all_of(cluster.ranks.begin(), cluster.ranks.end(),
                         [](auto& r) { return !r->alive || r->lost_someone(); });
    }));
    cluster.look_at_inputs();
    for (std::size_t i = 0; i < inputs.size(); ++i) EXPECT_EQ(cluster.ranks[i]->input, inputs[i]) << "input-intact";
    for (auto& rank : cluster.ranks) rank->outcomes.clear();
    cluster.enter(Epoch(2), cluster.ring_members());
    cluster.start(Step(1));
    ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); }));
    cluster.expect_result(cluster.live());
  }
}

// In the place of a driver: what the newer ones of all do.
void call_at(Cluster& cluster, const Rank& moved, const transport::Address& address) {
  for (auto& rank : cluster.ranks) {
    if (rank->self.incarnation <= moved.self.incarnation) continue;
    rank->communicator->on_address(moved.self, address);
    EXPECT_TRUE(rank->communicator->connect(moved.self, address));
  }
}

TEST_P(FtarRing, ACallToAnAddressThatIsNoMoreIsGivenUpWhenTheNewOneIsTold) {
  Cluster cluster(1, kSizes, over);
  for (int i = 0; i < 3; ++i) cluster.add();
  cluster.enter(Epoch(1), cluster.ring_members());
  cluster.start(Step(1));
  ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); }));
  Rank& moved = *cluster.ranks[0];
  const auto before = moved.address, now = cluster.fabric.move(*moved.on_fabric);
  cluster.fabric.cut(*moved.on_fabric);
  ASSERT_TRUE(cluster.until(
      [&] { return std::ranges::all_of(cluster.ranks, [](const auto& rank) { return rank->lost_someone(); }); }));
  call_at(cluster, moved, before);
  cluster.enter(Epoch(2), cluster.ring_members());
  cluster.start(Step(2));
  cluster.pass(500);
  EXPECT_FALSE(cluster.all_done(Step(2))) << "somebody is called at an address that is no more";
  call_at(cluster, moved, now);
  ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(2)); }));
  cluster.expect_result(cluster.live());
}

// The right address, a wrong one, and the right one again, each at any moment of the call before.
TEST_P(FtarRing, CallsThatCrossAsAddressesAreToldLeaveOneConnection) {
  for (std::uint64_t seed = 1; seed <= seeds(60); ++seed) {
    SCOPED_TRACE(seed);
    Cluster cluster(seed, kSizes, over);
    for (int i = 0; i < 3; ++i) cluster.add();
    Rank& moved = *cluster.ranks[0];
    const auto wrong = cluster.fabric.move(*moved.on_fabric), right = cluster.fabric.move(*moved.on_fabric);
    for (const auto& address : {right, wrong, right}) {
      call_at(cluster, moved, address);
      cluster.pass(cluster.random() % 24);
    }
    cluster.enter(Epoch(1), cluster.ring_members());
    cluster.start(Step(1));
    ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); }));
    cluster.expect_result(cluster.live());
    for (auto& rank : cluster.ranks) EXPECT_EQ(cluster.fabric.held(*rank->on_fabric).endpoints, 2u);
  }
}

TEST_P(FtarRing, AStoppedMemberThatWakesLaterWritesNothingIntoTheNewEpoch) {
  for (std::uint64_t seed = 1; seed <= seeds(30); ++seed) {
    SCOPED_TRACE(seed);
    Cluster cluster(seed, kSizes, over);
    for (int i = 0; i < 4; ++i) cluster.add();
    cluster.enter(Epoch(1), cluster.ring_members());
    cluster.start(Step(1));
    cluster.pass(30 + seed * 7);
    Rank& sleeper = *cluster.ranks[1];
    cluster.fabric.stop(*sleeper.on_fabric);
    sleeper.alive = false;  // for the cluster; its process wakes up again below
    for (auto& rank : cluster.ranks) rank->outcomes.clear();
    cluster.enter(Epoch(2), cluster.ring_members());
    cluster.start(Step(1));
    cluster.pass(20);
    cluster.fabric.resume(*sleeper.on_fabric);
    ASSERT_TRUE(cluster.until([&] {
      sleeper.communicator->poll(cluster.clock.now());
      return cluster.all_done(Step(1));
    }));
    cluster.expect_result(cluster.live());
  }
}

TEST_P(FtarRing, AnEpochMayChangeInMidOperationWithAllMembersAlive) {
  for (std::uint64_t seed = 1; seed <= seeds(40); ++seed) {
    SCOPED_TRACE(seed);
    Cluster cluster(seed, kSizes, over);
    for (int i = 0; i < 3; ++i) cluster.add();
    cluster.enter(Epoch(1), cluster.ring_members());
    std::uint64_t epoch = 1;
    for (int round = 0; round < 5; ++round) {
      cluster.start(Step(1));
      const auto moment = static_cast<int>(cluster.random() % 200);
      cluster.pass(moment);
      // Members learn of the new epoch one after the other, with traffic in between.
      ++epoch;
      for (auto& rank : cluster.ranks) {
        rank->communicator->enter(Epoch(epoch), cluster.ring_members());
        cluster.pass(5);
      }
    }
    for (auto& rank : cluster.ranks) rank->outcomes.clear();
    cluster.start(Step(2));
    ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(2)); }));
    cluster.expect_result(cluster.live());
  }
}

// Found by the simulator: the operations under way went on with pointers to the connection that was gone.
TEST_P(FtarRing, AMemberOfTheRingMayBeForgottenUnderARunningOperation) {
  Cluster cluster(3, {5000, 20}, over);
  for (int i = 0; i < 3; ++i) cluster.add();
  cluster.enter(Epoch(1), cluster.ring_members());
  ASSERT_TRUE(cluster.until([&] {
    return std::all_of(cluster.ranks.begin(), cluster.ranks.end(), [](const auto& rank) {
      return rank->communicator->epoch() == Epoch(1) && !rank->communicator->busy();
    });
  }));
  cluster.start(Step(1));
  for (int i = 0; i < 10; ++i) cluster.pump(), cluster.fabric.step();
  ASSERT_FALSE(cluster.all_done(Step(1)));
  for (auto& rank : cluster.ranks)
    if (rank->self != cluster.ranks[2]->self) rank->communicator->forget(cluster.ranks[2]->self);
  for (int i = 0; i < 40; ++i) {
    for (auto& rank : cluster.ranks) (void)rank->communicator->waits(cluster.clock.now());
    cluster.pump();
    cluster.fabric.step();
  }
  cluster.kill(*cluster.ranks[2]);
  for (auto& rank : cluster.ranks) rank->outcomes.clear();  // the small bucket may have ended in the first epoch
  cluster.enter(Epoch(2), cluster.ring_members());
  cluster.start(Step(1));
  ASSERT_TRUE(cluster.until([&] { return cluster.all_done(Step(1)); }));
  cluster.expect_result(cluster.live());
}

// It has not died: it was silent, and may go on where it was stopped.
TEST_P(FtarRing, WhoIsNotInTheNextRingIsFencedByIt) {
  Cluster cluster(3, {5000, 20}, over);
  for (int i = 0; i < 3; ++i) cluster.add();
  const auto entered = [&](Epoch epoch) {
    return cluster.until([&] {
      return std::all_of(cluster.ranks.begin(), cluster.ranks.begin() + 2, [&](const auto& rank) {
        return rank->communicator->epoch() == epoch && !rank->communicator->busy();
      });
    });
  };
  const Member out = cluster.ranks[2]->self;
  cluster.enter(Epoch(1), cluster.ring_members());
  ASSERT_TRUE(entered(Epoch(1)));
  auto ring_members = cluster.ring_members();
  std::erase_if(ring_members, [&](const RingMember& one) { return one.member == out; });
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(cluster.ranks[i]->communicator->connected(out));
    cluster.ranks[i]->communicator->enter(Epoch(2), ring_members);
    EXPECT_FALSE(cluster.ranks[i]->communicator->connected(out));
  }
  ASSERT_TRUE(entered(Epoch(2)));
}

// What the middle one of three sends to its left neighbour is lost from some moment on. That one has to be named, and
// not the right one, which has all that it needs: who is waited for and waits for nobody is put out.
TEST(FtarPlans, WhoHasAllButItsOwnWritesNamesTheNeighbourThatTheyGoTo) {
  using namespace std::chrono_literals;
  int decided = 0;
  for (int events = 40; events < 400; ++events) {
    Cluster cluster(3, {6000});
    cluster.options.direct_bytes = 0;
    for (int i = 0; i < 3; ++i) cluster.add();
    cluster.enter(Epoch(1), cluster.ring_members());
    ASSERT_TRUE(cluster.until([&] { return !cluster.ranks[0]->communicator->busy(); }));
    cluster.start(Step(1));
    for (int i = 0; i < events; ++i) cluster.pump(), (void)cluster.fabric.step();
    auto &left = *cluster.ranks[0], &middle = *cluster.ranks[1], &right = *cluster.ranks[2];
    cluster.fabric.block(*middle.on_fabric, *left.on_fabric, cluster.clock.now() + 1h);
    const auto until = cluster.clock.now() + 50ms;
    while (cluster.fabric.next_event() < until && cluster.fabric.step()) cluster.pump();
    const auto waits = middle.communicator->waits(cluster.clock.now());
    if (right.done(Step(1)) == 0 || waits.empty()) continue;
    ++decided;
    ASSERT_TRUE(waits[0].on);
    EXPECT_EQ(waits[0].on->replica, left.self.replica) << waits[0].what << ", after " << events << " events";
  }
  EXPECT_GT(decided, 0);
}

// Nothing comes in meanwhile, but what it sent over a slow link lands, one write after the other.
TEST(FtarPlans, WhoseWritesEndOneByOneMakesProgress) {
  using namespace std::chrono_literals;
  Cluster cluster(4, {6000});
  cluster.options.direct_bytes = 0;
  for (int i = 0; i < 3; ++i) cluster.add();
  cluster.enter(Epoch(1), cluster.ring_members());
  ASSERT_TRUE(cluster.until([&] { return !cluster.ranks[0]->communicator->busy(); }));
  const Communicator& first = *cluster.ranks[0]->communicator;
  cluster.start(Step(1));
  ASSERT_TRUE(cluster.until([&] { return cluster.ranks[1]->communicator->stats().peers[0].chunks_received > 0; }));
  cluster.fabric.slow(*cluster.ranks[0]->on_fabric, 100ms, 0ms, cluster.clock.now() + 1h);
  const std::uint64_t sent = first.stats().chunk_bytes_sent;
  ASSERT_TRUE(cluster.until([&] { return first.stats().chunk_bytes_sent >= sent + 3 * cluster.options.chunk_bytes; }));
  cluster.enter(Epoch(2), cluster.ring_members());
  const TimePoint begun = cluster.clock.now();
  std::string before;
  const auto one_has_ended = [&] {
    const std::string what = first.waits(cluster.clock.now()).at(0).what;
    return std::exchange(before, what) != what && cluster.clock.now() - begun > 10ms;
  };
  for (cluster.pump(); !one_has_ended(); cluster.pump()) ASSERT_TRUE(cluster.fabric.step());
  EXPECT_LT(first.waits(cluster.clock.now()).at(0).since, 1ms) << before;
  EXPECT_TRUE(first.waits(cluster.clock.now()).at(0).to_land) << before;
}

// Every now and then, as whoever waits does.
void look(Cluster& cluster, Duration time) {
  using namespace std::chrono_literals;
  for (const TimePoint until = cluster.clock.now() + time; cluster.clock.now() < until; cluster.clock.advance(100ms)) {
    while (cluster.fabric.next_event() <= cluster.clock.now() && cluster.fabric.step()) cluster.pump();
    for (auto& rank : cluster.ranks) rank->communicator->drop_unanswered(1s, cluster.clock.now());
    cluster.pump();
  }
}

// As a firewall does with what was idle. Both ends find it, the one that nothing was sent to as soon as it says more.
TEST(FtarPlans, AConnectionOnWhichNothingIsAcknowledgedIsLostAndTheNextOneCarries) {
  using namespace std::chrono_literals;
  Cluster cluster(7, {6000});
  for (int i = 0; i < 2; ++i) cluster.add();
  cluster.enter(Epoch(1), cluster.ring_members());
  ASSERT_TRUE(cluster.until([&] { return !cluster.ranks[0]->communicator->busy(); }));
  cluster.fabric.forget(*cluster.ranks[0]->on_fabric, 1h);
  look(cluster, 5s);
  for (auto& rank : cluster.ranks) EXPECT_FALSE(rank->lost_someone()) << "nothing is on its way";
  cluster.enter(Epoch(2), cluster.ring_members());
  look(cluster, 900ms);
  for (auto& rank : cluster.ranks) EXPECT_FALSE(rank->lost_someone()) << "it may be slow";
  look(cluster, 500ms);
  for (auto& rank : cluster.ranks) EXPECT_TRUE(rank->lost_someone());
  auto &older = *cluster.ranks[0], &newer = *cluster.ranks[1];
  ASSERT_TRUE(newer.communicator->connect(older.self, older.address));
  cluster.enter(Epoch(3), cluster.ring_members());
  EXPECT_TRUE(cluster.until([&] { return !older.communicator->busy() && !newer.communicator->busy(); }));
}

// Its machine acknowledges what comes.
TEST(FtarPlans, AMemberThatStandsStillLosesNoConnection) {
  using namespace std::chrono_literals;
  Cluster cluster(7, {6000});
  for (int i = 0; i < 2; ++i) cluster.add();
  cluster.enter(Epoch(1), cluster.ring_members());
  ASSERT_TRUE(cluster.until([&] { return !cluster.ranks[0]->communicator->busy(); }));
  cluster.fabric.stop(*cluster.ranks[1]->on_fabric);
  cluster.enter(Epoch(2), cluster.ring_members());
  look(cluster, 5s);
  EXPECT_FALSE(cluster.ranks[0]->lost_someone());
}

TEST(FtarPlans, WaitsNameTheMemberThatIsMissing) {
  Cluster cluster(3, {40000});
  for (int i = 0; i < 3; ++i) cluster.add();
  cluster.enter(Epoch(1), cluster.ring_members());
  cluster.until([&] { return !cluster.ranks[0]->communicator->busy(); });
  for (int i : {0, 1}) EXPECT_TRUE(cluster.ranks[i]->communicator->all_reduce(0, Step(1), ReduceOp::sum));
  while (cluster.fabric.step()) cluster.pump();
  const auto waits = cluster.ranks[1]->communicator->waits(cluster.clock.now() + std::chrono::seconds(1));
  ASSERT_EQ(waits.size(), 1u);
  ASSERT_TRUE(waits[0].on);
  EXPECT_EQ(waits[0].on->replica, ReplicaId(2));
  EXPECT_EQ(waits[0].what, "its start of bucket 0");
}

}  // namespace
}  // namespace rejoin::ftar
