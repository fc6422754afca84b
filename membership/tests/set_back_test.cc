// The store is put back to an older copy of its data, under the one that leads or before another one does.
#include <gtest/gtest.h>

#include "membership/tests/lone_coordinator.h"

namespace rejoin::membership {
namespace {

bool was_told(const Alone& of, const std::string& part) {
  return std::ranges::any_of(of.told, [&](const auto& line) { return line.find(part) != line.npos; });
}

// What the store has, for whoever starts anew beside the leader.
void begin_standby(Alone& standby, const Alone& of) {
  standby.options.name = "c1", standby.options.instance = 2;
  standby.leader = of.leader, standby.leader_revision = of.leader_revision;
  standby.snapshot = of.snapshot, standby.snapshot_position = of.snapshot_position;
  standby.log = of.log;
  standby.start();
  standby.pass(kQuiet / 4);
}

// All that it has written since it claimed.
void set_back(Alone& job) {
  job.log.clear();
  job.snapshot.clear();
  job.snapshot_position = job.snapshot_revision = 0;
}

struct SetBackUnderALeader : testing::Test {
  void SetUp() override {
    job.start();
    job.node(0, false);
    job.pass(kQuiet / 4);
    ASSERT_TRUE(job.leads());
    ASSERT_EQ(job.one->position(), 2u);
  }
  void decide() {  // gives out an incarnation
    proto::FromNode comes;
    comes.mutable_rank_up()->set_instance(++instances);
    job.carry_out(job.one->on_message(NodeId(1), comes, job.now));
  }
  Alone job;
  std::uint64_t instances = 0;
};

TEST_F(SetBackUnderALeader, ASnapshotTakesThePlaceOfWhatIsLost) {
  set_back(job);
  job.pass(kQuiet / 4);
  EXPECT_TRUE(job.leads()) << "its claim is there still";
  EXPECT_TRUE(was_told(job, "the store lacks what this leader wrote there last"));
  EXPECT_TRUE(was_told(job, "the store has again what its 3 decisions lead to"));
  EXPECT_EQ(job.one->set_back_under_it(), "");
  EXPECT_EQ(job.one->times_set_back(), 1u);
  EXPECT_EQ(job.snapshot_position, 3u);
  EXPECT_TRUE(job.log.contains(2)) << "who has read as far finds the next one there";
  EXPECT_EQ(job.count(Asked::compact), 1u);
  decide();
  EXPECT_EQ(job.log.rbegin()->first, 3u);
  Alone standby;
  begin_standby(standby, job);
  EXPECT_FALSE(standby.failed) << standby.failed->message;
  EXPECT_EQ(standby.one->position(), job.one->position());
}

TEST_F(SetBackUnderALeader, NothingIsWrittenBehindTheGapAndWhatWaitsGoesWithTheSnapshot) {
  decide();
  const auto before = job.one->position();
  set_back(job);
  job.answers_not = Asked::compact;
  decide();
  EXPECT_TRUE(job.log.empty()) << "an entry there would be behind a gap";
  EXPECT_NE(job.one->set_back_under_it(), "");
  decide();
  job.pass(kQuiet / 8);
  EXPECT_TRUE(job.log.empty());
  EXPECT_EQ(job.one->position(), before) << "nothing of it counts as written";
  ASSERT_TRUE(job.one->failing());
  job.answers_not.reset();
  job.pass(kQuiet / 8);
  EXPECT_EQ(job.one->set_back_under_it(), "");
  EXPECT_FALSE(job.one->failing());
  ASSERT_TRUE(job.log.contains(before)) << "what waited is in the log, too, for who has read as far";
  EXPECT_GT(job.one->position(), job.snapshot_position) << "and what was decided after the snapshot was made";
  Alone standby;
  begin_standby(standby, job);
  EXPECT_FALSE(standby.failed);
  EXPECT_EQ(standby.one->position(), job.one->position());
}

// Its nodes hear nothing of that: who took over at their word would have less than this one.
TEST_F(SetBackUnderALeader, AStoreThatDoesNotTakeTheSnapshotIsWaitedForAndNobodyElseIsToTakeOver) {
  set_back(job);
  job.answers_not = Asked::compact;
  job.pass(3 * kQuiet);
  EXPECT_TRUE(job.one->stalled());
  EXPECT_TRUE(was_told(job, "the store does not take what is decided"));
  EXPECT_FALSE(was_told(job, "the store takes what is decided again"));
  EXPECT_TRUE(std::ranges::none_of(job.said, [](const proto::Leads& leads) { return leads.stalled(); }));
  job.answers_not.reset();
  job.pass(kQuiet / 4);
  EXPECT_FALSE(job.one->stalled());
  EXPECT_TRUE(was_told(job, "the store takes what is decided again"));
  EXPECT_TRUE(job.leads());
}

TEST_F(SetBackUnderALeader, AnAnswerThatIsLostAndASecondTimeChangeNothing) {
  job.lose = Asked::compact;
  set_back(job);
  job.pass(kQuiet / 2);
  EXPECT_EQ(job.count(Asked::compact), 2u);
  EXPECT_EQ(job.snapshot_position, 3u);
  EXPECT_EQ(job.one->position(), 3u) << "it is there once";
  set_back(job);
  job.pass(kQuiet / 4);
  EXPECT_EQ(job.one->times_set_back(), 2u);
  EXPECT_EQ(job.snapshot_position, 4u);
  EXPECT_TRUE(job.leads());
}

TEST_F(SetBackUnderALeader, WhatDoesNotFitIntoAnEntryIsInTheSnapshotAlone) {
  Alone small;
  std::swap(job, small);
  job.options.entry_bytes = 40;
  SetUp();
  set_back(job);
  job.keeps_requests = true;
  for (int i = 0; i < 20; ++i) decide();
  job.keeps_requests = false;
  job.carry_out(job.one->on_answer(job.answer_to(*job.unheard), job.now));
  EXPECT_EQ(job.one->times_set_back(), 1u);
  EXPECT_EQ(job.one->set_back_under_it(), "");
  ASSERT_GT(job.snapshot_position, 10u);
  EXPECT_EQ(job.log.begin()->first, job.snapshot_position - 1);
  decide();
  Alone standby;
  begin_standby(standby, job);
  EXPECT_FALSE(standby.failed);
  EXPECT_EQ(standby.one->position(), job.one->position());
}

// Between the first line and the snapshot: the store has a log without a gap, and fewer decisions than there are
// copies.
TEST_F(SetBackUnderALeader, WhenItEndsBeforeTheSnapshotIsThereWhoHasMoreSaysSo) {
  const auto older = job.log;
  decide();
  Alone standby;
  begin_standby(standby, job);
  ASSERT_EQ(standby.one->position(), job.one->position());
  job.log = older;
  job.answers_not = Asked::compact;
  decide();
  EXPECT_EQ(job.log, older);
  standby.log = older;
  standby.node(0, true);
  standby.pass(3 * kQuiet);
  ASSERT_TRUE(standby.failed);
  EXPECT_NE(standby.failed->message.find("an older copy"), std::string::npos) << standby.failed->message;
}

// An etcd that is put back is away for a while, and a leader that could not write counts as lost when it is back.
TEST_F(SetBackUnderALeader, AStandbyLeavesItToTheLeaderAndMayClaimWhenThatHasDoneIt) {
  const auto older = job.log;
  decide();
  Alone standby;
  begin_standby(standby, job);
  const auto known = standby.one->position();
  standby.log = older;
  standby.node(0, false, true);
  standby.pass(kQuiet);
  EXPECT_EQ(standby.count(Asked::claim), 0u);
  EXPECT_FALSE(standby.failed);
  job.log = older;
  decide();
  ASSERT_EQ(job.one->times_set_back(), 1u);
  standby.log = job.log, standby.snapshot = job.snapshot, standby.snapshot_position = job.snapshot_position;
  standby.pass(kQuiet / 2);
  EXPECT_FALSE(standby.failed);
  EXPECT_TRUE(standby.leads()) << "the node says so still";
  EXPECT_GT(standby.one->position(), known);
}

// It has read no entry, and would write behind nothing.
TEST_F(SetBackUnderALeader, AStandbyThatKnowsASnapshotAloneLooksWhetherItIsThere) {
  const auto older = job.log;
  set_back(job);
  job.pass(kQuiet / 4);
  job.log.clear();
  for (const bool there : {true, false}) {
    Alone standby;
    begin_standby(standby, job);
    ASSERT_EQ(standby.one->position(), 3u);
    if (!there) standby.snapshot_position = 0, standby.log = older;
    standby.node(0, true);
    standby.pass(3 * kQuiet);
    EXPECT_EQ(standby.leads(), there);
    EXPECT_EQ(standby.failed.has_value(), !there);
  }
}

// As 'rejoin log import' puts it there: a snapshot, and a lead that nobody has.
void import(Alone& into, std::uint64_t id, std::uint32_t replicas) {
  Coordinator machine({.replicas = replicas, .ranks = 1, .batch = 4});
  proto::LogRecord begins;
  begins.mutable_job()->set_replicas(replicas), begins.mutable_job()->set_ranks(1);
  begins.mutable_job()->set_batch(4), begins.mutable_job()->set_id(id);
  ASSERT_TRUE(machine.replay(begins));
  auto snapshot = machine.snapshot();
  snapshot.mutable_snapshot()->set_position(40);
  into.log.clear();
  into.snapshot = snapshot.SerializeAsString(), into.snapshot_position = 40;
  into.snapshot_revision = ++into.revision, into.leader_revision = ++into.revision;
  proto::Leader nobody;
  nobody.set_term(1000);
  into.leader = nobody.SerializeAsString();
}

void expect_to_end_as_another_jobs(bool leads, std::uint32_t replicas, bool has_copy) {
  Alone one;
  if (!leads) one.let_other_lead();
  for (const bool again : {false, true}) {
    if (again && !has_copy) break;
    if (again) one.options.copied = one.one->position(), one.options.copied_job = 5;
    one.start();
    one.node(0, false);
    one.pass(kQuiet / 4);
    ASSERT_EQ(one.leads(), leads);
  }
  const auto copies = one.copies;
  ASSERT_GT(copies, 0u);
  import(one, 6, replicas);
  one.pass(kQuiet);
  ASSERT_TRUE(one.failed);
  EXPECT_EQ(one.failed->code, ErrorCode::mismatch) << "that is exit code 4";
  for (const char* part : {"are of job 0000000000000006 now, and this coordinator is of job 0000000000000005",
                           "etcdctl del --prefix", "'rejoin log import'"})
    EXPECT_NE(one.failed->message.find(part), std::string::npos) << one.failed->message;
  EXPECT_EQ(one.failed->message.find("another --log-directory"), std::string::npos) << "it would join that other job";
  EXPECT_EQ(one.copies, copies) << "the copy stays its job's";
}

TEST_F(SetBackUnderALeader, AStoreThatBecomesAnotherJobsIsNotTakenForItsOwn) {
  for (const bool leads : {true, false})
    for (const std::uint32_t replicas : {2, 3})
      for (const bool has_copy : {false, true}) expect_to_end_as_another_jobs(leads, replicas, has_copy);
}

TEST_F(SetBackUnderALeader, DecisionsOfTheSameJobThatAreImportedAreItsOwn) {
  import(job, 5, 2);
  job.pass(kQuiet / 2);
  EXPECT_FALSE(job.failed) << job.failed->message;
  EXPECT_TRUE(job.leads());
  EXPECT_GT(job.one->position(), 40u);
}

// A member of the store's that lags behind says what was, to who does not ask for what is.
TEST(ReplicatedCoordinator, AnOlderAnswerToWhoMayHaveOneIsNoSetBack) {
  Alone job;
  job.let_other_lead();
  job.give_out(2, 3);
  job.start();
  job.pass(kQuiet);
  const auto newest = job.log;
  job.log.erase(2);
  job.pass(kQuiet / 16);
  job.log = newest;
  job.pass(kQuiet);
  EXPECT_FALSE(job.failed);
  EXPECT_EQ(job.one->position(), 3u);
  EXPECT_FALSE(was_told(job, "set back"));
}

}  // namespace
}  // namespace rejoin::membership
