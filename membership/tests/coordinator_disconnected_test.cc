// Members that have no connection with each other: which one is put out, whoever is heard first, and in whose words.
#include <algorithm>

#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {
namespace {

struct Said {
  std::uint32_t who = 0, suspect = 0;
  bool unconnected = true, lost = false, found = false, only_waiting = false;
  const char* what = "a connection with it";
  std::uint32_t rank = 0;
  bool older = false;  // it says the first that it waits for, and not whether that is for a connection
};
Said flush(std::uint32_t who, std::uint32_t suspect, std::uint32_t rank = 0) {
  return {.who = who, .suspect = suspect, .unconnected = false, .what = "its flush of epoch 1", .rank = rank};
}
Said older(std::uint32_t who, std::uint32_t suspect) {
  return {.who = who, .suspect = suspect, .unconnected = false, .older = true};
}
Said lost(std::uint32_t who, std::uint32_t suspect, const char* found = nullptr) {
  return {.who = who,
          .suspect = suspect,
          .unconnected = false,
          .lost = true,
          .found = found != nullptr,
          .what = found != nullptr ? found : "the peer is gone: Connection reset by peer"};
}

struct Job : Bench {
  explicit Job(std::uint32_t members) : Bench({}, {.replicas = members}) {
    for (std::uint64_t node = 0; node < members; ++node) nodes.push_back(node);
    all_come(1, 0);
  }
  void say(const Said& said) {
    proto::FromNode message;
    auto& a = *message.mutable_accusation();
    a.set_replica(said.who);
    a.set_rank(said.rank);
    a.set_epoch(coordinator.epoch().value);
    a.set_suspect(said.suspect);
    a.set_what(said.what);
    a.set_unconnected(said.unconnected);
    a.set_lost(said.lost);
    a.set_found(said.found);
    a.set_only_waiting(said.only_waiting);
    a.set_tells_connections(!said.older);
    send(said.who, message);
  }
  // All of it, with or without a tick between each two, until somebody is out; who that is, and why.
  std::pair<std::uint32_t, std::string> out(const std::vector<Said>& all, Duration between = 1ms) {
    for (int i = 0; i < 40 && coordinator.suspended().empty(); ++i) {
      for (const auto& said : all) {
        if (!coordinator.suspended().empty()) break;
        say(said);
        pass(between, nodes);
      }
      pass(1ms, nodes);
    }
    if (coordinator.suspended().size() != 1) return {99, warnings};
    return {coordinator.suspended()[0].replica.value, coordinator.suspended()[0].reason};
  }
  std::vector<std::uint64_t> nodes;
};

// Of a ring in which who is named first, whoever that is, waits for the one that cannot say its flush.
TEST(CoordinatorDisconnected, WhomNobodyHasAConnectionWithIsOutWhoeverIsHeardFirst) {
  for (std::uint32_t cut = 0; cut < 3; ++cut) {
    const std::uint32_t a = cut == 0 ? 1 : 0, b = cut == 2 ? 1 : 2;
    std::vector<Said> all{{cut, a}, {cut, b}, {a, cut}, {b, cut}, flush(a, b, 1), flush(b, a, 1)};
    for (std::size_t first = 0; first < all.size(); ++first) {
      std::rotate(all.begin(), all.begin() + 1, all.end());
      Job job(3);
      const auto [out, why] = job.out(all);
      EXPECT_EQ(out, cut) << why;
      const char* others = cut == 0 ? "1-2" : cut == 1 ? "0, 2" : "0-1";
      EXPECT_EQ(why.find(fmt::format("replicas {} have no connection with it: replica ", others)), 0u) << why;
    }
  }
}

// Before one of them has waited for too long, all have said that they wait.
TEST(CoordinatorDisconnected, WhatIsNotTooLongYetIsCountedWithWhatIs) {
  Job job(3);
  const auto early = [](std::uint32_t who, std::uint32_t suspect) {
    return Said{.who = who, .suspect = suspect, .only_waiting = true};
  };
  const auto [out, why] = job.out({{0, 2}, early(2, 0), early(2, 1), early(1, 2), flush(1, 0)});
  EXPECT_EQ(out, 2u) << why;
}

// Which of the two it is has to be drawn from something; not from a third one that waits for either.
TEST(CoordinatorDisconnected, OfTwoWithoutAConnectionItIsTheSameOneInAnyOrderAndNoThirdOneIsNamed) {
  std::vector<Said> all{{0, 1}, {1, 0}, flush(2, 0), flush(3, 0)};
  for (std::size_t first = 0; first < all.size(); ++first) {
    std::rotate(all.begin(), all.begin() + 1, all.end());
    Job job(4);
    const auto [out, why] = job.out(all);
    EXPECT_EQ(out, 1u) << why;
    EXPECT_EQ(why, "replica 0 waits for a connection with it");
  }
}

// 1 and 3 are cut from 0, 2 and 4; in the ring 3-0-1-2-4 each of 0 and 1 lacks both its neighbours, and 3 one.
TEST(CoordinatorDisconnected, OfTwoThatLackAsManyItIsTheOneThatOthersLackAlone) {
  Job job(5);
  const auto [out, why] = job.out({{3, 0}, {0, 3}, {0, 1}, {1, 0}, {1, 2}, {2, 1}, {4, 3}, {3, 4}}, 0ms);
  EXPECT_EQ(out, 3u) << why;
}

TEST(CoordinatorDisconnected, TheReasonIsInTheWordsOfWhoHasFoundItOut) {
  const char* found = "nothing of what is sent to it has been acknowledged for 1.0 s";
  for (const std::uint32_t finder : {0, 1}) {
    Job job(3);
    const auto [out, why] =
        job.out({lost(0, 1), lost(1, 0), lost(finder, 1 - finder, found), lost(finder, 1 - finder), flush(2, 1)}, 0ms);
    EXPECT_EQ(out, 1u);
    EXPECT_EQ(why, fmt::format("{}: {}", finder == 0 ? "replica 0 lost it" : "it lost replica 0", found));
  }
}

// Its machine may be gone, which its silence tells.
TEST(CoordinatorDisconnected, WhoLacksTwoThatAreNotHeardIsNotJudged) {
  Job job(3);
  job.pass(400ms, {0});
  job.say({0, 1}), job.say({0, 2});
  job.pass(400ms, {0});
  EXPECT_EQ(job.coordinator.members().size(), 3u) << job.warnings;
}

// Both wait with all others for one that hangs, then.
TEST(CoordinatorDisconnected, WhoHasAConnectionAfterAllIsNotOutForIt) {
  Job job(4);
  job.say({0, 1}), job.say({1, 0});
  job.pass(1ms, job.nodes);
  const auto [out, why] = job.out({flush(0, 2), flush(1, 2), flush(3, 2)});
  EXPECT_EQ(out, 2u) << why;
  EXPECT_EQ(why.find("it hangs: "), 0u) << why;
}

TEST(CoordinatorDisconnected, AnotherRankThatLacksAConnectionStillDoes) {
  Job job(4);
  job.say({0, 1}), job.say({.who = 0, .suspect = 1, .rank = 1});
  const auto [out, why] = job.out({flush(0, 2), flush(3, 2)});
  EXPECT_EQ(out, 1u) << why;
}

// Two ranks of replica 0: a relay says once what the second one waits for, whatever becomes of the first one's
// connection.
TEST(CoordinatorDisconnected, WhatAnotherRankWaitsForCountsStillWhereALateConnectionHasCome) {
  for (const bool reduced : {false, true}) {
    Job job(2);
    job.say({0, 1}), job.say(flush(0, 1, 1));
    job.pass(100ms, job.nodes);
    if (reduced) job.reduced_by(0, 0);
    else job.say({.who = 0, .suspect = 1, .unconnected = false, .only_waiting = true});
    job.pass(200ms, job.nodes);
    ASSERT_EQ(job.coordinator.suspended().size(), 1u) << "nobody is judged; reduced " << reduced;
    EXPECT_EQ(job.coordinator.suspended()[0].replica, ReplicaId(1));
  }
}

// The patience that a wait has is not over because another one, which is over, lasted longer.
TEST(CoordinatorDisconnected, WhatIsLeftOfAWaitStandsSinceItWasSaidItself) {
  Job job(2);
  job.say({0, 1});
  job.pass(125ms, job.nodes);
  job.say(flush(0, 1, 1));
  job.pass(62500us, job.nodes);
  job.reduced_by(0, 0);
  job.pass(125ms, job.nodes);
  EXPECT_TRUE(job.coordinator.suspended().empty()) << job.warnings;
  job.pass(125ms, job.nodes);
  EXPECT_EQ(job.coordinator.suspended().size(), 1u);
}

TEST(CoordinatorDisconnected, OfThoseWhoDoNotSayItTheMostAccusedIsOutAsBefore) {
  Job job(3);
  const auto [out, why] = job.out({older(0, 2), older(1, 2), older(2, 0)});
  EXPECT_EQ(out, 2u);
  EXPECT_EQ(why, "replica 1 waits for a connection with it");
}

// Replica 0 is cut off, and of its partners one alone can say so.
TEST(CoordinatorDisconnected, WhereSomeCanNotSayItWhoSaysItIsNotOutForThat) {
  Job three(3), four(4);
  EXPECT_EQ(three.out({older(0, 1), {1, 0}, older(2, 0)}, 0ms).first, 0u);
  const auto [out, why] = four.out({older(0, 1), older(1, 0), older(2, 1), {3, 0}}, 0ms);
  EXPECT_EQ(out, 0u) << "as many accuse 1, and nobody lacks a connection with it: " << why;
}

}  // namespace
}  // namespace rejoin::membership
