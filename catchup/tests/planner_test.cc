#include "catchup/planner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <vector>

namespace rejoin::catchup {
namespace {

TEST(Planner, AllSlicesAreAskedForOnceAndThoseOfALostSourceAgain) {
  Planner planner(10, 3);
  planner.on_source_up(ReplicaId(0));
  planner.on_source_up(ReplicaId(1));
  EXPECT_EQ(planner.next(ReplicaId(0)), (std::vector<std::uint32_t>{0, 1, 2}));
  EXPECT_EQ(planner.next(ReplicaId(1)), (std::vector<std::uint32_t>{3, 4, 5}));
  EXPECT_TRUE(planner.next(ReplicaId(0)).empty());
  EXPECT_TRUE(planner.on_arrived(ReplicaId(0), 1));
  EXPECT_FALSE(planner.on_arrived(ReplicaId(0), 3)) << "not asked of this source";
  planner.on_source_down(ReplicaId(1));
  EXPECT_EQ(planner.refetched(), 0u) << "none of them had arrived";
  std::set<std::uint32_t> rest;
  for (bool more = true; more;) {
    const auto next = planner.next(ReplicaId(0));
    more = !next.empty();
    for (auto slice : next) {
      rest.insert(slice);
      EXPECT_TRUE(planner.on_arrived(ReplicaId(0), slice));
    }
    for (auto slice : {0u, 2u}) planner.on_arrived(ReplicaId(0), slice);
  }
  EXPECT_TRUE(planner.all_arrived());
  planner.on_again(4);
  EXPECT_EQ(planner.refetched(), 1u);
}

TEST(Planner, WhoeverIsUpFirstLeavesTheOthersTheirShare) {
  Planner planner(12, 16);
  planner.on_source_up(ReplicaId(0));
  EXPECT_EQ(planner.next(ReplicaId(0), 3).size(), 4u);
  planner.on_source_up(ReplicaId(1));
  EXPECT_EQ(planner.next(ReplicaId(1), 3).size(), 4u);
  EXPECT_TRUE(planner.next(ReplicaId(0), 3).empty());
  for (const std::uint32_t source : {0u, 1u})
    for (std::uint32_t i = 0; i < 2; ++i) EXPECT_TRUE(planner.on_arrived(ReplicaId(source), 4 * source + i));
  EXPECT_EQ(planner.next(ReplicaId(0), 2).size(), 2u) << "the third one does not come";
  EXPECT_EQ(planner.next(ReplicaId(1), 2).size(), 2u);
  EXPECT_EQ(Planner(1000, 16).next(ReplicaId(0)).size(), 0u);
  Planner alone(3, 16);
  alone.on_source_up(ReplicaId(0));
  for (std::uint32_t arrived = 0; arrived < 3; ++arrived) {  // nobody else ever comes: it has the last one, too
    EXPECT_EQ(alone.next(ReplicaId(0), 5).size(), 1u);
    EXPECT_TRUE(alone.on_arrived(ReplicaId(0), arrived));
  }
  EXPECT_TRUE(alone.all_arrived());
}

TEST(Planner, WhoeverIsOutOfReachIsAskedForNothingAndLeavesNoShare) {
  Planner planner(4, 16);
  planner.on_source_up(ReplicaId(0), 1);
  planner.on_source_up(ReplicaId(1), 3);
  planner.reach_to(1);
  EXPECT_TRUE(planner.next(ReplicaId(1)).empty());
  EXPECT_EQ(planner.next(ReplicaId(0)).size(), 4u);
  planner.on_source_down(ReplicaId(0));
  EXPECT_TRUE(planner.next(ReplicaId(1)).empty());
  planner.reach_to(3);
  EXPECT_EQ(planner.next(ReplicaId(1)).size(), 4u);
  EXPECT_TRUE(planner.on_arrived(ReplicaId(1), 3));
}

// Sources that serve what they are asked for one slice after the other, each in its own time, from its own time on.
struct Served {
  struct Source {
    int period = 1, from = 0;
    std::deque<std::uint32_t> asked{};
    int done_at = 0;
    std::uint32_t delivered = 0;
  };
  std::vector<Source> sources;
  int took = 0;

  Served(std::uint32_t slices, std::vector<Source> all) : sources(std::move(all)) {
    Planner planner(slices, 16);
    for (; !planner.all_arrived() && took < 1'000'000; ++took) {
      planner.on_time(TimePoint(std::chrono::milliseconds(took)));
      for (std::uint32_t i = 0; i < sources.size(); ++i) {
        Source& its = sources[i];
        if (its.from == took) planner.on_source_up(ReplicaId(i));
        if (!its.asked.empty() && took >= its.done_at) {
          EXPECT_TRUE(planner.on_arrived(ReplicaId(i), its.asked.front()));
          its.asked.pop_front();
          ++its.delivered;
          its.done_at = took + its.period;
        }
      }
      for (std::uint32_t i = 0; i < sources.size(); ++i) {
        Source& its = sources[i];
        if (its.asked.empty()) its.done_at = took + its.period;
        for (auto slice : planner.next(ReplicaId(i), sources.size())) its.asked.push_back(slice);
      }
    }
  }
};

TEST(Planner, ASourceOfATenthOfTheSpeedHasATenthOfTheWorkAndIsNotWaitedFor) {
  for (const std::uint32_t slices : {128u, 256u, 1000u, 5000u}) {
    for (const bool slow_first : {false, true}) {
      const Served served(slices, {{.period = slow_first ? 10 : 1}, {.period = slow_first ? 1 : 10}});
      const double ideal = slices / 1.1;
      EXPECT_LT(served.took, 1.15 * ideal) << slices << " slices";
      const double slow = served.sources[slow_first ? 0 : 1].delivered, fast = slices - slow;
      EXPECT_GT(fast, 7 * slow) << slices << " slices";
      EXPECT_LT(fast, 12 * slow) << slices << " slices";
    }
  }
}

TEST(Planner, ASourceThatComesLateHasItsShare) {
  const Served late(2000, {{}, {.from = 1000}});
  EXPECT_LT(late.took, 1550);
  EXPECT_GT(late.sources[1].delivered, 450u);
  const Served later(2000, {{.period = 10}, {}, {.from = 1500}});
  EXPECT_LT(later.took, 1.1 * (1500 + 350 / 2.1));
}

TEST(Planner, NarrowsWhereGradientsPileUpAndWidensAgain) {
  Planner planner(1000, 16);
  planner.on_source_up(ReplicaId(0));
  std::uint32_t next = 0;
  for (std::uint32_t arrived = 0; arrived < 12; ++arrived) {
    next += static_cast<std::uint32_t>(planner.next(ReplicaId(0)).size());
    EXPECT_EQ(next, 4 + 2 * arrived) << "it opens slice by slice";
    EXPECT_TRUE(planner.on_arrived(ReplicaId(0), arrived));
  }
  EXPECT_EQ(planner.next(ReplicaId(0)).size() + planner.under_way(ReplicaId(0)), 2u + 16u);
  for (int i = 0; i < 10; ++i) planner.narrow();
  EXPECT_EQ(planner.window(), 1u);
  for (std::uint32_t slice = 12; slice < 212; ++slice) {
    planner.on_arrived(ReplicaId(0), slice);
    planner.next(ReplicaId(0));
  }
  EXPECT_EQ(planner.window(), 16u);
}

TEST(Planner, WhatCameDamagedIsAskedOfOthersAndWhoSendsNothingElseIsAskedNoMore) {
  const ReplicaId bad(0), other(1);
  using Slices = std::vector<std::uint32_t>;
  const auto spoil = [&](Planner& planner, std::uint32_t slice) {
    EXPECT_TRUE(planner.on_arrived(bad, slice));
    planner.on_again(slice);
    return planner.on_spoilt(bad, slice);
  };
  Planner few(4, 1), many(40, 1);
  for (auto* planner : {&few, &many}) planner->on_source_up(bad), planner->on_source_up(other);
  for (std::uint32_t slice = 0; slice < 4; ++slice) {
    EXPECT_EQ(few.next(bad), Slices{slice});
    EXPECT_FALSE(spoil(few, slice));
  }
  EXPECT_TRUE(few.next(bad).empty()) << "all have come damaged from there";
  EXPECT_EQ(few.next(other), Slices{0});
  EXPECT_TRUE(few.on_arrived(other, 0));
  few.on_sound(other, 0);
  few.on_source_down(other);
  EXPECT_EQ(few.next(bad), Slices{1}) << "there is nobody else";

  for (std::uint32_t slice = 0; slice < 8; ++slice) {
    EXPECT_EQ(many.next(bad), Slices{slice});
    EXPECT_EQ(spoil(many, slice), slice == 7);
  }
  EXPECT_TRUE(many.next(bad).empty());
  EXPECT_EQ(many.next(bad, 0, true), Slices{8}) << "nothing comes from the other one";
  EXPECT_TRUE(many.on_arrived(bad, 8));
  many.on_sound(bad, 8);
  EXPECT_EQ(many.next(bad), Slices{9});
}

TEST(Planner, EachJoinerAsksContributorsForItsOwnTurnAndFellowsForWhatTheyOffer) {
  Planner planner(12, 16);
  const ReplicaId contributor(0), fellow(1);
  planner.set_turn(1, 3);
  planner.on_source_up(contributor);
  planner.on_fellow_up(fellow);
  EXPECT_TRUE(planner.next(fellow).empty()) << "it has offered nothing";
  planner.on_offered(fellow, 3);
  planner.on_offered(fellow, 4);
  planner.on_offered(fellow, 999);  // nonsense
  EXPECT_EQ(planner.next(contributor), (std::vector<std::uint32_t>{1, 7, 10})) << "not the one that is offered";
  EXPECT_EQ(planner.next(fellow), (std::vector<std::uint32_t>{3, 4}));
  planner.on_source_down(fellow);
  EXPECT_EQ(planner.next(contributor), (std::vector<std::uint32_t>{4})) << "its own turn; the rest is others'";
}

TEST(Planner, WhoIsHeldUpTakesOthersTurnsOneByOneAndNoMoreThanOneTurnOfThem) {
  Planner planner(60, 16);
  const ReplicaId contributor(0);
  planner.set_turn(0, 3);
  planner.on_source_up(contributor);
  std::set<std::uint32_t> asked;
  int now = 0;
  const auto go_on = [&](bool idle) {
    planner.on_time(TimePoint(std::chrono::milliseconds(now)));
    for (auto next = planner.next(contributor, 0, idle); !next.empty(); next = planner.next(contributor, 0, idle))
      for (auto slice : next) {
        planner.on_time(TimePoint(std::chrono::milliseconds(++now)));
        EXPECT_TRUE(asked.insert(slice).second);
        EXPECT_TRUE(asked.size() <= 20 || planner.under_way(contributor) == 1 || idle);
        planner.on_arrived(contributor, slice);
      }
  };
  go_on(false);
  EXPECT_EQ(asked.size(), 20u) << "its own";
  now += 10;
  go_on(false);
  EXPECT_EQ(asked.size(), 20u) << "not slower than half";
  now += 100;
  go_on(false);
  EXPECT_EQ(asked.size(), 40u) << "two turns of three";
  EXPECT_TRUE(asked.contains(59)) << "from the end";
  go_on(true);
  EXPECT_TRUE(planner.all_arrived()) << "nobody else sends anything";
}

// However many do not reach each other: their contributors are asked for all of it, and soon as by one alone.
TEST(Planner, WhoHasNoFellowsIsSoonNoLongerHeldUp) {
  constexpr std::uint32_t slices = 6000, of = 6;
  Planner planner(slices, 16);
  const ReplicaId contributor(0), fellow(1);
  planner.set_turn(0, of);
  planner.on_source_up(contributor);
  TimePoint now{};
  const auto go_on = [&](bool idle) {
    std::size_t widest = 0;
    planner.on_time(now += std::chrono::nanoseconds(1));
    for (auto next = planner.next(contributor, 0, idle); !next.empty(); next = planner.next(contributor)) {
      widest = std::max(widest, next.size());
      for (auto slice : next) {
        if (!idle) planner.on_time(now += std::chrono::milliseconds(1));
        planner.on_arrived(contributor, slice);
      }
    }
    return widest;
  };
  go_on(false);
  EXPECT_EQ(planner.arrived(), slices / of);
  for (std::uint32_t all = 1; all < 1000; all = 2 * all + 1) {
    go_on(true);
    EXPECT_EQ(planner.arrived(), slices / of + all) << "twice as many each time";
  }
  EXPECT_GT(go_on(true), 8u) << "many are under way at once";
  // One comes after all, and sends: what is left is others' turns again.
  planner.on_fellow_up(fellow);
  planner.on_offered(fellow, 1);
  ASSERT_EQ(planner.next(fellow), (std::vector<std::uint32_t>{1}));
  planner.on_arrived(fellow, 1);
  const auto before = planner.arrived();
  go_on(true);
  EXPECT_EQ(planner.arrived(), before + 1);
  int idle = 0;
  for (; !planner.all_arrived() && idle < 100; ++idle) go_on(true);
  EXPECT_LT(idle, 14);
}

TEST(Planner, WhatOneJoinerHasIsEverywhereAfterFewHops) {
  for (const std::uint32_t of : {1u, 2u, 6u, 9u, 10u, 100u, 512u}) {
    std::vector<std::uint32_t> hops(of, of);
    std::deque<std::uint32_t> reached{0};
    hops[0] = 0;
    std::vector<std::vector<std::uint32_t>> asked_by(of);
    for (std::uint32_t own = 0; own < of; ++own) {
      const auto fellows = fellows_of(own, of);
      EXPECT_LE(fellows.size(), 9u);
      for (auto fellow : fellows) {
        EXPECT_NE(fellow, own);
        asked_by[fellow].push_back(own);
      }
    }
    for (; !reached.empty(); reached.pop_front())
      for (auto next : asked_by[reached.front()])
        if (hops[next] == of) hops[next] = hops[reached.front()] + 1, reached.push_back(next);
    EXPECT_LE(*std::ranges::max_element(hops), of <= 9 ? 1u : 9u) << of;
  }
}

// Joiners' planners in a model of the network: in a tick each link carries one slice, in each direction, and what does
// not fit into the receiver's waits before it. What has come is proven, and offered in the next tick.
struct Swarm {
  double times = 0;            // as long as one joiner takes
  double by_contributors = 0;  // times all slices
};
// `slow`: so many times slower is joiner 0's link into it, and it is not counted.
Swarm swarm_of(std::uint32_t contributors, std::uint32_t k, std::uint32_t slices, std::uint32_t slow = 1) {
  struct Joiner {
    Planner planner;
    std::vector<std::uint32_t> sources, asked_by;            // numbers; joiners
    std::deque<std::pair<std::uint32_t, std::uint32_t>> in;  // from whom, slice
    std::set<std::uint32_t> in_from;
  };
  std::vector<Joiner> joiners(k, {Planner(slices, 16), {}, {}, {}, {}});
  std::vector<std::map<std::uint32_t, std::deque<std::uint32_t>>> owed(contributors + k);  // by joiner
  for (std::uint32_t own = 0; own < k; ++own) {
    Joiner& joiner = joiners[own];
    joiner.planner.set_turn(own, k);
    for (std::uint32_t i = 0; i < contributors; ++i)
      joiner.sources.push_back(i), joiner.planner.on_source_up(ReplicaId(i));
    for (auto fellow : fellows_of(own, k)) {
      joiners[fellow].asked_by.push_back(own);
      joiner.sources.push_back(contributors + fellow);
      joiner.planner.on_fellow_up(ReplicaId(contributors + fellow));
    }
  }
  std::vector<std::uint32_t> last(contributors + k);  // whom each sent to
  std::uint64_t sent = 0, ticks = 0;
  for (bool all = false; !all && ticks < 10 * slices; ++ticks) {
    for (auto& joiner : joiners) joiner.planner.on_time(TimePoint(std::chrono::microseconds(ticks)));
    for (std::uint32_t own = 0; own < k; ++own)
      for (auto source : joiners[own].sources)
        for (auto slice : joiners[own].planner.next(ReplicaId(source))) owed[source][own].push_back(slice);
    for (std::uint32_t source = 0; source < contributors + k; ++source) {
      auto& queues = owed[source];
      auto next = queues.upper_bound(last[source]);
      for (std::size_t tried = 0; tried < queues.size(); ++tried, ++next) {
        if (next == queues.end()) next = queues.begin();
        Joiner& to = joiners[next->first];
        if (next->second.empty() || !to.in_from.insert(source).second) continue;
        last[source] = next->first;
        to.in.emplace_back(source, next->second.front());
        next->second.pop_front();
        sent += source < contributors;
        break;
      }
    }
    std::vector<std::pair<std::uint32_t, std::uint32_t>> arrived;
    for (std::uint32_t own = 0; own < k; ++own) {
      Joiner& joiner = joiners[own];
      if (joiner.in.empty() || (own == 0 && ticks % slow != 0)) continue;
      const auto [source, slice] = joiner.in.front();
      joiner.in.pop_front();
      joiner.in_from.erase(source);
      EXPECT_TRUE(joiner.planner.on_arrived(ReplicaId(source), slice));
      arrived.emplace_back(own, slice);
    }
    for (const auto& [own, slice] : arrived)
      for (auto fellow : joiners[own].asked_by)
        joiners[fellow].planner.on_offered(ReplicaId(contributors + own), slice);
    all = std::all_of(joiners.begin() + (slow > 1), joiners.end(),
                      [](const auto& one) { return one.planner.all_arrived(); });
  }
  return {static_cast<double>(ticks) / slices, static_cast<double>(sent) / slices};
}

TEST(Planner, FiveHundredAndTwelveJoinersTakeHardlyLongerThanOne) {
  for (const std::uint32_t k : {1u, 2u, 6u, 32u, 512u}) {
    const Swarm swarm = swarm_of(1, k, 1024);
    std::printf("%u joiners: %.2f times as long as one, the contributor sends %.2f times the state\n", k, swarm.times,
                swarm.by_contributors);
    EXPECT_LE(swarm.times, 1.2) << k;
    EXPECT_LE(swarm.by_contributors, 1.2) << k;
  }
}

TEST(Planner, AJoinerOfATenthOfTheSpeedHoldsNobodyUp) {
  for (const std::uint32_t k : {2u, 6u}) {
    const Swarm swarm = swarm_of(2, k, 1024, 10);
    std::printf("%u joiners, one of them slow: the others %.2f times as long, contributors send %.2f times the state\n",
                k, swarm.times, swarm.by_contributors);
    EXPECT_LE(swarm.times, 1.3) << k;
    EXPECT_LE(swarm.by_contributors, 2) << k;
  }
}

}  // namespace
}  // namespace rejoin::catchup
