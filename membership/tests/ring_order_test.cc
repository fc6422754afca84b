// The ring's order by locations: as a function, and as the coordinator decides it.
#include "membership/ring_order.h"

#include <random>
#include <set>

#include "base/location.h"
#include "membership/tests/order_bench.h"

namespace rejoin::membership {
namespace {

Location at(const std::string& text) {
  auto location = Location::parse(text);
  EXPECT_TRUE(location) << location.error().message;
  return location.value_or(Location());
}

std::string refusal(const std::string& text) {
  const auto location = Location::parse(text);
  return location ? "" : location.error().message;
}

TEST(Location, NamesWhatTheMachineIsInAndWhatIsNoLocationIsRefusedWithTheReason) {
  EXPECT_EQ(at("dc1/room-2/rack_3/host.4").text(), "dc1/room-2/rack_3/host.4");
  EXPECT_EQ(at("one").levels(), 1u);
  EXPECT_EQ(name_at("dc1/room2/rack3", 0), "dc1");
  EXPECT_EQ(name_at("dc1/room2/rack3", 2), "rack3");
  EXPECT_EQ(name_at("dc1/room2/rack3", 3), "");
  EXPECT_NE(refusal("dc1//host").find("a name in it is empty"), std::string::npos);
  EXPECT_NE(refusal("/dc1").find("a name in it is empty"), std::string::npos);
  EXPECT_NE(refusal("").find("a name in it is empty"), std::string::npos);
  EXPECT_NE(refusal("dc 1/host").find("'dc 1' has other characters than"), std::string::npos);
  EXPECT_NE(refusal("dc/\n").find("as in dc1/room2/rack3/host4"), std::string::npos);
  EXPECT_NE(refusal("1/2/3/4/5/6/7/8/9").find("it has 9 names, and 8 at most"), std::string::npos);
  EXPECT_NE(refusal("dc/" + std::string(64, 'h')).find("has 64 letters, and 63 are the most"), std::string::npos);
  EXPECT_EQ(refusal("dc/" + std::string(63, 'h')), "");
}

TEST(Location, IsAsFarAwayAsItIsLevelsUpToWhatBothAreIn) {
  const Location here = at("d/r1/k1/h1");
  EXPECT_EQ(here.distance(here), 0u);
  EXPECT_EQ(here.distance(at("d/r1/k1/h2")), 1u);
  EXPECT_EQ(here.distance(at("d/r1/k2/h1")), 2u) << "hosts of two racks may have one name";
  EXPECT_EQ(here.distance(at("d/r2/k1/h1")), 3u);
  EXPECT_EQ(here.distance(at("e/r1/k1/h1")), 4u);
  EXPECT_EQ(here.distance(Location()), 4u) << "not known";
  EXPECT_EQ(at("d/r1").distance(here), 2u) << "it does not say more";
  EXPECT_EQ(here.common(at("d/r1/k2/h1")).text(), "d/r1");
}

// Text that stays.
std::string_view kept(const std::string& text) {
  static std::set<std::string> all;
  return *all.insert(text).first;
}

// Of a closed ring through several of something each is entered once at least.
std::uint32_t least_crossings(const std::vector<Located>& ring, std::uint32_t rank, std::size_t level) {
  std::set<std::vector<std::string_view>> different;
  for (const auto& one : ring) {
    std::vector<std::string_view> names;
    for (std::size_t above = 0; above <= level; ++above) names.push_back(name_at(one.ranks[rank], above));
    different.insert(names);
  }
  return different.size() < 2 ? 0 : static_cast<std::uint32_t>(different.size());
}

struct Random {
  std::mt19937_64 engine;
  std::uint64_t pick(std::uint64_t most) { return std::uniform_int_distribution<std::uint64_t>(0, most - 1)(engine); }
  std::string_view place(std::size_t levels) {
    std::string text = "d" + std::to_string(pick(2));
    for (std::size_t level = 1; level < levels; ++level) text += "/" + std::to_string(pick(3));
    return kept(text);
  }
  std::vector<Located> job(std::size_t replicas, std::size_t ranks) {
    std::vector<Located> all;
    const auto levels = 1 + pick(4);
    for (std::uint32_t r = 0; r < replicas; ++r) {
      all.push_back({ReplicaId(r), {}});
      for (std::size_t rank = 0; rank < ranks; ++rank) all.back().ranks.push_back(place(levels));
    }
    std::shuffle(all.begin(), all.end(), engine);
    return all;
  }
};

std::vector<ReplicaId> numbers(const std::vector<Located>& ring) {
  std::vector<ReplicaId> all;
  for (const auto& one : ring) all.push_back(one.replica);
  return all;
}

TEST(RingOrder, EntersWhateverSeveralAreInOnceAtEachLevelWhereverTheyAre) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    Random random{std::mt19937_64(seed)};
    auto ring = random.job(1 + random.pick(20), 1);
    std::ranges::sort(ring, stands_before);
    for (std::size_t level = 0; level < Location::kMostLevels; ++level)
      ASSERT_EQ(crossings(ring, 0, level), least_crossings(ring, 0, level)) << "seed " << seed << ", level " << level;
  }
}

// Of replicas whose ranks stand alike: rank 1 of whoever is in rack 2 is in rack 12, say.
TEST(RingOrder, IsTheBestForAllRingsWhereRanksStandAlike) {
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    Random random{std::mt19937_64(seed)};
    auto ring = random.job(2 + random.pick(20), 1);
    for (auto& one : ring)
      for (const char* rank : {"a", "b"}) {
        const std::string text(one.ranks.front());
        one.ranks.push_back(kept(text.substr(0, text.rfind('/') + 1) + rank + text.substr(text.rfind('/') + 1)));
      }
    std::ranges::sort(ring, stands_before);
    for (std::uint32_t rank = 0; rank < 3; ++rank)
      for (std::size_t level = 0; level < 4; ++level)
        ASSERT_EQ(crossings(ring, rank, level), least_crossings(ring, rank, level)) << "seed " << seed;
  }
}

TEST(RingOrder, IsAFunctionOfWhoIsWhereAndLeavesTheOthersAsTheyStandWhenMembersGo) {
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    Random random{std::mt19937_64(seed)};
    auto ring = random.job(2 + random.pick(20), 1 + random.pick(3));
    auto again = ring;
    std::ranges::reverse(again);
    std::ranges::sort(ring, stands_before);
    std::ranges::sort(again, stands_before);
    ASSERT_EQ(numbers(ring), numbers(again));
    const auto goes = [&](const Located& one) { return one.replica.value % 3 == seed % 3; };
    std::erase_if(ring, goes);
    std::erase_if(again, goes);
    std::ranges::shuffle(again, random.engine);
    std::ranges::sort(again, stands_before);
    ASSERT_EQ(numbers(ring), numbers(again));
  }
}

struct Spread : OrderBench {
  using OrderBench::OrderBench;
  void come_all() {
    for (std::uint32_t replica = 0; replica < places.size(); ++replica) come(replica);
    link_all();
    ASSERT_TRUE(coordinator.started());
  }
};

TEST(CoordinatorOrder, MembersStandByWhereTheyAreAndThePlanAndTheLogSayIt) {
  Spread job({"d/b/1", "d/a/2", "d/b/2", "d/a/1"});
  job.come_all();
  EXPECT_EQ(job.order(), "3 1 0 2 ");
  EXPECT_EQ(job.planned(), "3 1 0 2 ");
  Coordinator again(job.config), from_snapshot(job.config);
  ASSERT_TRUE(again.recover(job.log, job.now));
  ASSERT_TRUE(from_snapshot.recover({job.coordinator.snapshot()}, job.now));
  EXPECT_EQ(Spread::order_of(again), "3 1 0 2 ");
  EXPECT_EQ(Spread::order_of(from_snapshot), "3 1 0 2 ");
  EXPECT_TRUE(again.has_recovered_like(job.coordinator));
}

TEST(CoordinatorOrder, WhoeverComesBackStandsAtItsPlaceAgainWhenItContributes) {
  Spread job({"d/b", "d/a", "d/b", "d/a"});
  job.come_all();
  EXPECT_EQ(job.order(), "1 3 0 2 ");
  job.down(3);
  EXPECT_EQ(job.order(), "1 0 2 ");
  job.come(3, 2);
  job.link_all();
  job.step();
  EXPECT_EQ(job.order(), "1 0 2 3c ");
  job.caught_up(3);
  job.step();
  EXPECT_EQ(job.order(), "1 3 0 2 ");
  EXPECT_EQ(job.planned(), "1 3 0 2 ");
  Coordinator again(job.config);
  ASSERT_TRUE(again.recover(job.log, job.now));
  EXPECT_TRUE(again.has_recovered_like(job.coordinator));
}

// Until its members have come back the coordinator knows of none where it is.
TEST(CoordinatorOrder, ACoordinatorThatIsStartedAgainKeepsTheOrderWhateverItHasHeard) {
  Spread before({"d/b", "d/a", "d/b", "d/a"});
  before.come_all();
  before.step();
  Spread job(before.places, before.log);
  job.incarnations = before.incarnations;
  EXPECT_EQ(job.order(), "1 3 0 2 ");
  job.come(0, 1, true);
  job.come(1, 1, true);
  job.come(2, 1, true);
  job.pass(1200ms, {0, 1, 2, 3});
  EXPECT_EQ(job.order(), "1 0 2 ") << "3 has not come back";
  EXPECT_EQ(job.coordinator.epoch().value, 2u);
}

TEST(CoordinatorOrder, IsAsEverWhereNobodySaysALocation) {
  Spread job({"", "", "", ""});
  job.come_all();
  job.down(1);
  job.come(1, 2);
  job.link_all();
  job.step();
  job.caught_up(1);
  job.step();
  EXPECT_EQ(job.order(), "0 2 3 1 ");
  EXPECT_TRUE(job.coordinator.alarms().empty());
}

// As a node of a release that knows of no locations does.
TEST(CoordinatorOrder, IsAsEverWhereOneContributorDoesNotSayWhereItIsAndTheStatusNamesIt) {
  Spread job({"d/b", "d/a", "", "d/a"});
  job.come_all();
  EXPECT_EQ(job.order(), "0 1 2 3 ");
  ASSERT_EQ(job.coordinator.alarms().size(), 1u);
  EXPECT_NE(job.coordinator.alarms().front().find("replica 2 does not say"), std::string::npos);
  job.down(2);
  EXPECT_EQ(job.order(), "1 3 0 ");
  EXPECT_TRUE(job.coordinator.alarms().empty());
  job.come(2, 2);
  job.link_all();
  job.step();
  job.caught_up(2);
  job.step();
  EXPECT_EQ(job.order(), "1 3 0 2 ") << "who has an order keeps it";
  job.places[2] = "d/a";
  job.come(2, 2, true);
  EXPECT_EQ(job.order(), "1 3 0 2 ") << "until an epoch begins for something else";
  job.down(0);
  EXPECT_EQ(job.order(), "1 2 3 ");
}

// A trainer of protocol 15 goes by the plan, as it has ever done: it need not know what its order follows.
TEST(CoordinatorOrder, FollowsWhereTrainersOfAnOlderProtocolAreToo) {
  Spread job({"d/b", "d/a", "d/b"});
  for (std::uint32_t replica = 0; replica < 3; ++replica)
    for (std::uint32_t rank = 0; rank < job.config.ranks; ++rank) {
      auto message = Bench::introduction(replica, rank, 1);
      message.mutable_rank_up()->set_speaks(replica == 1 ? 15 : 16);
      message.mutable_rank_up()->set_location(job.places[replica]);
      job.send(replica, message);
    }
  job.link_all();
  EXPECT_EQ(job.coordinator.protocol().version(), 15u);
  EXPECT_EQ(job.order(), "1 0 2 ");
}

TEST(CoordinatorOrder, WhatIsNoLocationCountsAsNoneAndIsSaid) {
  Spread job({"d/b", "d//a", "d/a"});
  job.come_all();
  EXPECT_EQ(job.order(), "0 1 2 ");
  EXPECT_NE(job.warnings.find("replica 1 rank 0 on node n1: 'd//a' is not a location"), std::string::npos)
      << job.warnings;
}

TEST(CoordinatorOrder, RanksAreToldWhereTheirPeersAre) {
  Spread job({"d/b", "", "d/a"});
  job.come_all();
  std::map<std::uint32_t, std::string> told;
  for (const auto& message : job.inbox.at(0))
    for (const auto& peer : message.peers().peers()) told[peer.replica()] = peer.location();
  EXPECT_EQ(told, (std::map<std::uint32_t, std::string>{{0, "d/b"}, {1, ""}, {2, "d/a"}}));
}

// Where not all are connected with each other the places of the start, and those of a joiner, are told before.
TEST(CoordinatorOrder, OfALargeJobIsThatOfThePlacesThatWereToldBeforeIt) {
  std::vector<std::string> places;
  for (std::uint32_t replica = 0; replica < 12; ++replica) places.push_back(replica % 2 == 0 ? "d/b" : "d/a");
  Spread job(places, {}, {.links = {.full_mesh_members = 0, .spares = 1}});
  const auto prospect = [&](std::uint32_t replica) {
    std::string text;
    for (const auto& message : job.inbox.at(replica)) {
      if (!message.has_prospect()) continue;
      text.clear();
      for (const auto& m : message.prospect().members())
        text += fmt::format("{}{} ", m.replica(), m.catching_up() ? "c" : "");
    }
    return text;
  };
  job.come_all();
  EXPECT_EQ(prospect(0), "1 3 5 7 9 11 0 2 4 6 8 10 ");
  EXPECT_EQ(job.order(), prospect(0));
  job.down(5);
  job.down(3);
  job.step();
  for (std::uint32_t replica : {5u, 3u}) job.come(replica, 2);
  job.pass(100ms, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
  EXPECT_EQ(prospect(3), "1 7 9 11 0 2 4 6 8 10 5c 3c ") << "as they have come";
  job.link_all();
  job.step();
  EXPECT_EQ(job.order(), prospect(3));
  job.caught_up(3);
  job.step();
  EXPECT_EQ(job.order(), "1 3 7 9 11 0 2 4 6 8 10 5c ");
}

}  // namespace
}  // namespace rejoin::membership
