// Rings in which not all members are connected with each other: whom each one needs, what is closed, and when.
#include <set>

#include "base/ring_links.h"
#include "base/sanitized.h"
#include "ftar/schedule.h"
#include "ftar/tests/ring_cluster.h"

namespace rejoin::ftar {
namespace {

using Pair = std::pair<std::uint32_t, std::uint32_t>;

// Who sends anything to whom in a ring of this shape, whatever its buckets.
std::set<Pair> needs_of(std::uint32_t contributors, std::uint32_t members) {
  std::set<Pair> needs;
  const auto add = [&](std::uint32_t one, std::uint32_t other) {
    if (one != other) needs.insert(std::minmax(one, other));
  };
  for (std::uint32_t p = 0; p < members; ++p) {
    add(p, (p + 1) % members);
    if (p < contributors) add(p, (p + 1) % contributors);
    const Doubling rounds(contributors, members, p);
    for (std::uint32_t place = 0; place <= rounds.result(); ++place)
      if (const auto from = rounds.sender(place)) add(p, *from);
    for (auto to : rounds.beyond()) add(p, to);
  }
  return needs;
}

// The pairs that need each other when these are lost, and are not linked before that.
std::vector<Pair> missing(const LinkRule& rule, std::uint32_t contributors, std::uint32_t members,
                          const std::set<std::uint32_t>& lost) {
  std::vector<std::uint32_t> left;
  std::uint32_t contribute = 0;
  for (std::uint32_t p = 0; p < members; ++p)
    if (!lost.contains(p)) left.push_back(p), contribute += p < contributors ? 1 : 0;
  std::vector<Pair> all;
  if (contribute == 0) return all;
  for (const auto& [one, other] : needs_of(contribute, static_cast<std::uint32_t>(left.size())))
    if (!linked(rule, left[one], left[other], contributors, members)) all.emplace_back(left[one], left[other]);
  return all;
}

TEST(RingLinks, SurvivorsOfAsManyLossesAsThereAreSparesNeedNoNewOne) {
  for (std::uint32_t spares = 0; spares <= 2; ++spares)
    for (std::uint32_t members = 1; members <= 18; ++members)
      for (std::uint32_t contributors = 1; contributors <= members; ++contributors) {
        const LinkRule rule{.full_mesh_members = 0, .spares = spares};
        for (std::uint32_t a = 0; a < members; ++a)
          for (std::uint32_t b = a; b < members; ++b) {
            std::set<std::uint32_t> lost;
            if (spares > 0) lost.insert(a);
            if (spares > 1) lost.insert(b);
            const auto lacking = missing(rule, contributors, members, lost);
            ASSERT_TRUE(lacking.empty()) << lacking[0].first << " and " << lacking[0].second << " of " << members
                                         << ", " << contributors << " of them contribute, without " << a << " and "
                                         << b;
          }
      }
}

TEST(RingLinks, SurvivorsOfALargeRingNeedNoNewOneButForOneLossMore) {
  std::mt19937_64 random(7);
  const LinkRule rule{.full_mesh_members = 64};
  std::size_t beyond = 0;
  for (int i = 0; i < 60; ++i) {
    const auto members = static_cast<std::uint32_t>(i % 2 == 0 ? kMaxMembers : 67 + random() % 900);
    const auto contributors = static_cast<std::uint32_t>(i % 3 == 0 ? members : 1 + random() % members);
    std::set<std::uint32_t> lost;
    for (std::uint32_t n = 0; n < rule.spares; ++n) lost.insert(static_cast<std::uint32_t>(random() % members));
    EXPECT_TRUE(missing(rule, contributors, members, lost).empty());
    for (std::uint32_t n = 0; n < 4; ++n) lost.insert(static_cast<std::uint32_t>(random() % members));
    beyond += missing(rule, contributors, members, lost).size();
  }
  EXPECT_GT(beyond, 0u) << "this test finds none that is missing";
}

TEST(RingLinks, TheyAreFewAndTheSameSeenFromBoth) {
  for (std::uint32_t spares = 0; spares <= 3; ++spares)
    for (std::uint32_t members : {1u, 2u, 3u, 9u, 40u, 333u, 1024u}) {
      const LinkRule rule{.full_mesh_members = 0, .spares = spares};
      const std::uint32_t contributors = members - members / 3;
      const std::size_t bits = static_cast<std::size_t>(std::bit_width(members - 1));
      for (std::uint32_t p = 0; p < members; p += 1 + members / 50) {
        std::vector<std::uint32_t> all;
        for (std::uint32_t other = 0; other < members; ++other) {
          if (linked(rule, p, other, contributors, members)) all.push_back(other);
          ASSERT_EQ(linked(rule, p, other, contributors, members), linked(rule, other, p, contributors, members));
        }
        ASSERT_EQ(links_of(rule, p, contributors, members), all);
        ASSERT_LE(all.size(), 2 * (spares + 1) * (bits + 1) + 3 * (spares + 1));
      }
    }
  std::size_t sum = 0, most = 0;
  for (std::uint32_t p = 0; p < 1024; ++p) {
    const std::size_t its = links_of({.full_mesh_members = 64}, p, 1024, 1024).size();
    sum += its, most = std::max(most, its);
  }
  EXPECT_EQ(most, 50u);
  EXPECT_EQ(sum / 1024, 31u);
}

TEST(RingLinks, TheLossOfAMemberChangesFewLinksOfTheOthers) {
  const LinkRule rule{.full_mesh_members = 64};
  for (std::uint32_t lost : {0u, 300u, 1023u}) {
    std::size_t sum = 0, most = 0;
    for (std::uint32_t p = 0; p < 1023; ++p) {
      const auto before = [&](std::uint32_t position) { return position < lost ? position : position + 1; };
      std::size_t fresh = 0;
      for (auto other : links_of(rule, p, 1023, 1023))
        fresh += linked(rule, before(p), before(other), 1024, 1024) ? 0 : 1;
      sum += fresh, most = std::max(most, fresh);
    }
    EXPECT_LT(sum, 3 * 1023u) << "without " << lost;
    EXPECT_LE(most, 22u);
  }
}

TEST(RingLinks, OfASmallRingAllAreLinkedAndOfAJobWithoutALimitAlways) {
  EXPECT_EQ(links_of({.full_mesh_members = 64}, 5, 66, 66).size(), 65u);
  EXPECT_LT(links_of({.full_mesh_members = 64}, 5, 67, 67).size(), 66u);
  EXPECT_EQ(links_of({}, 5, 1000, 1024).size(), 1023u);
}

// What a driver does, with the communicators of a cluster.
struct Linked : Cluster {
  Linked(std::uint64_t seed, std::vector<std::size_t> elements, std::uint32_t spares)
      : Cluster(seed, std::move(elements)) {
    group.links = {.full_mesh_members = 0, .spares = spares};
  }
  void reach() {
    for (auto& rank : ranks)
      if (rank->alive)
        for (const auto& member : rank->communicator->links())
          if (member.incarnation < rank->self.incarnation && !rank->communicator->knows(member))
            EXPECT_TRUE(rank->communicator->connect(member, ranks[member.replica.value]->address));
  }
  bool reached(const std::function<bool()>& done) {
    return until([&] {
      reach();
      return done();
    });
  }
  bool settled() const {
    return std::ranges::all_of(ranks, [](const auto& rank) {
      if (!rank->alive) return true;
      const auto links = rank->communicator->links();
      return !rank->communicator->busy() && rank->communicator->peers().size() == links.size() &&
             std::ranges::all_of(links, [&](const Member& one) { return rank->communicator->connected(one); });
    });
  }
  bool somebody_was_lost() const {
    return std::ranges::any_of(ranks, [](const auto& rank) { return rank->lost_someone(); });
  }
};

TEST(RingLinks, WhatIsSurplusIsClosedByBothAndNobodyTakesThatForAFailure) {
  Linked cluster(1, {4096, 4}, 1);
  for (int i = 0; i < 24; ++i) cluster.add();  // each with all
  cluster.enter(Epoch(1), cluster.ring_members());
  cluster.start(Step(1));
  EXPECT_TRUE(cluster.reached([&] { return cluster.settled() && cluster.all_done(Step(1)); }));
  cluster.expect_result(cluster.live());
  EXPECT_FALSE(cluster.somebody_was_lost());
  for (auto& rank : cluster.ranks) EXPECT_LT(rank->communicator->peers().size(), 14u);
}

TEST(RingLinks, TheLossOfAMemberNeedsNoNewConnectionAndOfMoreIsMendedByNewOnes) {
  Linked cluster(2, {4096, 4}, 1);
  for (int i = 0; i < 40; ++i) cluster.add();
  cluster.enter(Epoch(1), cluster.ring_members());
  ASSERT_TRUE(cluster.reached([&] { return cluster.settled(); }));
  cluster.kill(*cluster.ranks[11]);
  cluster.enter(Epoch(2), cluster.ring_members());
  cluster.start(Step(2));
  EXPECT_TRUE(cluster.until([&] { return cluster.all_done(Step(2)); })) << "without any connection made";
  cluster.expect_result(cluster.live());
  for (std::size_t i : {3, 4, 8, 20, 21}) cluster.kill(*cluster.ranks[i]);
  cluster.enter(Epoch(3), cluster.ring_members());
  cluster.start(Step(3));
  EXPECT_FALSE(cluster.until([&] { return cluster.all_done(Step(3)); })) << "nobody has made those that it takes";
  EXPECT_TRUE(cluster.reached([&] { return cluster.settled() && cluster.all_done(Step(3)); }));
  cluster.expect_result(cluster.live());
}

// Plans may get lost on their way, and each epoch has another order: what one of two finds to be surplus the other one
// may need in an epoch before, or after.
TEST(RingLinks, WhoHasMissedEpochsLosesNothingThatItNeeds) {
  for (std::uint64_t seed = 0; seed < (kSanitized ? 12 : 60); ++seed) {
    Linked cluster(seed, seed % 2 == 0 ? std::vector<std::size_t>{3000} : std::vector<std::size_t>{3000, 5},
                   static_cast<std::uint32_t>(seed % 2));
    for (int i = 0; i < 12; ++i) cluster.add();
    cluster.miss_epochs({.one_in = 4, .turns = seed % 3 == 0 ? 4000u : 600u, .before_each = [&] { cluster.reach(); }});
    ASSERT_TRUE(cluster.reached([&] { return cluster.settled() && cluster.all_done(Step(1)); })) << "seed " << seed;
    cluster.expect_result(cluster.live());
    EXPECT_FALSE(cluster.somebody_was_lost());
    ASSERT_FALSE(testing::Test::HasFailure()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace rejoin::ftar
