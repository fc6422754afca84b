// Whom a node with several addresses follows.
#include "membership/leader_tracker.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>

namespace rejoin::membership {
namespace {

using namespace std::chrono_literals;

proto::ToNode welcomes() {
  proto::ToNode message;
  message.mutable_welcome()->set_oldest(1);
  message.mutable_welcome()->set_newest(16);
  return message;
}

struct OfTwo : testing::Test {
  LeaderTracker tracker{"node", 1s, 2, [](proto::LeaderView&) {}};
  TimePoint now{10s};
  bool warned = false, elsewhere = false, answers = true;
  int asked = 0;                   // the first one, for a sign of life
  std::vector<std::size_t> alone;  // that this was found of, in their order

  void keep(const LeaderTracker::Actions& actions) {
    warned = warned || actions.leaderless;
    elsewhere = elsewhere || actions.elsewhere;
    alone.insert(alone.end(), actions.alone.begin(), actions.alone.end());
    for (const auto& [to, message] : actions.send) {
      if (!message.has_heartbeat()) continue;
      EXPECT_EQ(to, 0u);
      ++asked;
      if (answers) keep(tracker.on_message(to, {}, now));
    }
  }
  void say(std::size_t from, std::uint64_t term, bool leads) {
    proto::ToNode message;
    message.mutable_leads()->set_term(term);
    message.mutable_leads()->set_leads(leads);
    keep(tracker.on_message(from, message, now));
  }
  void pass(Duration time) {
    for (const TimePoint until = now + time; now < until;) {
      now += 50ms;
      keep(tracker.on_tick(now));
    }
  }
};

TEST_F(OfTwo, WhoGreetsAndDoesNotSayWhetherItLeadsDecidesAlone) {
  keep(tracker.on_connected(0, now));
  keep(tracker.on_message(0, welcomes(), now));
  pass(100ms);
  EXPECT_FALSE(tracker.decides_alone(0)) << "it may be about to say so";
  pass(1s);
  EXPECT_TRUE(tracker.decides_alone(0));
  pass(1s);
  EXPECT_TRUE(warned) << "trainers wait";
  EXPECT_EQ(alone, std::vector<std::size_t>{0}) << "it is said once";
  keep(tracker.on_disconnected(0, now));
  EXPECT_FALSE(tracker.decides_alone(0));
}

TEST_F(OfTwo, WhoDecidesAloneIsToldAlsoWhereTheOtherLeadsAndIsNotTakenForSilentNorFindsThisNodeSo) {
  keep(tracker.on_connected(1, now));
  say(1, 3, true);
  keep(tracker.on_connected(0, now));
  keep(tracker.on_message(0, welcomes(), now));
  for (int i = 0; i < 40; ++i) {
    say(1, 3, true);
    now += 250ms;
    const auto ticked = tracker.on_tick(now);
    EXPECT_TRUE(ticked.close.empty());
    keep(ticked);
  }
  EXPECT_EQ(tracker.leader(), 1u);
  EXPECT_EQ(alone, std::vector<std::size_t>{0});
  EXPECT_GE(asked, 39) << "four times a silence";
  keep(tracker.on_disconnected(0, now));
  keep(tracker.on_connected(0, now));  // it was started again, with --store
  keep(tracker.on_message(0, welcomes(), now));
  say(0, 3, false);
  asked = 0;
  pass(1s);
  EXPECT_FALSE(tracker.decides_alone(0));
  EXPECT_EQ(asked, 0);
}

TEST_F(OfTwo, WhoAnswersNothingIsNotKnownToDecideAlone) {
  answers = false;
  keep(tracker.on_connected(0, now));
  keep(tracker.on_message(0, welcomes(), now));
  pass(900ms);
  EXPECT_GE(asked, 2);
  EXPECT_FALSE(tracker.decides_alone(0));
  say(0, 3, false);  // it was stopped before it had said so
  keep(tracker.on_message(0, {}, now));
  pass(1s);
  EXPECT_EQ(alone, std::vector<std::size_t>{});
}

TEST_F(OfTwo, WhoHasAShorterSilenceIsAskedByThat) {
  auto welcome = welcomes();
  welcome.mutable_welcome()->set_silence_ms(400);
  keep(tracker.on_connected(0, now));
  keep(tracker.on_message(0, welcome, now));
  pass(1s);
  EXPECT_GE(asked, 9);
}

TEST_F(OfTwo, WhoSaysThatItDoesNotLeadIsOneOfSeveral) {
  keep(tracker.on_connected(1, now));
  keep(tracker.on_message(1, welcomes(), now));
  say(1, 3, false);
  pass(2s);
  EXPECT_TRUE(elsewhere) << "two names may have been one address when they were looked up";
  EXPECT_FALSE(tracker.decides_alone(1));
  EXPECT_TRUE(warned) << "nobody leads";
}

// A node that is connected with three coordinators, and what it was told: u up, d down.
struct OfSeveral : testing::Test {
  std::uint64_t job_of_ranks = 0;  // that have heard a plan
  LeaderTracker tracker{"node", 1s, 3, [this](proto::LeaderView& view) { view.set_job(job_of_ranks); }};
  TimePoint now{10s};
  std::string story;
  std::vector<std::string> warnings;
  std::map<std::size_t, proto::LeaderView> views;  // by coordinator, the last

  OfSeveral() {
    for (std::size_t i = 0; i < 3; ++i) keep(tracker.on_connected(i, now));
  }
  void keep(const LeaderTracker::Actions& actions) {
    if (actions.down) story += 'd';
    if (actions.up) story += 'u';
    for (const auto& note : actions.notes)
      if (note.warning) warnings.push_back(note.text);
    for (const auto& [to, message] : actions.send)
      if (message.has_leader_view()) views[to] = message.leader_view();
  }
  void say(std::size_t from, std::uint64_t term, std::uint64_t job, bool leads = true) {
    proto::ToNode message;
    auto& its = *message.mutable_leads();
    its.set_term(term);
    its.set_leads(leads);
    its.set_job(job);
    its.set_address(fmt::format("c{}:1", from));
    keep(tracker.on_message(from, message, now));
  }
  void pass(Duration time) {
    for (const TimePoint until = now + time; now < until;) {
      now += 50ms;
      for (std::size_t from = 0; from < 3; ++from) keep(tracker.on_message(from, {}, now));
      keep(tracker.on_tick(now));
    }
  }
};

TEST_F(OfSeveral, OfTwoThatLeadDifferentJobsTheOneOfTheFirstIsFollowedWhateverTheTerms) {
  say(0, 4, 7);
  say(1, 4, 7, false);
  for (std::uint64_t term = 4; term < 10; ++term) say(2, term, 9);
  say(0, 4, 7);
  pass(5s);
  EXPECT_EQ(story, "u");
  EXPECT_EQ(tracker.leader(), 0u);
  EXPECT_EQ(tracker.term(), 4u);
  EXPECT_TRUE(tracker.is_of_another_job(2));
  EXPECT_EQ(views.at(2).job(), 7u);
  EXPECT_EQ(views.at(2).term(), 4u) << "and not that of the other job";
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("the coordinator at c2:1 leads job 0000000000000009, and this node keeps to job "
                             "0000000000000007: it is not followed. Is its --job or --store"),
            std::string::npos)
      << warnings[0];
  say(1, 5, 7);  // it takes over
  EXPECT_EQ(story, "udu");
  EXPECT_EQ(tracker.leader(), 1u);
}

TEST_F(OfSeveral, TheJobOfItsRanksIsFollowedAlsoWhereAnotherOneWasHeardFirst) {
  say(2, 250, 9);
  EXPECT_EQ(tracker.leader(), 2u);
  say(0, 4, 7);
  say(1, 4, 7, false);
  EXPECT_EQ(story, "u");
  job_of_ranks = 7;  // they have come back to this daemon
  pass(200ms);
  EXPECT_EQ(story, "udu");
  EXPECT_EQ(tracker.leader(), 0u);
  EXPECT_EQ(views.at(0).term(), 4u);
  EXPECT_EQ(views.at(0).led_term(), 4u);
  EXPECT_FALSE(views.at(0).lost());
  keep(tracker.on_disconnected(0, now));
  pass(60s);
  EXPECT_EQ(story, "udud") << "for as long as they are there nobody else is followed";
  EXPECT_TRUE(views.at(1).lost());
  say(1, 5, 7);
  EXPECT_EQ(tracker.leader(), 1u);
}

TEST_F(OfSeveral, WithoutRanksAJobThatNobodyLeadsAnyMoreIsGivenUpForOneThatIsLed) {
  say(0, 40, 7);
  say(1, 2, 9);
  say(2, 2, 9, false);
  keep(tracker.on_disconnected(0, now));
  pass(1s);
  EXPECT_EQ(story, "ud") << "another one may be about to take over";
  pass(2s);
  EXPECT_EQ(story, "udu");
  EXPECT_EQ(tracker.leader(), 1u);
  pass(200ms);
  EXPECT_EQ(views.at(2).job(), 9u);
  EXPECT_EQ(views.at(2).term(), 2u);
}

TEST_F(OfSeveral, OneOfTheReleaseBeforeTellsNoJobAndIsFollowedByItsTerm) {
  job_of_ranks = 7;
  say(0, 4, 0);
  pass(200ms);
  say(1, 5, 7);
  EXPECT_EQ(tracker.leader(), 1u);
  say(2, 6, 0);
  EXPECT_EQ(tracker.leader(), 2u);
  say(1, 6, 7, false);
  EXPECT_EQ(story, "ududu");
}

// The term of a standby counts once it is known that it is of this job.
TEST_F(OfSeveral, WhatAStandbyOfAnotherJobHasHeardCountsForNothing) {
  say(2, 250, 9, false);
  say(1, 5, 7, false);
  say(0, 4, 7);
  EXPECT_FALSE(tracker.leader()) << "another one has taken over";
  say(0, 5, 7, false);
  say(1, 5, 7);
  EXPECT_EQ(tracker.leader(), 1u);
  EXPECT_EQ(tracker.term(), 5u);
}

// … nor that of one which is just following another store's leader, and has read nothing yet.
TEST_F(OfSeveral, WhatAStandbyHasHeardThatTellsNoJobCountsForNothing) {
  say(0, 4, 7);
  pass(200ms);
  say(2, 250, 0, false);
  EXPECT_EQ(story, "u");
  EXPECT_EQ(tracker.term(), 4u);
}

TEST_F(OfSeveral, TwoConnectionsWithOneCoordinatorAreOneLeader) {
  for (int i = 0; i < 20; ++i) {
    say(0, 1, 7);
    say(1, 1, 7);
  }
  pass(5s);
  EXPECT_EQ(story, "u");
  EXPECT_TRUE(warnings.empty());
  keep(tracker.on_disconnected(0, now));
  EXPECT_EQ(story, "udu") << "the other one goes on";
  EXPECT_EQ(tracker.leader(), 1u);
}

// A node that knows one name, and is connected with one coordinator of those that it stands for.
struct OfOne : testing::Test {
  LeaderTracker tracker{"node", 1s, 1, [](proto::LeaderView&) {}};
  TimePoint now{10s}, begun = now;
  std::vector<Duration> warned, elsewhere;  // when, since the beginning

  void keep(const LeaderTracker::Actions& actions) {
    if (actions.leaderless) warned.push_back(now - begun);
    if (actions.elsewhere) elsewhere.push_back(now - begun);
  }
  void say(std::uint64_t term, bool leads, const std::string& address) {
    proto::ToNode message;
    message.mutable_leads()->set_term(term);
    message.mutable_leads()->set_leads(leads);
    message.mutable_leads()->set_address(address);
    keep(tracker.on_message(0, message, now));
  }
  void connect() {
    keep(tracker.on_connected(0, now));
    keep(tracker.on_message(0, welcomes(), now));
  }
  void pass(Duration time) {
    for (const TimePoint until = now + time; now < until;) {
      now += 125ms;
      if (tracker.leader()) keep(tracker.on_message(0, {}, now));
      keep(tracker.on_tick(now));
    }
  }
};

TEST_F(OfOne, WhoDoesNotLeadAndKnowsWhoDoesIsLookedPastEverLessOftenAndWarnedOfOnceAMinute) {
  connect();
  say(3, false, "c1:7000");
  ASSERT_EQ(tracker.knows_leader(), 0u);
  EXPECT_EQ(tracker.says(0).address(), "c1:7000");
  pass(122s);
  ASSERT_EQ(warned.size(), 3u);
  EXPECT_EQ(warned[0], 1125ms);
  EXPECT_EQ(warned[1], 1125ms + 60s);
  ASSERT_GT(elsewhere.size(), 3u);
  EXPECT_LE(elsewhere[0], 500ms);
  EXPECT_LE(elsewhere[1], 1s);
  EXPECT_EQ(elsewhere.back() - elsewhere[elsewhere.size() - 2], 4s) << "no more often";
  say(4, false, "c2:7000");
  pass(200ms);
  EXPECT_EQ(warned.size(), 4u) << "there is something new to say";
}

TEST_F(OfOne, AnotherOneOfTheSameNameThatDoesNotLeadEitherIsNoNewBeginning) {
  for (int i = 0; i < 4; ++i) {
    connect();
    say(3, false, "c1:7000");
    pass(375ms);
    keep(tracker.on_disconnected(0, now));
  }
  EXPECT_EQ(warned.size(), 1u);
  EXPECT_EQ(elsewhere.size(), 4u);
  connect();
  say(3, true, "c1:7000");
  pass(30s);
  EXPECT_EQ(tracker.leader(), 0u);
  EXPECT_FALSE(tracker.knows_leader());
  EXPECT_EQ(warned.size(), 1u);
  EXPECT_EQ(elsewhere.size(), 4u);
  keep(tracker.on_disconnected(0, now));
  begun = now;
  pass(2s);
  EXPECT_EQ(warned.size(), 1u) << "who calls it says that it is not there";
  connect();
  say(3, false, "c1:7000");
  pass(200ms);
  EXPECT_EQ(warned.size(), 2u);
}

TEST_F(OfOne, WhoDecidesAloneIsNotLookedPast) {
  for (int i = 0; i < 3; ++i) {
    connect();
    pass(5s);
    keep(tracker.on_disconnected(0, now));
    pass(5s);
  }
  EXPECT_TRUE(warned.empty());
  EXPECT_TRUE(elsewhere.empty());
}

TEST(LeaderTracker, AtOneAddressEachJobIsFollowedThatNoRanksAreAgainst) {
  std::uint64_t job_of_ranks = 0;
  LeaderTracker tracker("node", 1s, 1, [&](proto::LeaderView& view) { view.set_job(job_of_ranks); });
  TimePoint now{10s};
  proto::ToNode message;
  const auto say = [&](std::uint64_t term, std::uint64_t job) {
    message.mutable_leads()->set_term(term);
    message.mutable_leads()->set_leads(true);
    message.mutable_leads()->set_job(job);
    return tracker.on_message(0, message, now);
  };
  EXPECT_TRUE(tracker.on_connected(0, now).up);
  EXPECT_FALSE(say(9, 7).up);
  EXPECT_EQ(tracker.leader(), 0u);
  EXPECT_TRUE(tracker.on_disconnected(0, now).down);
  EXPECT_TRUE(tracker.on_connected(0, now).up);
  EXPECT_FALSE(say(1, 8).down);
  EXPECT_EQ(tracker.leader(), 0u) << "the next job";
  EXPECT_EQ(tracker.term(), 1u);
  job_of_ranks = 8;
  now += 1s;
  (void)tracker.on_tick(now);
  EXPECT_TRUE(say(12, 7).down);
  EXPECT_FALSE(tracker.leader());
}

}  // namespace
}  // namespace rejoin::membership
