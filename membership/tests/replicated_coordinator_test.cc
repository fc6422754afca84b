// One of several coordinators by itself, over a store that answers as it is told; how they behave together is tested in
// sim/.
#include "membership/replicated_coordinator.h"

#include <gtest/gtest.h>

#include "membership/tests/lone_coordinator.h"

namespace rejoin::membership {
namespace {

TEST(ReplicatedCoordinator, WhereNobodyHasLedTheFirstToComeLeads) {
  Alone job;
  job.start();
  job.pass(kQuiet / 8);
  EXPECT_TRUE(job.leads());
  EXPECT_EQ(job.log.size(), 1u);
  proto::LogEntry first;
  ASSERT_TRUE(first.ParseFromString(job.log.at(0)));
  ASSERT_EQ(first.records_size(), 2);
  EXPECT_TRUE(first.records(0).has_job());
  EXPECT_EQ(first.records(1).led().term(), 1u);
}

TEST(ReplicatedCoordinator, ItTakesMoreThanHalfOfTheRanksToDeposeALeaderThatWrites) {
  Alone job;
  job.let_other_lead();
  job.start();
  for (int i = 0; i < 40; ++i) {
    job.alive = ++job.revision;
    job.pass(kQuiet / 8);
    if (i == 8) job.node(0, true);
  }
  EXPECT_FALSE(job.leads()) << "one of two";
  job.node(1, true);
  job.pass(kQuiet / 16);
  EXPECT_TRUE(job.leads());
  EXPECT_EQ(job.one->leader().term(), 8u);
}

TEST(ReplicatedCoordinator, OfALeaderThatDoesNotWriteHalfOfTheRanksAreEnough) {
  Alone job;
  job.let_other_lead();
  job.start();
  job.pass(kQuiet / 8);
  job.node(0, true);
  job.pass(kQuiet / 8);
  EXPECT_FALSE(job.leads());
  job.pass(kQuiet / 4);
  EXPECT_TRUE(job.leads());
}

TEST(ReplicatedCoordinator, OneWithFewerStepsThanAreCommittedFailsForItsSettings) {
  Alone job;
  job.options.job.steps = 2;
  job.let_other_lead();
  for (std::uint64_t step = 1; step <= 3; ++step)
    job.write(step + 1, [&](proto::LogEntry& entry) { entry.add_records()->mutable_committed()->set_step(step); });
  job.start();
  for (std::uint64_t node : {0, 1}) job.node(node, true);
  job.pass(kQuiet);
  EXPECT_FALSE(job.leads());
  ASSERT_TRUE(job.failed);
  EXPECT_EQ(job.failed->code, ErrorCode::invalid_argument) << job.failed->message;
  EXPECT_NE(job.failed->message.find("--steps 2 says that the job ends before step 3"), std::string::npos)
      << job.failed->message;
}

TEST(ReplicatedCoordinator, ALeaderThatANodeHearsIsLeftAlone) {
  Alone job;
  job.let_other_lead();
  job.start();
  job.node(0, true);
  job.node(1, false);
  job.pass(5 * kQuiet);
  EXPECT_FALSE(job.leads());
}

TEST(ReplicatedCoordinator, OfALeaderThatCanNotWriteAnotherThatCanTakesOver) {
  Alone job;
  job.let_other_lead();
  job.start();
  job.pass(kQuiet);
  job.answers = false;
  for (std::uint64_t number : {0, 1}) job.node(number, false, true);
  job.pass(kQuiet);
  EXPECT_EQ(job.count(Asked::claim), 0u) << "it can't write either";
  job.answers = true;
  job.pass(kQuiet / 4);
  EXPECT_TRUE(job.leads());
}

TEST(ReplicatedCoordinator, WhoIsStartedAgainInTheNameAndPlaceOfTheLeaderLeads) {
  for (const bool same : {true, false}) {
    Alone job;
    job.let_other_lead();
    job.options.address = "other:1";
    job.options.name = same ? "other" : "another host, where that address means another machine";
    job.start();
    job.pass(kQuiet);
    EXPECT_EQ(job.leads(), same);
  }
}

TEST(ReplicatedCoordinator, AHigherTermThanTheStoreKnowsIsOutdone) {
  Alone job;
  job.start();
  job.pass(kQuiet / 8);
  ASSERT_TRUE(job.leads());
  job.node(0, true);  // it has heard of term 7
  job.pass(kQuiet / 4);
  EXPECT_TRUE(job.leads());
  EXPECT_EQ(job.one->leader().term(), 8u);
}

// Another coordinator's store has nothing to do with this one's terms.
TEST(ReplicatedCoordinator, WhatNodesOfAnotherJobSayMovesNobody) {
  for (const bool other_leads : {false, true}) {
    Alone job;
    if (other_leads) job.let_other_lead();
    job.start();
    job.pass(kQuiet);
    const std::uint64_t term = job.one->leader().term();
    for (std::uint64_t number : {0, 1}) {
      auto& view = job.views[number];
      view.set_job(6);
      view.set_term(250);
      view.set_led_term(250);
      view.set_lost(number == 0);
      view.add_hosts()->set_replica(static_cast<std::uint32_t>(number));
      RankSet(0).to(view.mutable_hosts(0)->mutable_ranks());
    }
    const auto claims = job.count(Asked::claim);
    for (int i = 0; i < 40; ++i) {
      job.alive = ++job.revision;
      job.pass(kQuiet / 8);
    }
    EXPECT_EQ(job.leads(), !other_leads);
    EXPECT_EQ(job.one->leader().term(), term);
    EXPECT_EQ(job.count(Asked::claim), claims);
    const std::string said = "node n at  keeps to job 0000000000000006, and what is in this coordinator's store is job";
    EXPECT_TRUE(job.one->of_another_job().starts_with(said)) << job.one->of_another_job();
    EXPECT_EQ(std::ranges::count_if(job.told, [&](const auto& line) { return line.starts_with(said); }), 1);
    for (std::uint64_t number : {0, 1}) job.views[number].set_job(5);
    job.pass(kQuiet / 8);
    EXPECT_EQ(job.one->of_another_job(), "");
  }
}

// … of the job's first leader, whose first entry another one may prevent.
TEST(ReplicatedCoordinator, ItTellsTheJobThatIsInTheStoreAndNoneBefore) {
  Alone job;
  job.answers_not = Asked::append;
  job.start();
  job.node(0, true);
  job.views[0].set_term(0);
  job.pass(kQuiet / 4);
  ASSERT_TRUE(job.leads());
  ASSERT_FALSE(job.said.empty());
  for (const auto& leads : job.said) EXPECT_EQ(leads.job(), 0u);
  job.answers_not.reset();
  job.pass(kQuiet / 4);
  EXPECT_TRUE(job.said.back().leads());
  EXPECT_EQ(job.said.back().job(), 5u);
}

// As on the second of two connections with one node, whose heartbeats come over the first.
TEST(ReplicatedCoordinator, AViewIsASignOfLife) {
  Alone job;
  job.start();
  job.pass(kQuiet / 8);
  ASSERT_TRUE(job.leads());
  proto::FromNode hello, view;
  hello.mutable_hello()->set_node("n");
  view.mutable_leader_view()->set_term(1);
  job.carry_out(job.one->on_message(NodeId(1), hello, job.now));
  for (int i = 0; i < 48; ++i) {
    job.pass(kQuiet / 16);
    job.carry_out(job.one->on_message(NodeId(1), view, job.now));
  }
  EXPECT_TRUE(job.closed.empty());
  job.pass(2 * kQuiet);
  EXPECT_EQ(job.closed.size(), 1u) << "and without one it is silent";
}

TEST(ReplicatedCoordinator, AnAnswerThatIsLostChangesNothing) {
  for (const Asked lost : {Asked::read, Asked::claim, Asked::append, Asked::renew}) {
    Alone job;
    job.lose = lost;
    job.start();
    job.node(0, false);
    job.pass(kQuiet);
    EXPECT_FALSE(job.lose) << "there was none of " << static_cast<int>(lost);
    ASSERT_TRUE(job.leads()) << static_cast<int>(lost);
    EXPECT_EQ(job.count(Asked::append), lost == Asked::append ? 2u : 1u);
    EXPECT_EQ(job.log.size(), 1u);
    EXPECT_EQ(job.one->position(), 2u);
    EXPECT_EQ(job.one->leader().term(), 8u) << "the node has heard of term 7";
  }
}

// Nobody has heard of them.
TEST(ReplicatedCoordinator, TooManyDecisionsThatTheStoreDoesNotTakeAreForgottenAndItLeadsAgain) {
  Alone job;
  job.start();
  job.pass(kQuiet / 8);
  ASSERT_TRUE(job.leads());
  job.answers = false;
  proto::FromNode comes;
  comes.mutable_hello()->set_node("n");
  job.carry_out(job.one->on_message(NodeId(1), comes, job.now));
  comes.mutable_rank_up()->set_replica(9);  // which this job has not: an answer
  std::size_t came = 0;
  for (; job.leads() && came < 200'000; ++came) {
    job.carry_out(job.one->on_message(NodeId(1), comes, job.now));
    if (came % 1000 == 999) job.pass(kQuiet / 16);
  }
  EXPECT_GE(came, 65'536u);
  EXPECT_LT(came, 70'000u);
  EXPECT_TRUE(std::ranges::any_of(job.told, [](const auto& line) { return line.starts_with("no longer leads: 6"); }));
  job.pass(kQuiet);
  EXPECT_FALSE(job.leads());
  job.answers = true;
  job.pass(kQuiet / 4);
  EXPECT_TRUE(job.leads());
  EXPECT_FALSE(job.failed);
}

// One registers again and again, of which another is told in a megabyte. The store says that it can't, or nothing until
// a request's deadline; what was decided meanwhile counts as well, and the request may have been done.
TEST(ReplicatedCoordinator, SoAreLongAnswersAlsoWhileARequestIsUnderWay) {
  for (const auto& [keeps, done] : {std::pair{false, false}, {true, false}, {true, true}}) {
    Alone job;
    job.start();
    job.pass(kQuiet / 8);
    ASSERT_TRUE(job.leads());
    (keeps ? job.keeps_requests : job.answers) = keeps;
    proto::FromNode comes;
    comes.mutable_rank_up()->set_instance(1);
    comes.mutable_rank_up()->set_replica(1);
    job.carry_out(job.one->on_message(NodeId(2), comes, job.now));
    comes.mutable_rank_up()->set_replica(0);
    comes.mutable_rank_up()->set_address(std::string(1 << 20, 'a'));
    int came = 0;
    for (; job.leads() && came < 2000; ++came) {
      job.carry_out(job.one->on_message(NodeId(1), comes, job.now));
      if (came % 100 == 99) job.pass(kQuiet / 4);
    }
    EXPECT_GE(came, 100);
    EXPECT_LE(came, 500) << "256 MiB";
    job.pass(kQuiet);
    EXPECT_FALSE(job.leads()) << "nobody can, and there is one request at a time";
    const std::size_t entries = job.log.size();
    job.keeps_requests = false;
    job.answers = !keeps || done;
    if (keeps) job.carry_out(job.one->on_answer(job.answer_to(*job.unheard), job.now));
    job.answers = true;
    job.pass(kQuiet / 4);
    EXPECT_TRUE(job.leads());
    EXPECT_FALSE(job.failed);
    EXPECT_EQ(job.log.size(), entries + 1 + (done ? 1 : 0)) << "who leads now is in it";
  }
}

TEST(ReplicatedCoordinator, ALeaderThatNoNodeReachesShowsNoSign) {
  Alone job;
  job.start();
  job.pass(kQuiet / 8);
  job.pass(4 * kQuiet);
  const auto before = job.count(Asked::renew);
  job.pass(4 * kQuiet);
  EXPECT_EQ(job.count(Asked::renew), before);
  job.node(0, false);
  job.pass(kQuiet);
  EXPECT_GT(job.count(Asked::renew), before);
}

TEST(ReplicatedCoordinator, AStoreThatWasSetBackIsReadFromItsBeginning) {
  Alone job;
  job.let_other_lead();
  job.give_out(2, 3);
  job.start();
  job.pass(kQuiet);
  EXPECT_EQ(job.one->position(), 3u);
  // Its data is an older copy, and another process leads since.
  job.log.erase(2);
  proto::Leader newer = other_leader();
  newer.set_instance(100);
  job.leader = newer.SerializeAsString();
  job.leader_revision = 0;
  for (int i = 0; i < 3; ++i) job.pass(kQuiet / 16);
  ASSERT_TRUE(job.failed) << "what it has on its disk is more than the store has";
  EXPECT_NE(job.failed->message.find("an older copy"), std::string::npos) << job.failed->message;
}

TEST(ReplicatedCoordinator, ALogWithAGapIsSaidToBeDamaged) {
  Alone job;
  job.let_other_lead();
  job.give_out(5, 3);
  job.start();
  job.pass(kQuiet / 4);
  ASSERT_TRUE(job.failed);
  EXPECT_NE(job.failed->message.find("lacks the records from 2 to 4"), std::string::npos) << job.failed->message;
}

TEST(ReplicatedCoordinator, AJobWithAnotherKeyIsAnotherJob) {
  for (const bool own : {true, false}) {
    Alone job;
    proto::Leader leads = other_leader();
    leads.set_key(own ? 11 : 12);
    job.let_other_lead();
    job.leader = leads.SerializeAsString();
    job.options.keys = {10, 11};
    job.options.name = leads.name(), job.options.address = leads.address();  // it would lead at once
    job.start();
    for (int i = 0; i < 4 && !job.failed; ++i) job.pass(kQuiet / 16);
    EXPECT_EQ(job.failed.has_value(), !own);
    EXPECT_EQ(job.count(Asked::claim), own ? 1u : 0u);
    if (own) continue;
    EXPECT_EQ(job.failed->code, ErrorCode::invalid_argument);
    EXPECT_NE(job.failed->message.find("--other-job-key-file OLD"), std::string::npos) << job.failed->message;
  }
}

TEST(ReplicatedCoordinator, AStandbyWithAnOperatorsWordSaysThatTheLeaderDecides) {
  const auto told = [](const std::function<void(JobConfig&)>& say, bool stopped) {
    Alone job;
    say(job.options.job);
    job.let_other_lead();
    job.write(2, [](proto::LogEntry& entry) { entry.add_records()->mutable_committed()->set_step(1); });
    job.write(3, [&](proto::LogEntry& entry) {
      if (stopped) entry.add_records()->mutable_stopped()->set_reason("they differ");
      else entry.add_records()->mutable_incarnated()->set_incarnation(4);
    });
    job.start();
    job.pass(kQuiet);
    const std::string word = job.one->unheeded_word();
    EXPECT_EQ(std::ranges::count(job.told, word), word.empty() ? 0 : 1);
    for (std::uint64_t number : {0, 1}) job.node(number, true);
    job.pass(kQuiet / 4);
    EXPECT_TRUE(job.leads());
    EXPECT_EQ(job.one->unheeded_word(), "");
    return word.substr(0, word.find(';'));
  };
  const auto roll_back = [](std::uint64_t to) { return [to](JobConfig& job) { job.roll_back_to = Step(to); }; };
  const auto drop = [](std::uint64_t at) { return [at](JobConfig& job) { job.drop = {ReplicaId(1), Step(at)}; }; };
  EXPECT_EQ(told(roll_back(0), false), "--roll-back-to 0 counts once this coordinator leads");
  EXPECT_EQ(told(roll_back(1), false), "") << "it would change nothing";
  EXPECT_EQ(told(drop(1), true), "--drop-replica 1@1 counts once this coordinator leads");
  EXPECT_EQ(told(drop(1), false), "") << "the job is not stopped";
  EXPECT_EQ(told(drop(0), true), "") << "it is the word of another stop";
}

TEST(ReplicatedCoordinator, SaysOnceThatItClaimsWhileTheStoreDoesNotAnswer) {
  Alone job;
  job.claim_in_vain();
  job.pass(10 * kQuiet);
  EXPECT_GT(job.count(Asked::claim), 10u);
  EXPECT_EQ(std::ranges::count_if(job.told, [](const auto& text) { return text.starts_with("claims the lead"); }), 1);
}

// It knew of a member whose node has lost the leader. The leader has admitted another one, whose node hears it.
TEST(ReplicatedCoordinator, ReadsWhoTheMembersAreBeforeItClaims) {
  Alone job;
  job.let_other_lead({0});
  job.start();
  job.pass(kQuiet);
  job.write(2, [](proto::LogEntry& entry) { begin_epoch(entry, 2, {0, 1}); });
  for (std::uint64_t number : {1, 0}) job.node(number, number == 0);
  EXPECT_EQ(job.count(Asked::claim), 0u);
  job.node(1, true);
  EXPECT_EQ(job.count(Asked::claim), 1u);
}

}  // namespace
}  // namespace rejoin::membership
