// The ring's order by round trips, as the coordinator decides it.
#include "membership/tests/order_bench.h"

namespace rejoin::membership {
namespace {

constexpr RoundTripLength kFar = 11;

// Replicas in rooms, of which nobody tells, with what they measure.
struct Apart : OrderBench {
  std::vector<std::uint32_t> rooms;
  RoundTripLength far = kFar;      // from room to room
  std::set<std::uint32_t> silent;  // they tell no round trips

  explicit Apart(std::vector<std::uint32_t> where, const std::vector<proto::LogRecord>& earlier = {},
                 BenchOptions job = {})
      : OrderBench(std::vector<std::string>(where.size()), earlier, job), rooms(std::move(where)) {}
  void link(std::uint32_t replica, bool catches_up = false) {
    proto::FromNode message;
    auto& status = *message.mutable_replica_status();
    status.set_replica(replica);
    status.set_incarnation(incarnations[replica]);
    status.set_caught_up(catches_up);
    RankSet all;
    all.add(0, config.ranks);
    all.to(status.mutable_ranks());
    Incarnations links;
    RoundTrips trips;
    for (const auto& [other, incarnation] : incarnations) {
      if (other == replica) continue;
      links.insert(incarnation);
      trips.put(incarnation, rooms[other] == rooms[replica] ? kNear : far);
    }
    links.to(status.mutable_links());
    if (!silent.contains(replica)) trips.to(status.mutable_round_trips());
    send(replica, message);
  }
  void link_all() {
    for (std::uint32_t replica = 0; replica < rooms.size(); ++replica) link(replica);
  }
  void come_all() {
    for (std::uint32_t replica = 0; replica < rooms.size(); ++replica) come(replica);
    link_all();
    ASSERT_TRUE(coordinator.started());
  }
  // What replica 0 was told of who will stand where, in turn.
  std::vector<std::string> prospects() const {
    std::vector<std::string> all;
    for (const auto& message : inbox.at(0))
      if (message.has_prospect()) all.push_back(text_of(message.prospect().members()));
    return all;
  }
};

TEST(CoordinatorNearness, MembersStandByWhoIsNearWhomWhereNobodySaysWhereItIsAndThePlanAndTheLogSayIt) {
  Apart job({0, 1, 0, 1});
  job.come_all();
  EXPECT_EQ(job.order(), "0 2 1 3 ");
  EXPECT_EQ(job.planned(), "0 2 1 3 ");
  EXPECT_EQ(job.coordinator.epoch().value, 1u) << "known before the job begins";
  EXPECT_EQ(job.coordinator.neighbourhoods(),
            (std::vector<std::vector<ReplicaId>>{{ReplicaId(0), ReplicaId(2)}, {ReplicaId(1), ReplicaId(3)}}));
  Coordinator again(job.config), from_snapshot(job.config);
  ASSERT_TRUE(again.recover(job.log, job.now));
  ASSERT_TRUE(from_snapshot.recover({job.coordinator.snapshot()}, job.now));
  EXPECT_EQ(Apart::order_of(again), "0 2 1 3 ");
  EXPECT_EQ(Apart::order_of(from_snapshot), "0 2 1 3 ");
  EXPECT_TRUE(again.has_recovered_like(job.coordinator));
}

TEST(CoordinatorNearness, WhoeverComesBackStandsAmongTheNearWhenItContributes) {
  Apart job({0, 1, 0, 1, 0});
  job.come_all();
  EXPECT_EQ(job.order(), "0 2 4 1 3 ");
  job.down(2);
  EXPECT_EQ(job.order(), "0 4 1 3 ");
  job.come(2, 2);
  job.link_all();
  job.step();
  EXPECT_EQ(job.order(), "0 4 1 3 2c ");
  job.link(2, true);
  job.step();
  EXPECT_EQ(job.order(), "0 4 1 3 2 ") << "the last one's next is the first one";
  job.down(1);
  EXPECT_EQ(job.order(), "0 4 3 2 ") << "no one moves for a loss";
}

TEST(CoordinatorNearness, ACoordinatorThatIsStartedAgainKeepsTheOrderUntilItHasHeardAndAfterwards) {
  Apart before({0, 1, 0, 1});
  before.come_all();
  before.step();
  Apart job(before.rooms, before.log);
  job.incarnations = before.incarnations;
  EXPECT_EQ(job.order(), "0 2 1 3 ");
  for (std::uint32_t replica = 0; replica < 4; ++replica) {
    job.come(replica, 1, true);
    job.link(replica);
    EXPECT_EQ(job.order(), "0 2 1 3 ");
  }
  job.down(3);
  EXPECT_EQ(job.order(), "0 2 1 ");
}

TEST(CoordinatorNearness, ChangesNothingWhereNothingIsMuchFarther) {
  Apart job({0, 1, 0, 1});
  job.far = kNear + 1;
  job.come_all();
  EXPECT_EQ(job.order(), "0 1 2 3 ");
  EXPECT_TRUE(job.coordinator.neighbourhoods().empty());
}

// Those of before tell nothing; who is at the other end does.
TEST(CoordinatorNearness, OneOfTwoIsEnoughToTell) {
  Apart job({0, 1, 0, 1});
  job.silent = {0, 1};
  job.come_all();
  EXPECT_EQ(job.order(), "0 2 1 3 ") << "0 and 1 are far from each other, as 2 and 3 tell";
}

TEST(CoordinatorNearness, WhatIsMeasuredLaterCountsFromTheNextEpochAndBeginsNone) {
  Apart job({0, 1, 0, 1, 0});
  job.silent = {0, 1, 2, 3, 4};
  job.come_all();
  job.silent.clear();
  job.link_all();
  job.step();
  job.pass(3s, {0, 1, 2, 3, 4});
  EXPECT_EQ(job.order(), "0 1 2 3 4 ");
  EXPECT_EQ(job.coordinator.epoch().value, 1u);
  job.down(4);
  EXPECT_EQ(job.order(), "0 2 1 3 ");
}

TEST(CoordinatorNearness, LocationsRuleWhereTheyAreToldAndRoundTripsWithinOne) {
  Apart told({0, 1, 0, 1});
  told.places = {"d/a", "d/a", "d/b", "d/b"};
  told.come_all();
  EXPECT_EQ(told.order(), "0 1 2 3 ");
  Apart within({0, 1, 0, 1, 0, 1});
  within.places = {"d/b", "d/a", "d/a", "d/a", "d/a", "d/b"};
  within.come_all();
  EXPECT_EQ(within.order(), "1 3 2 4 0 5 ");
}

TEST(CoordinatorNearness, DecidesNothingWhereThatIsSwitchedOffAndIsKnownAllTheSame) {
  Apart job({0, 1, 0, 1, 0}, {}, {.round_trips = false});
  job.come_all();
  EXPECT_EQ(job.order(), "0 1 2 3 4 ");
  EXPECT_EQ(job.coordinator.neighbourhoods().size(), 2u);
  job.down(4);
  EXPECT_EQ(job.order(), "0 1 2 3 ");
  Apart within({0, 1, 0, 1}, {}, {.round_trips = false});
  for (auto& place : within.places) place = "dc";
  within.come_all();
  EXPECT_EQ(within.order(), "0 1 2 3 ");
}

TEST(CoordinatorNearness, SwitchedOffInAJobThatRunsMovesNobody) {
  Apart before({0, 1, 0, 1});
  before.come_all();
  before.step();
  Apart job(before.rooms, before.log, {.round_trips = false});
  job.incarnations = before.incarnations;
  for (std::uint32_t replica = 0; replica < 4; ++replica) {
    job.come(replica, 1, true);
    job.link(replica);
  }
  job.down(2);
  EXPECT_EQ(job.order(), "0 1 3 ");
  job.come(2, 2);
  job.link_all();
  job.step();
  job.link(2, true);
  job.step();
  EXPECT_EQ(job.order(), "0 1 3 2 ") << "as it has come; near 0 is where the ring closes";
  job.down(0);
  EXPECT_EQ(job.order(), "1 3 2 ");
}

// One does not say where it is, and has not come back: nobody knows whether it will.
TEST(CoordinatorNearness, AsLongAsAMemberHasNotComeBackNobodyMoves) {
  Apart before({0, 0, 0, 0});
  before.come_all();
  before.step();
  Apart job({0, 1, 0, 1}, before.log);
  job.incarnations = before.incarnations;
  for (std::uint32_t replica : {0u, 1u, 2u}) {
    job.come(replica, 1, true);
    job.link(replica);
  }
  EXPECT_EQ(job.order(), "0 1 2 3 ");
}

// Where not all are connected with each other it is known who is near whom when they are connected for the first time.
TEST(CoordinatorNearness, OfALargeJobIsThatOfThePlacesThatWereToldBeforeItStarts) {
  Apart job({0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1}, {}, {.links = {.full_mesh_members = 0, .spares = 1}});
  job.come_all();
  const std::string by_room = "0 2 4 6 8 10 1 3 5 7 9 11 ";
  EXPECT_EQ(job.prospects(), (std::vector<std::string>{"0 1 2 3 4 5 6 7 8 9 10 11 ", by_room}));
  EXPECT_EQ(job.order(), by_room);
  // One of each room is lost, and it is found that 8 is in the other one: who moved would need other connections.
  job.rooms[8] = 1;
  job.link_all();
  job.down(6);
  EXPECT_EQ(job.order(), "0 2 4 8 10 1 3 5 7 9 11 ");
  job.step();
  job.come(6, 2);
  job.link_all();
  job.step();
  EXPECT_EQ(job.order(), "0 2 4 10 8 1 3 5 7 9 11 6c ") << "an admission takes connections anyway";
}

TEST(CoordinatorNearness, OfALargeJobThatTellsOneLocationIsLeftAsItIsByALoss) {
  Apart job({0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1}, {}, {.links = {.full_mesh_members = 0, .spares = 1}});
  for (auto& place : job.places) place = "dc";
  job.come_all();
  EXPECT_EQ(job.order(), "0 2 4 6 8 10 1 3 5 7 9 11 ");
  job.down(6);
  EXPECT_EQ(job.order(), "0 2 4 8 10 1 3 5 7 9 11 ");
}

}  // namespace
}  // namespace rejoin::membership
