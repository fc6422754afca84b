// A rank's driver and its peers and daemon.
#include <sys/socket.h>

#include <set>

#include "base/unix_socket.h"
#include "local.pb.h"
#include "rejoin/report_queue.h"
#include "rejoin/tests/lone_driver.h"

namespace rejoin {
namespace {

int was_called(transport::Engine& peer) {
  int calls = 0;
  for (const auto& event : peer.poll()) calls += event.kind == transport::EventKind::accepted ? 1 : 0;
  return calls;
}

TEST(Driver, WhoWasStoppedBetweenTwoLooksKnowsItWhenItHearsThatItIsOut) {
  Alone rank;
  rank.register_it();
  rank.now += 5s;
  EXPECT_NE(rank.put_out().find("this process was silent for 5.0 s"), std::string::npos);
}

// A job that is looked at once more: the checkpoint of its last step is the job's state, and no other one is.
TEST(Driver, WhoComesToAFinishedJobWithTheStateOfItsLastStepKnowsIt) {
  const auto brought_last = [](const Position& from) {
    Alone rank({}, {}, 64, kSilence, from);
    rank.register_it();
    proto::ToNode message;
    auto& plan = *message.mutable_plan();
    plan.set_epoch(3);
    plan.set_step(41);
    plan.set_committed(40);
    plan.set_finished(true);
    auto& trained = *plan.add_trained();
    trained.set_begin(0);
    trained.set_end(400);
    rank.driver->on_control_message(message, rank.now);
    EXPECT_TRUE(rank.driver->over() && rank.driver->finished());
    return rank.driver->brought_last();
  };
  EXPECT_TRUE(brought_last({40, {{0, 100}, {100, 400}}, 7}));
  EXPECT_FALSE(brought_last({20, {{0, 200}}, 7}));
  EXPECT_FALSE(brought_last({40, {{0, 399}}, 7})) << "another job's, with as many steps";
  EXPECT_FALSE(brought_last({}));
}

TEST(Driver, WhoWasStoppedAndHasLookedSinceKnowsIt) {
  Alone rank;
  rank.register_it();
  rank.now += 5s;
  rank.driver->notice(rank.now);
  rank.now += 10ms;
  EXPECT_NE(rank.put_out().find("this process was silent for 5.0 s"), std::string::npos);
}

TEST(Driver, WhoWasNotStoppedDoesNotSayThatItWas) {
  Alone rank;
  rank.register_it();
  for (int i = 0; i < 50; ++i) rank.driver->notice(rank.now += 100ms);
  EXPECT_EQ(rank.put_out(), "this replica is out of the job: it was silent; start it again to catch up");
}

// Found by the simulator: its first message had come to two leaders, and nobody reached it by what the first called it.
TEST(Driver, WhomALaterLeaderHasRegisteredAnewStartsAgain) {
  Alone rank;
  rank.register_it();
  const auto hear = [&](std::uint64_t incarnation) {
    proto::ToNode message;
    message.mutable_registered()->set_incarnation(incarnation);
    rank.driver->on_control_message(message, rank.now);
  };
  for (auto former : {1000u, 999u}) hear(former);
  EXPECT_FALSE(rank.driver->failure());
  hear(1001);
  ASSERT_TRUE(rank.driver->failure());
  EXPECT_EQ(rank.driver->failure()->message,
            "this replica is out of the job: another leader has registered it anew; start it again to catch up");
}

TEST(Driver, AMemberKeepsToItsIncarnation) {
  Alone rank;
  rank.register_it();
  rank.plan_with_peers(2);
  proto::ToNode message;
  message.mutable_registered()->set_incarnation(1001);
  rank.driver->on_control_message(message, rank.now);
  EXPECT_FALSE(rank.driver->failure());
}

// The others, who wait for it, hear nothing of that, and it waits for nobody.
TEST(Driver, WhoseWritesFromBeforeAnEpochLandOneByOneSaysSo) {
  constexpr std::size_t kElements = 1 << 16;
  const ftar::Options ring{.chunk_bytes = 4 * KiB, .chunks_in_flight = 16, .direct_bytes = 0};
  Alone rank(ring, {}, kElements);
  rank.register_it();
  const auto engine = rank.fabric.make_engine();
  std::vector<float> input(kElements), output(kElements);
  proto::ToNode peers;
  peers.mutable_peers()->add_peers()->set_incarnation(1);
  peers.mutable_peers()->mutable_peers(0)->set_address(engine->listen({})->text);
  const ftar::Member self{ReplicaId(0), Incarnation(1)}, its{ReplicaId(100), Incarnation(1000)};
  const auto peer = *ftar::Communicator::make(*engine, ring, self,
                                              {{DataType::float32, kElements, std::as_writable_bytes(std::span(input)),
                                                std::as_writable_bytes(std::span(output))}},
                                              {});
  std::vector<std::uint64_t> excused;  // milliseconds
  const auto until = [&](const std::function<bool()>& done) {
    for (const Duration begun = rank.now - rank.clock.now(); !done(); rank.now = begun + rank.clock.now()) {
      peer->poll(rank.clock.now());
      rank.driver->notice(rank.now);
      rank.driver->poll(rank.now);
      for (const auto& report : rank.driver->take_reports())
        if (report.accusation().excused()) excused.push_back(report.accusation().waited_ms());
      if (!rank.fabric.step()) rank.clock.advance(1ms);
    }
  };
  const auto enter = [&](std::uint64_t epoch) {
    rank.plan_with_peers(1, epoch);
    peer->enter(Epoch(epoch), {{self}, {its}});
  };
  rank.driver->on_control_message(peers, rank.now);
  until([&] { return peer->connected(its); });
  enter(1);
  until([&] { return peer->clean(); });
  rank.driver->take(1, rank.now);
  rank.driver->want({true}, rank.now);
  ASSERT_TRUE(peer->all_reduce(0, Step(1), ReduceOp::mean));
  until([&] { return peer->stats().peers[0].chunks_received > 0; });
  until([&, begun = rank.clock.now(), takes = Duration{}]() mutable {  // each write lands later than the one before
    rank.fabric.slow(*rank.engine, takes += 30ms, 0ms, rank.clock.now() + 1h);
    return rank.clock.now() - begun > 20ms;
  });
  rank.fabric.slow(*rank.engine, 0ms, 0ms, {});
  EXPECT_TRUE(excused.empty());
  enter(2);
  until([&] { return peer->clean(); });
  ASSERT_GT(excused.size(), 1u);
  EXPECT_GE(excused.front(), 250u);
  const auto told = excused.size();
  until([&, begun = rank.clock.now()] { return rank.clock.now() - begun > 1s; });
  EXPECT_EQ(excused.size(), told);
}

TEST(Driver, MemoryThatCanNotBeRegisteredIsSaidBeforeAnybodyKnowsOfTheRank) {
  Alone rank;
  rank.fabric.refuse_memory(*rank.engine, 1);
  const auto prepared = rank.driver->prepare();
  ASSERT_FALSE(prepared);
  EXPECT_EQ(prepared.error().code, ErrorCode::exhausted);
  EXPECT_EQ(rank.fabric.held(*rank.engine).regions, 0u);
}

TEST(Driver, ManyPeersAreCalledAFewAtATimeAndNoneIsForgottenForThoseThatDoNotAnswer) {
  Alone rank;
  rank.register_it();
  const auto peers = rank.hear_of_peers(20);
  std::vector<int> calls(peers.size());
  const auto uncalled = [&] { return std::ranges::count(calls, 0); };
  std::size_t most = 0;
  for (int tick = 0; uncalled() > 0 && tick < 200; ++tick) {
    most = std::max(most, rank.fabric.held(*rank.engine).endpoints);
    rank.pass(kSilence / 16);
    for (std::size_t i = 0; i < peers.size(); ++i) calls[i] += was_called(*peers[i]);
  }
  EXPECT_EQ(uncalled(), 0);
  EXPECT_EQ(most, 4u);
  EXPECT_GT(calls.back(), 0) << "the next older one is called first";
}

// The oldest of all is a neighbour, and as many as may be called at a time do not answer.
TEST(Driver, WhomTheEpochNeedsIsCalledBeforeOthersHaveAnswered) {
  Alone rank(ftar::Options{.direct_bytes = 0});
  rank.register_it();
  const auto peers = rank.hear_of_peers(20);
  rank.plan_with_peers(20);
  while (rank.fabric.step()) {
  }
  EXPECT_TRUE(was_called(*peers.front()));
  EXPECT_TRUE(was_called(*peers.back()));
  EXPECT_EQ(rank.fabric.held(*rank.engine).endpoints, 5u);
}

// A rank that plays its part in the ring.
struct Answering {
  std::unique_ptr<transport::Engine> engine;
  TrainingState state{1 << 20};
  std::unique_ptr<ftar::Communicator> ring;

  Answering(transport::sim::Fabric& fabric, std::uint32_t room, std::uint32_t replica) : engine(fabric.make_engine()) {
    fabric.stand(*engine, room);
    const auto tensor = state.add({.name = "weights", .count = 64});
    EXPECT_TRUE(tensor && state.bucket({*tensor}) && state.allocate() && state.start(0));
    ring = *ftar::Communicator::make(*engine, {}, {ReplicaId(replica), Incarnation(replica + 1)}, state.buckets(), {});
  }
};

// Round trips of 2 µs, and of 2 ms to another room.
struct Measuring : Alone {
  std::vector<std::unique_ptr<Answering>> peers;
  std::vector<membership::RoundTrips> told;  // as they change

  Measuring() : Alone({}, 1ms) { register_it(); }
  void hear_of(std::uint32_t room) {
    const auto replica = static_cast<std::uint32_t>(peers.size());
    peers.push_back(std::make_unique<Answering>(fabric, room, replica));
    proto::ToNode message;
    auto& peer = *message.mutable_peers()->add_peers();
    peer.set_replica(replica);
    peer.set_incarnation(replica + 1);
    peer.set_address(peers.back()->engine->listen({})->text);
    driver->on_control_message(message, now);
  }
  void run(Duration time, Duration tick = kSilence / 16) {
    for (const TimePoint until = now + time; now < until;) {
      pass(tick);
      for (auto& peer : peers) (void)peer->ring->poll(now);
      for (const auto& report : driver->take_reports())
        if (report.has_links())
          if (const membership::RoundTrips trips(report.links().round_trips());
              told.empty() ? !trips.empty() : trips != told.back())
            told.push_back(trips);
    }
  }
  static membership::RoundTrips trips(std::initializer_list<std::pair<std::uint64_t, RoundTripLength>> all) {
    membership::RoundTrips trips;
    for (const auto& [incarnation, length] : all) trips.put(incarnation, length);
    return trips;
  }
};

TEST(Driver, TellsOfRoundTripsWhenItIsConnectedWithAllAndAsAMemberOnceInAWhile) {
  Measuring rank;
  rank.hear_of(0), rank.hear_of(1);
  rank.run(1s);
  const auto of_two = Measuring::trips({{1, kNear}, {2, 11}});
  EXPECT_EQ(rank.told, (std::vector{of_two})) << "at once, and both";
  rank.plan_with_peers(2);
  rank.run(16s);
  EXPECT_EQ(rank.told.size(), 1u);
  rank.hear_of(0);
  rank.run(2s);
  EXPECT_EQ(rank.told.size(), 1u) << "not with each connection";
  rank.run(16s);
  ASSERT_EQ(rank.told.size(), 2u);
  EXPECT_EQ(rank.told.back(), Measuring::trips({{1, kNear}, {2, 11}, {3, kNear}}));
  proto::ToNode gone;
  gone.mutable_peers()->add_gone(2);
  rank.driver->on_control_message(gone, rank.now);
  rank.run(17s);
  EXPECT_EQ(rank.told.back(), Measuring::trips({{1, kNear}, {3, kNear}}));
}

// One that never answers keeps nobody from hearing of the others.
TEST(Driver, TellsOfRoundTripsInAWhileWhereOneDoesNotAnswer) {
  Measuring rank;
  rank.hear_of(0);
  proto::ToNode message;
  auto& deaf = *message.mutable_peers()->add_peers();
  deaf.set_replica(50);
  deaf.set_incarnation(51);
  const auto its = rank.fabric.make_engine();
  deaf.set_address(its->listen({})->text);
  rank.driver->on_control_message(message, rank.now);
  rank.run(2s);
  EXPECT_TRUE(rank.told.empty());
  rank.run(16s);
  EXPECT_EQ(rank.told, (std::vector{Measuring::trips({{1, kNear}})}));
}

// The others' operations go on without it: an epoch would end them, and the fourth one a good replica's part in the
// job.
TEST(Driver, AConnectionThatTheEpochDoesNotNeedIsToldOfAndAccusesNobody) {
  Alone rank(ftar::Options{.direct_bytes = 0});
  rank.register_it();
  const auto peers = rank.hear_of_peers(6);
  rank.plan_with_peers(6);
  std::set<std::uint32_t> lost, waited_for, unreached;
  for (int tick = 0; tick < 80; ++tick) {
    rank.pass(kSilence / 16);
    for (const auto& report : rank.driver->take_reports()) {
      if (report.has_accusation())
        (report.accusation().lost() ? lost : waited_for).insert(report.accusation().suspect());
      for (const auto& one : report.links().unreached()) unreached.insert(one.replica());
    }
  }
  waited_for.erase(100);  // for its trainer, which has not begun
  EXPECT_EQ(lost, (std::set<std::uint32_t>{0, 5}));
  EXPECT_EQ(waited_for, (std::set<std::uint32_t>{0, 5})) << "each that it has no connection with";
  EXPECT_EQ(unreached, (std::set<std::uint32_t>{0, 1, 2, 3, 4, 5}));
}

// Found with a machine whose address changed: nobody called the new one while the call to the old one lasted, and the
// caller was put out for it.
TEST(Driver, APeerThatIsBeingCalledIsCalledAnewWhereItIsToldWithAnotherAddress) {
  Alone rank;
  rank.register_it();
  const auto engine = rank.fabric.make_engine();
  const auto before = engine->listen({})->text, now = rank.fabric.move(*engine).text;
  const auto tell = [&](const std::string& address) {
    proto::ToNode message;
    auto& peer = *message.mutable_peers()->add_peers();
    peer.set_incarnation(1);
    peer.set_address(address);
    rank.driver->on_control_message(message, rank.now);
    rank.pass(1ms);
  };
  const auto calls = [&] { return was_called(*engine); };
  tell(before);
  EXPECT_EQ(calls(), 0);
  tell(now);
  EXPECT_EQ(calls(), 1);
  tell(now);
  EXPECT_EQ(calls(), 0) << "nothing is new";
}

TEST(Driver, ARegistrationWithoutAnIncarnationIsAnErrorThatNamesTheRemedy) {
  Alone rank;
  ASSERT_TRUE(rank.driver->prepare());
  proto::ToNode message;
  message.mutable_registered()->set_job(7);
  for (int i = 0; i < 2; ++i) rank.driver->on_control_message(message, rank.now);
  ASSERT_TRUE(rank.driver->failure());
  EXPECT_NE(rank.driver->failure()->message.find("run a daemon of this release"), std::string::npos);
}

// It stands, or has more to do than it can: its socket stays open, and full.
TEST(Driver, WhatItReportsToADaemonThatDoesNotReadGrowsNoMoreAsTimePasses) {
  Alone rank;
  rank.register_it();
  proto::ToNode peers, plan;
  plan.mutable_plan()->set_epoch(1);
  plan.mutable_plan()->set_step(1);
  for (std::uint32_t replica = 0; replica < 3; ++replica) {
    auto& peer = *peers.mutable_peers()->add_peers();
    peer.set_replica(replica);
    peer.set_incarnation(replica + 1);
  }
  for (std::uint32_t replica : {0, 1, 2, 100}) {
    auto& member = *plan.mutable_plan()->add_members();
    member.set_replica(replica);
    member.set_incarnation(replica == 100 ? 1000 : replica + 1);
  }
  rank.driver->on_control_message(peers, rank.now);
  rank.driver->on_control_message(plan, rank.now);
  ASSERT_TRUE(rank.driver->machine().member());

  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
  const Fd trainer(ends[0]), daemon(ends[1]);
  ReportQueue queue;
  std::size_t made = 0, most = 0;
  const auto go_on = [&] {
    rank.now += kSilence / 16;
    rank.driver->notice(rank.now);
    rank.driver->poll(rank.now);
    for (auto& report : rank.driver->take_reports()) ++made, queue.add(std::move(report));
    queue.add(rank.driver->heartbeat());
    ASSERT_TRUE(queue.send(trainer));
    most = std::max(most, queue.size());
  };
  for (int tick = 0; tick < 10'000 && queue.size() == 0; ++tick) go_on();
  ASSERT_GT(queue.size(), 0u) << "the socket takes all of it";
  const std::size_t before = made;
  for (int tick = 0; tick < 2'000; ++tick) go_on();
  EXPECT_GT(made, before + 1'000) << "it goes on accusing whom it waits for";
  EXPECT_LE(most, 1 + 1 + 3 * 4u) << "a heartbeat, Links, and of each kind one accusation of each member";

  // It reads again: what it hears of each is the newest.
  std::uint64_t waited_ms = 0;
  for (bool more = true; more;) {
    auto received = receive_with_fds(daemon, 512 * KiB);
    ASSERT_TRUE(received);
    more = received->has_value();
    proto::FromTrainer message;
    if (more)
      ASSERT_TRUE(message.ParseFromArray((*received)->bytes.data(), static_cast<int>((*received)->bytes.size())));
    if (message.report().has_accusation()) waited_ms = message.report().accusation().waited_ms();
    ASSERT_TRUE(queue.send(trainer));
  }
  EXPECT_EQ(queue.size(), 0u);
  EXPECT_GE(waited_ms + 1'000, static_cast<std::uint64_t>(milliseconds(2'000 * kSilence / 16)));
}

}  // namespace
}  // namespace rejoin
