// Who is near whom by round trips: as a function, and what becomes of it on its way to the coordinator.
#include "membership/round_trips.h"

#include <gtest/gtest.h>

#include <chrono>
#include <ctime>
#include <iostream>
#include <random>
#include <set>

#include "base/ring_links.h"
#include "membership/node.h"
#include "membership/relay.h"

namespace rejoin::membership {
namespace {

using namespace std::chrono_literals;
using Order = std::vector<std::uint32_t>;

TEST(RoundTrip, IsAsLongAsThePowerOfTwoAboveItAndShortOnesAreAllAlike) {
  EXPECT_EQ(length_of(-1us), kNear);
  EXPECT_EQ(length_of(0us), kNear);
  EXPECT_EQ(length_of(127us), kNear);
  EXPECT_EQ(length_of(128us), 8);
  EXPECT_EQ(length_of(1023us), 10);
  EXPECT_EQ(length_of(1024us), 11);
  EXPECT_EQ(length_of(24h), kLongestRoundTrip);
  EXPECT_EQ(us_of(length_of(1000us)), 1024u);
  for (const auto us : {1, 100, 200, 999, 50'000})
    EXPECT_TRUE(much_longer(length_of(std::chrono::microseconds(4 * std::max(us, 64))),
                            length_of(std::chrono::microseconds(us))))
        << us;
  EXPECT_FALSE(much_longer(length_of(255us), length_of(1us))) << "half of what makes a difference";
}

RoundTrips told(std::initializer_list<std::pair<std::uint64_t, RoundTripLength>> all) {
  RoundTrips trips;
  for (const auto& [incarnation, length] : all) trips.put(incarnation, length);
  return trips;
}

RoundTrips over_the_wire(const RoundTrips& trips) {
  proto::ReplicaStatus message;
  trips.to(message.mutable_round_trips());
  return RoundTrips(message.round_trips());
}

TEST(RoundTrips, OfEachPeerTheLastOneCountsAndOfSeveralRanksTheLongest) {
  auto trips = told({{5, 9}, {6, 7}, {7, 7}, {5, 7}});
  EXPECT_EQ(trips, told({{5, 7}, {6, 7}, {7, 7}}));
  EXPECT_EQ(trips.by_length().size(), 1u);
  trips.keep_longer(told({{5, 12}, {7, 7}, {8, 8}}));
  EXPECT_EQ(trips, told({{5, 12}, {6, 7}, {7, 7}, {8, 8}}));
  EXPECT_EQ(trips.size(), 4u);
  auto other = told({{5, 12}, {7, 7}, {8, 8}});
  other.keep_longer(told({{5, 7}, {6, 7}, {7, 7}}));
  EXPECT_EQ(other, trips);
  EXPECT_EQ(over_the_wire(trips), trips);
}

TEST(RoundTrips, OfWhatMakesNoSenseNothingIsTaken) {
  proto::ReplicaStatus message;
  auto& endless = *message.add_round_trips();
  endless.set_length(9);
  endless.add_incarnations()->set_end(~std::uint64_t{0});
  EXPECT_TRUE(RoundTrips(message.round_trips()).empty()) << "nobody has so many connections";
  endless.mutable_incarnations(0)->set_end(3);
  EXPECT_EQ(RoundTrips(message.round_trips()), told({{0, 9}, {1, 9}, {2, 9}}));
  endless.set_length(200);
  EXPECT_TRUE(RoundTrips(message.round_trips()).empty());
  endless.set_length(3);
  EXPECT_TRUE(RoundTrips(message.round_trips()).empty());
}

// Of a thousand connections each tells of some, the same at both ends; and they are few bytes.
TEST(RoundTrips, WhoHasManyConnectionsTellsOfSomeAndTheirOtherEndsTellOfTheSame) {
  constexpr std::uint64_t members = 1024;
  for (std::uint64_t one = 1; one <= members; one += 37) {
    RoundTrips trips;
    for (std::uint64_t other = 1; other <= members; ++other) {
      if (other == one || !is_told(one, other, members - 1)) continue;
      EXPECT_TRUE(is_told(other, one, members - 1));
      EXPECT_TRUE(is_told(one, other, members / 2)) << "who has fewer connections tells of these, too";
      trips.put(other, static_cast<RoundTripLength>(kNear + other % 4 * 2));
    }
    EXPECT_GT(trips.size(), 30u);
    EXPECT_LE(trips.size(), kMostMeasured);
    EXPECT_EQ(over_the_wire(trips), trips);
    proto::ReplicaStatus message;
    trips.to(message.mutable_round_trips());
    EXPECT_LE(message.ByteSizeLong(), 10 * trips.size()) << "bytes";
  }
  EXPECT_TRUE(is_told(1, 2, kMostMeasured));
}

// Members in rooms, with a way between all of them, or between some.
struct Rooms {
  std::mt19937_64 random;
  Order room;
  std::uint64_t pick(std::uint64_t most) { return std::uniform_int_distribution<std::uint64_t>(0, most - 1)(random); }
  explicit Rooms(std::uint64_t seed, std::size_t members, std::uint64_t rooms) : random(seed) {
    for (std::size_t i = 0; i < members; ++i) room.push_back(static_cast<std::uint32_t>(pick(rooms)));
  }
  // `near` and `far` with noise of so many lengths above.
  std::vector<Way> ways(RoundTripLength near, RoundTripLength far, std::uint64_t noise) {
    std::vector<Way> all;
    for (std::uint32_t one = 0; one < room.size(); ++one)
      for (std::uint32_t other = one + 1; other < room.size(); ++other)
        all.push_back(
            {one, other, static_cast<RoundTripLength>((room[one] == room[other] ? near : far) + pick(noise + 1))});
    return all;
  }
  std::uint64_t crossed(const Order& order) const {
    std::uint64_t count = 0;
    for (std::size_t i = 0; i < order.size(); ++i) count += room[order[i]] != room[order[(i + 1) % order.size()]];
    return count;
  }
  std::uint64_t least() const {
    const std::set<std::uint32_t> different(room.begin(), room.end());
    return different.size() < 2 ? 0 : different.size();
  }
};

TEST(Neighbourhoods, OfRoomsAreCrossedAsFewTimesAsThereCanBeWhoeverIsInWhich) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    Rooms rooms(seed, 2 + seed % 19, 4);
    const auto ways = rooms.ways(kNear, 11, 1);
    const auto order = together(rooms.room.size(), neighbourhoods(rooms.room.size(), ways));
    ASSERT_EQ(rooms.crossed(order), rooms.least()) << "seed " << seed;
    auto backwards = ways;
    std::ranges::reverse(backwards);
    ASSERT_EQ(together(rooms.room.size(), neighbourhoods(rooms.room.size(), backwards)), order);
  }
}

// As in a job of the largest size: each is connected with some thirty of the others, wherever these are.
TEST(Neighbourhoods, AreFoundWhereAFewOfTheWaysAreMeasured) {
  constexpr std::uint32_t members = 1024;
  Rooms rooms(1, members, 4);
  std::vector<RoundTrips> trips(members);
  std::vector<Measured> measured;
  std::size_t bytes = 0;
  for (std::uint32_t one = 0; one < members; ++one) {
    for (auto other : links_of({.full_mesh_members = 64}, one, members, members))
      trips[one].put(1000 + other, static_cast<RoundTripLength>(rooms.room[one] == rooms.room[other] ? kNear : 11));
    proto::ReplicaStatus message;
    trips[one].to(message.mutable_round_trips());
    bytes += message.ByteSizeLong();
    measured.push_back({1000 + one, &trips[one]});
  }
  const auto begun = std::clock();
  const auto ways = ways_between(measured);
  const auto order = together(members, neighbourhoods(members, ways));
  const auto ms = static_cast<double>(std::clock() - begun) * 1e3 / CLOCKS_PER_SEC;
  EXPECT_EQ(rooms.crossed(order), 4u);
  EXPECT_TRUE(std::ranges::is_permutation(order, together(members, {})));
  EXPECT_LT(bytes, members * 500);
  std::cout << bytes / members << " bytes of each of " << members << " replicas; " << ways.size() << " ways in " << ms
            << " ms of CPU time\n";
}

TEST(Neighbourhoods, LieInEachOtherWhereThereAreSeveralKindsOfWays) {
  // Two towns of two rooms of two hosts each, numbered so that nobody is beside his neighbour.
  std::vector<Way> ways;
  for (std::uint32_t one = 0; one < 8; ++one)
    for (std::uint32_t other = one + 1; other < 8; ++other) {
      const auto differ = one ^ other;
      ways.push_back({one, other,
                      (differ & 1) != 0   ? RoundTripLength{14}
                      : (differ & 2) != 0 ? RoundTripLength{10}
                                          : kNear});
    }
  const auto found = neighbourhoods(8, ways);
  EXPECT_EQ(found, (Neighbourhoods{{0, 4}, {1, 5}, {2, 6}, {3, 7}, {0, 2, 4, 6}, {1, 3, 5, 7}}));
  EXPECT_EQ(together(8, found), (Order{0, 4, 2, 6, 1, 5, 3, 7}));
  EXPECT_EQ(crossings(together(8, found), found), 12u) << "each is entered once and left once";
}

TEST(Neighbourhoods, ThereAreNoneWhereNothingIsMuchFartherThanAnythingElse) {
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    Rooms rooms(seed, 12, 3);
    EXPECT_TRUE(neighbourhoods(12, rooms.ways(kNear, kNear, 1)).empty()) << "noise alone";
  }
  EXPECT_TRUE(neighbourhoods(4, {}).empty()) << "nothing is measured";
  EXPECT_TRUE(neighbourhoods(3, {{0, 1, 7}, {1, 2, 8}, {0, 2, 9}}).empty()) << "there is a shorter way about";
}

// One whose round trips are all too long stands where it stood, and the others' order is as good.
TEST(Neighbourhoods, WhoeverIsMeasuredWronglyCostsTwoCrossingsAtMost) {
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    Rooms rooms(seed, 12, 3);
    auto ways = rooms.ways(kNear, 12, 1);
    for (auto& way : ways)
      if (way.one == 5 || way.other == 5) way.length = std::max<RoundTripLength>(way.length, 10);
    const auto order = together(12, neighbourhoods(12, ways));
    ASSERT_LE(rooms.crossed(order), rooms.least() + 2) << "seed " << seed;
  }
}

TEST(Neighbourhoods, WhoeverStandsWellStaysAlsoWhenMembersGo) {
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    Rooms rooms(seed, 14, 4);
    const auto order = together(14, neighbourhoods(14, rooms.ways(kNear, 11, 1)));
    Rooms after(seed, 0, 4);
    for (auto member : order)
      if (member % 3 != seed % 3) after.room.push_back(rooms.room[member]);
    const auto size = after.room.size();
    ASSERT_EQ(together(size, neighbourhoods(size, after.ways(kNear, 11, 1))), together(size, {})) << "seed " << seed;
  }
  // From the last to the first is a hop like any other.
  EXPECT_EQ(together(4, {{0, 3}}), (Order{0, 1, 2, 3}));
}

// ---- on the way to the coordinator

struct OnTheWay {
  Node node{"node", 1s, 1};
  Relay relay{"relay", 1s};
  TimePoint now{1s};
  std::vector<proto::ReplicaStatus> from_node, from_relay;

  OnTheWay() {
    (void)relay.on_coordinator_up(now);
    keep(node.on_coordinator_up(now));
  }
  void keep(const Node::Actions& actions) {
    for (const auto& message : actions.to_coordinator) {
      if (message.has_replica_status()) from_node.push_back(message.replica_status());
      keep(relay.on_node_message(NodeId(1), message, now));
    }
  }
  void keep(const Relay::Actions& actions) {
    for (const auto& message : actions.to_coordinator)
      if (message.has_replica_status()) from_relay.push_back(message.replica_status());
  }
  void up(std::uint32_t rank) {
    proto::FromNode message;
    auto& its = *message.mutable_rank_up();
    its.set_rank(rank);
    its.set_instance(rank + 1);
    its.set_incarnation(5);
    its.set_job(7);
    keep(node.on_rank_message(RankConnection(rank + 1), message, now));
  }
  void tell(std::uint32_t rank, const RoundTrips& trips) {
    proto::FromNode message;
    message.mutable_links()->set_rank(rank);
    trips.to(message.mutable_links()->mutable_round_trips());
    keep(node.on_rank_message(RankConnection(rank + 1), message, now));
  }
};

TEST(RoundTrips, OfAReplicasRanksAreToldAsOneAndAgainOnlyWhenTheyChange) {
  OnTheWay way;
  way.up(0), way.up(1);
  way.tell(0, told({{6, 7}, {7, 7}}));
  EXPECT_TRUE(way.from_node.empty()) << "rank 1 has yet to say something";
  way.tell(1, told({{6, 7}, {7, 10}}));
  ASSERT_EQ(way.from_node.size(), 1u);
  EXPECT_EQ(RoundTrips(way.from_node.back().round_trips()), told({{6, 7}, {7, 10}}));
  ASSERT_EQ(way.from_relay.size(), 1u);
  EXPECT_EQ(RoundTrips(way.from_relay.back().round_trips()), told({{6, 7}, {7, 10}}));
  way.tell(0, told({{6, 7}, {7, 9}}));
  EXPECT_EQ(way.from_node.size(), 1u) << "the longer one is the other's";
  way.tell(1, told({{6, 7}, {7, 8}}));
  ASSERT_EQ(way.from_relay.size(), 2u);
  EXPECT_EQ(RoundTrips(way.from_relay.back().round_trips()), told({{6, 7}, {7, 9}}));
}

}  // namespace
}  // namespace rejoin::membership
