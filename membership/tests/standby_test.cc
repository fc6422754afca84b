// What a standby was started with, and what it makes of the store's log.
#include <gtest/gtest.h>

#include "membership/tests/coordinator_bench.h"
#include "membership/tests/lone_coordinator.h"

namespace rejoin::membership {
namespace {

TEST(ReplicatedCoordinator, AStandbysWordToRollBackEndsWhenTheJobGoesOn) {
  Alone job;
  job.options.job.roll_back_to = Step(0);
  job.let_other_lead();
  job.write(2, [](proto::LogEntry& entry) { entry.add_records()->mutable_committed()->set_step(1); });
  job.start();
  job.pass(kQuiet);
  EXPECT_NE(job.one->unheeded_word(), "");
  job.write(3, [](proto::LogEntry& entry) { entry.add_records()->mutable_committed()->set_step(2); });
  job.pass(kQuiet);
  EXPECT_EQ(job.one->unheeded_word(), "");
}

// The clocks of two machines may differ by more than a leader has led.
TEST(ReplicatedCoordinator, AStandbySaysForHowLongALeaderHasLed) {
  constexpr std::uint64_t hour = 3'600'000;
  for (const std::uint64_t behind : {std::uint64_t{0}, hour}) {
    Alone job;
    job.options.started_ms = 2 * hour - behind;
    job.let_other_lead();
    proto::Leader other;
    ASSERT_TRUE(other.ParseFromString(job.leader));
    other.set_since_ms(2 * hour - 10'000);
    job.leader = other.SerializeAsString();
    job.start();
    job.pass(kQuiet / 2);
    const Duration led = job.one->led_for(job.now);
    EXPECT_GE(led, behind == 0 ? std::chrono::seconds(10) : Duration{}) << behind;
    EXPECT_LE(led, (behind == 0 ? std::chrono::seconds(10) : Duration{}) + kQuiet) << behind;
  }
}

// A job of two replicas that another one leads, which has said its --steps (or has not), up to this step.
struct WithSteps : Alone {
  std::uint64_t committed = 0;
  WithSteps(std::uint64_t own, std::optional<std::uint64_t> of_leader, std::uint64_t until) {
    options.job.steps = own;
    let_other_lead();
    proto::Leader other = other_leader();
    if (of_leader) other.set_steps(*of_leader);
    leader = other.SerializeAsString();
    commit(until);
    start();
    pass(kQuiet);
  }
  void commit(std::uint64_t until) {
    while (committed < until) {
      ++committed;
      write(committed + 1,
            [&](proto::LogEntry& entry) { entry.add_records()->mutable_committed()->set_step(committed); });
    }
  }
  std::int64_t times_told(const std::string& what) const {
    return std::ranges::count_if(told, [&](const auto& line) { return line.find(what) != std::string::npos; });
  }
  void lose_the_leader() {
    for (std::uint64_t number : {0, 1}) node(number, true);
    pass(kQuiet / 4);
  }
};

TEST(ReplicatedCoordinator, AStandbyWithFewerStepsThanAreCommittedDoesNotStart) {
  WithSteps job(2, 0, 3);
  ASSERT_TRUE(job.failed);
  EXPECT_EQ(job.failed->code, ErrorCode::invalid_argument);
  EXPECT_NE(job.failed->message.find("--steps 2 says that the job ends before step 3"), std::string::npos);
}

// It has started before: another one may be able to lead. That the job has an end is not said of it meanwhile.
TEST(ReplicatedCoordinator, AStandbyWithFewerStepsThanAreCommittedSinceTakesNoLead) {
  for (const std::optional<std::uint64_t> of_leader : {std::optional<std::uint64_t>(0), {}}) {
    WithSteps job(2, of_leader, 1);
    EXPECT_EQ(job.one->other_steps().find("--steps 2 counts once this coordinator leads; other at other:1 does with "
                                          "--steps 0: start all of them with the same"),
              of_leader ? 0 : std::string::npos);
    job.commit(2);
    job.pass(kQuiet);
    EXPECT_EQ(job.one->following().finished(), !of_leader) << "where nobody says more it may be";
    job.commit(4);
    job.pass(kQuiet);
    const std::string early =
        "--steps 2 says that the job ends before a step that is committed: this coordinator takes";
    EXPECT_EQ(job.one->other_steps().find(early), 0u) << job.one->other_steps();
    EXPECT_EQ(job.times_told(early), 1);
    EXPECT_FALSE(job.one->following().finished());
    job.lose_the_leader();
    EXPECT_EQ(job.count(Asked::claim), 0u);
    EXPECT_FALSE(job.failed);
  }
}

// It is finished by the one that leads. Who takes over says that it goes on.
TEST(ReplicatedCoordinator, AStandbyWithMoreStepsKnowsThatTheJobIsFinished) {
  WithSteps job(50, 2, 2);
  EXPECT_TRUE(job.one->following().finished());
  EXPECT_EQ(job.times_told("--steps 50 counts once this coordinator leads; other at other:1 does with --steps 2"), 1);
  job.lose_the_leader();
  ASSERT_TRUE(job.leads());
  EXPECT_FALSE(job.one->leading()->finished());
  EXPECT_EQ(job.one->leader().steps(), 50u);
  EXPECT_EQ(job.one->other_steps(), "");
  EXPECT_EQ(job.times_told("the job has --steps 50 from here on; the coordinator that led before had --steps 2"), 1);
}

TEST(ReplicatedCoordinator, AStandbySaysForHowLongItHasSeenNoSignOfTheLeader) {
  WithSteps job(0, 0, 1);
  EXPECT_EQ(job.one->other_steps(), "");
  EXPECT_EQ(job.one->no_sign_for(job.now), Duration{});
  job.pass(2 * kQuiet);
  EXPECT_GT(job.one->no_sign_for(job.now), 2 * kQuiet);
  job.alive = ++job.revision;
  job.pass(kQuiet / 4);
  EXPECT_EQ(job.one->no_sign_for(job.now), Duration{});
  job.pass(3 * kQuiet);
  job.answers = false;
  job.pass(kQuiet / 4);
  EXPECT_EQ(job.one->no_sign_for(job.now), Duration{}) << "it is the store that is away";
}

// Decisions that were imported have a term, and no leader: nobody would be disturbed, and there is nobody to name.
TEST(ReplicatedCoordinator, AfterAnImportNobodyLeadsAndWhoComesDoesAtOnce) {
  Alone job;
  job.options.job.roll_back_to = Step(0);
  job.let_other_lead();
  job.write(2, [](proto::LogEntry& entry) { entry.add_records()->mutable_committed()->set_step(1); });
  proto::Leader nobody;
  nobody.set_term(1007);
  nobody.set_since_ms(5);
  job.leader = nobody.SerializeAsString();
  job.answers_not = Asked::claim;
  job.start();
  job.pass(kQuiet / 2);
  EXPECT_FALSE(job.leads());
  EXPECT_EQ(job.one->unheeded_word(), "");
  job.answers_not.reset();
  job.pass(kQuiet / 2);
  EXPECT_TRUE(job.leads()) << "no node has come";
  EXPECT_EQ(job.one->leader().term(), 1008u);
  EXPECT_EQ(job.one->leader().silence_ms(), static_cast<std::uint64_t>(milliseconds(kQuiet))) << "an import asks";
  EXPECT_NE(std::ranges::find(job.told, "claims the lead, in term 1008: nobody leads since decisions were imported"),
            job.told.end());
  for (const auto& line : job.told) EXPECT_EQ(line.find(" at  "), std::string::npos) << line;
}

// The store went on from an older copy, and has come as far as this one's copy since.
TEST(ReplicatedCoordinator, ACopyOfOtherDecisionsIsNotGoneOnWith) {
  for (const bool others : {false, true}) {
    Alone copied, job;
    for (Alone* one : {&copied, &job}) one->let_other_lead();
    for (std::uint64_t at = 2; at < 6; ++at) copied.give_out(at, at + 100);
    for (std::uint64_t at = 2; at < 9; ++at) job.give_out(at, at + (others && at > 3 ? 500 : 100));
    std::vector<proto::LogRecord> copy;
    for (const auto& [at, bytes] : copied.log) {
      proto::LogEntry entry;
      ASSERT_TRUE(entry.ParseFromString(bytes));
      copy.insert(copy.end(), entry.records().begin(), entry.records().end());
    }
    job.options.copied = copy.size(), job.options.copied_job = 5;
    job.options.copied_landmark = ReplicatedCoordinator::landmark_of(copy, job.options.job).value();
    job.start();
    job.pass(kQuiet / 4);
    EXPECT_EQ(job.failed.has_value(), others);
    if (!others) continue;
    EXPECT_EQ(job.failed->code, ErrorCode::mismatch);
    EXPECT_NE(job.failed->message.find("the store's first 6 decisions are others than those in --log-directory"),
              std::string::npos)
        << job.failed->message;
  }
}

// As etcd does that is full, or in which this one's role may only read.
TEST(ReplicatedCoordinator, AStoreThatAnswersReadsAndTakesNothingIsAskedAndToldOfSeldom) {
  Alone job;
  job.let_other_lead();
  job.start();
  job.pass(kQuiet);
  job.answers_not = Asked::claim;
  const TimePoint begun = job.now;
  for (std::uint64_t number : {0, 1}) job.node(number, false, true);
  job.pass(kQuiet);
  EXPECT_LE(job.count(Asked::claim), 6u);
  job.pass(9 * kQuiet);
  EXPECT_LE(job.count(Asked::claim), 15u) << "one a silence, in the end";
  EXPECT_GE(job.count(Asked::claim), 8u);
  const auto lines = [&] {
    return std::ranges::count_if(job.told, [](const auto& text) { return text.starts_with("the store "); });
  };
  EXPECT_EQ(lines(), 1);
  ASSERT_TRUE(job.one->failing()) << "it answers reads alone";
  EXPECT_LE(job.one->failing()->since - begun, kQuiet / 4);
  job.answers_not.reset();
  job.pass(kQuiet + kQuiet / 16);
  EXPECT_TRUE(job.leads());
  EXPECT_FALSE(job.one->failing());
  EXPECT_EQ(lines(), 2);
}

// Whom it lets write, or which of its members it does.
TEST(ReplicatedCoordinator, AStandbyWhoseClaimsAStoreDoesNotTakeClaimsSeldomThoughOthersWrite) {
  Alone job;
  job.claim_in_vain();
  for (int i = 0; i < 16; ++i) {
    job.alive = ++job.revision;
    job.pass(kQuiet / 4);
  }
  EXPECT_LE(job.count(Asked::claim), 9u);
  EXPECT_GE(job.count(Asked::claim), 4u);
  job.answers_not.reset();
  job.pass(kQuiet + kQuiet / 16);
  EXPECT_TRUE(job.leads());
}

// The leader that could not write writes again.
TEST(ReplicatedCoordinator, WhatOthersWriteShowsThatTheStoreTakesWritesAgain) {
  for (const bool sign_of_life : {false, true}) {
    Alone job;
    job.let_other_lead();
    job.start();
    job.pass(kQuiet);
    job.answers_not = Asked::claim;
    for (std::uint64_t number : {0, 1}) job.node(number, false, true);
    job.pass(2 * kQuiet);
    EXPECT_TRUE(job.one->failing());
    for (std::uint64_t number : {0, 1}) job.node(number, false);
    job.pass(kQuiet);
    EXPECT_TRUE(job.one->failing()) << "nobody has written";
    if (sign_of_life) job.alive = ++job.revision;
    else job.give_out(2, 9);
    job.pass(kQuiet / 4);
    EXPECT_FALSE(job.one->failing());
  }
}

// It was found silent; until the store has that its connection stays, and something more may come over it.
TEST(ReplicatedCoordinator, WhatComesOverAConnectionThatIsToBeClosedMakesItNoNodeAnew) {
  Alone job;
  job.start();
  job.pass(kQuiet / 8);
  ASSERT_TRUE(job.leads());
  constexpr NodeId node(5);
  proto::FromNode hello;
  hello.mutable_hello()->set_node("n");
  job.carry_out(job.one->on_message(node, hello, job.now));
  job.carry_out(job.one->on_message(node, Bench::introduction(0, 0, 1), job.now));
  job.pass(kQuiet - kQuiet / 8);
  job.keeps_requests = true;
  job.pass(kQuiet / 4);
  ASSERT_TRUE(job.unheard);
  ASSERT_FALSE(job.one->leading()->nodes().contains(node));
  proto::FromNode heartbeat;
  heartbeat.mutable_heartbeat();
  job.carry_out(job.one->on_message(node, heartbeat, job.now));
  job.carry_out(job.one->on_message(node, Bench::introduction(1, 0, 2), job.now));
  job.keeps_requests = false;
  job.carry_out(job.one->on_answer(job.answer_to(*job.unheard), job.now));
  job.pass(3 * kQuiet);
  EXPECT_EQ(job.closed, std::vector<NodeId>{node});
  EXPECT_FALSE(job.one->leading()->nodes().contains(node));
  EXPECT_FALSE(job.one->leading()->replicas().contains(ReplicaId(1))) << "it comes over its next connection";
}

}  // namespace
}  // namespace rejoin::membership
