// What is said of incidents that never were: of each the right thing, and of what is not recorded that it is unknown.
#include "daemon/explain.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "daemon/tests/made_up_loss.h"

namespace rejoin::daemon {
namespace {

using events::Kind;
using Job = LostReplica;
using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
using testing::Not;

TEST(Explain, AKilledTrainerAndItsReturn) {
  Job job;
  job.comes_back();
  job.ends();
  const auto lines = told(job.recordings());
  ASSERT_FALSE(lines.empty());
  EXPECT_THAT(lines[0], HasSubstr("Incident 1 of 1: epoch 2, without replica 1;"));
  EXPECT_THAT(lines[1],
              AllOf(HasSubstr("Trainer r1.0 (process 11 on host) ended without a word"), HasSubstr("is not recorded")));
  EXPECT_THAT(lines[2],
              AllOf(HasSubstr("Daemon node1 said of rank 0: its process 11 ended, 2.0 ms later"),
                    HasSubstr("trainer r0.0 lost its connection with replica 1: connection reset, 3.0 ms later")));
  EXPECT_THAT(lines[3],
              AllOf(HasSubstr("epoch 2 with replicas 0, 2 at"),
                    HasSubstr("6.0 ms later than the last sign of life, for: without replica 1: its process 11 ended"),
                    HasSubstr("on disk in 0.7 ms")));
  EXPECT_THAT(lines[4], AllOf(HasSubstr("1 trainers entered the epoch"), HasSubstr("after 6.0 ms"),
                              HasSubstr("3 buckets (3.0 MiB) of step 11 were reduced again"), HasSubstr("1 of them")));
  EXPECT_THAT(lines[5], AllOf(HasSubstr("Step 11 was committed 150.0 ms after"),
                              HasSubstr("median of the steps before: 100.0 ms"), HasSubstr("50.0 ms were lost")));
  EXPECT_THAT(lines[6],
              AllOf(HasSubstr("registered for it 204.0 ms later (process 12)"),
                    HasSubstr("Admitted in epoch 3, 244.0 ms later; it caught up 8.0 MiB in 200.0 ms (40.0 MiB/s) from "
                              "replicas 0, 2 (rank 0: 8 slices from 2 sources, 1 fetched again)")));
  EXPECT_THAT(lines[7],
              AllOf(HasSubstr("contributed again from step 16 on (epoch 4)"), HasSubstr("missing in 5 steps")));
  EXPECT_THAT(lines[8], AllOf(HasSubstr("About 50.0 ms for everybody; the gradients of replica 1 in 5 steps")));
  EXPECT_THAT(lines[9], HasSubstr("one machine's clock"));
}

// As in containers that are made anew, where each process has the number of the one before.
TEST(Explain, OfProcessesWithOneNumberTheOneThatDiedThenIsMeant) {
  Job job;
  job.r1.made.opened_ns = 900 * ms;
  MadeUp before("r1.0", 1, 11), later("r1.0", 1, 11), elsewhere("r1.0", 2, 11);
  before.add(300 * ms, Kind::bucket_begun, {.epoch = 1, .step = 4});
  later.made.opened_ns = 1100 * ms;
  later.add(1100 * ms, Kind::opened);
  elsewhere.made.opened_ns = 950 * ms;
  elsewhere.add(950 * ms, Kind::opened);
  job.ends();
  auto all = job.recordings();
  for (const auto* one : {&elsewhere, &later, &before}) all.insert(all.begin(), one->recording());
  all.push_back(later.recording());
  const auto joined = join(std::move(all));
  const auto incidents = find_incidents(joined);
  const auto epoch = std::ranges::find(incidents.all, 2u, &Incident::epoch);
  ASSERT_NE(epoch, incidents.all.end());
  const auto lines = explain(joined, incidents, *epoch);
  EXPECT_THAT(lines, Contains(HasSubstr("its recording stops there with 'bucket_begun' of step 11")));
  EXPECT_THAT(lines, Contains(HasSubstr("6.0 ms later than the last sign of life")));
}

TEST(Explain, WhatIsNotRecordedIsUnknown) {
  Job job;
  job.ends();
  // Of the coordinator, the victim and its daemon nothing was collected.
  auto lines = told({job.r0.recording()});
  EXPECT_TRUE(lines.empty()) << "one epoch alone shows nobody that is out";
  job.r0.add(2 * ms, Kind::enter_epoch, {.epoch = 1, .step = 1}, "0,1,2");
  lines = told({job.r0.recording()});
  ASSERT_FALSE(lines.empty());
  EXPECT_THAT(lines[0], HasSubstr("epoch 2, without replica 1"));
  EXPECT_THAT(lines, Contains(HasSubstr("What happened: Unknown: no recording of replica 1")));
  EXPECT_THAT(lines, Contains(HasSubstr("Decided: Unknown: there is no recording of the coordinator")));
  EXPECT_THAT(lines, Contains(HasSubstr("Nobody registered for it again. It is not back")));
  EXPECT_THAT(lines, Contains(HasSubstr("Cost: How much time everybody lost is unknown")));
}

TEST(Explain, AProcessThatStoodStillIsNotCalledDead) {
  Job job;
  auto& events = job.node.made.events;
  std::erase_if(events, [](const auto& event) { return event.kind == Kind::rank_down; });
  job.node.add(1004 * ms, Kind::rank_down, {.replica = 1, .number = 0, .a = 11},
               "its process gave no sign of life for 500 ms");
  job.r1.add(4000 * ms, Kind::paused, {.a = 3'000'000'000});
  job.r1.add(4001 * ms, Kind::put_out, {}, "it was silent");
  job.ends();
  const auto lines = told(job.recordings());
  ASSERT_GT(lines.size(), 2u);
  EXPECT_THAT(lines[1],
              AllOf(HasSubstr("Trainer r1.0 (process 11 on host) stood still for 3.00 s"), Not(HasSubstr("ended"))));
  // It never went on, and is still there.
  Job stopped;
  std::erase_if(stopped.node.made.events, [](const auto& event) { return event.kind == Kind::rank_down; });
  stopped.node.add(1004 * ms, Kind::rank_down, {.replica = 1, .number = 0, .a = 11},
                   "its process gave no sign of life for 500 ms");
  stopped.r1.made.lives = true;
  stopped.ends();
  EXPECT_THAT(told(stopped.recordings())[1], HasSubstr("stands still: its last sign of life was at"));
}

TEST(Explain, ADaemonOrCoordinatorThatEndsWithoutAnEpochIsAnIncidentOfItsOwn) {
  Job job;
  job.node.add(1300 * ms, Kind::beat);
  job.coordinator.add(1301 * ms, Kind::node_lost, {}, "node1\nconnection reset");
  job.r0.add(1302 * ms, Kind::daemon_lost, {}, "connection reset");
  MadeUp again("node1", 1, 3);
  again.add(1500 * ms, Kind::opened);
  job.r0.add(1520 * ms, Kind::daemon_back);
  job.all.push_back(&again);
  job.ends();
  std::erase_if(job.node.made.events, [](const auto& event) { return event.kind == Kind::ended; });
  const auto lines = told(job.recordings(), 1);
  ASSERT_GT(lines.size(), 5u);
  EXPECT_THAT(lines[0], HasSubstr("Incident 2 of 2: the end of node1, without a new epoch"));
  EXPECT_THAT(lines[1], HasSubstr("Daemon node1 (process 2 on host) ended without a word"));
  EXPECT_THAT(lines[2], AllOf(HasSubstr("Coordinator lost node node1: connection reset, 1.0 ms later"),
                              HasSubstr("trainer r0.0 lost its daemon")));
  EXPECT_THAT(lines, Contains(HasSubstr("No epoch began for it: nobody was taken out")));
  EXPECT_THAT(
      lines,
      Contains(HasSubstr(
          "Process 3 took its place 200.0 ms later. 1 trainers connected with it again, the last one 220.0 ms later")));
  EXPECT_THAT(lines, Contains(HasSubstr("no step was lost, and nobody was taken out")));
}

// The lost node's files alone, which are copied first.
TEST(Explain, WithoutARecordingOfWhoWentOnItIsUnknownWhetherAnybodyWasTakenOutAndWhatAStepTook) {
  Job job;
  for (std::uint64_t step = 1; step <= 10; ++step)
    job.r1.add(static_cast<std::int64_t>(step) * 100 * ms - 1 * ms, Kind::committed, {.epoch = 1, .step = step});
  for (std::uint64_t step = 16; step <= 20; ++step)
    job.r1_again.add(static_cast<std::int64_t>(step) * 100 * ms + 51 * ms, Kind::committed, {.epoch = 4, .step = step});
  job.comes_back();
  job.ends();
  for (const bool with_daemon : {false, true}) {
    std::vector<Recording> all{job.r1.recording(), job.r1_again.recording()};
    if (with_daemon) all.push_back(job.node.recording());
    const auto lines = told(all);
    ASSERT_FALSE(lines.empty());
    EXPECT_THAT(lines[0], HasSubstr("the end of r1.0, and whether an epoch began for it is not recorded"));
    EXPECT_THAT(lines, Contains(HasSubstr("Decided: Unknown: no recording of a coordinator, or of another replica's")));
    EXPECT_THAT(lines, Contains(HasSubstr("The step: Unknown: of the steps after 10, the last one that is recorded "
                                          "before it, the next recorded one is step 16, committed ")));
    EXPECT_THAT(lines, Contains(HasSubstr("Cost: How much time everybody lost is unknown, and so is whether anybody")));
    EXPECT_THAT(lines, Not(Contains(HasSubstr("nobody was taken out"))));
    EXPECT_THAT(lines[2], HasSubstr(with_daemon ? "Daemon node1 said of rank 0: its process 11 ended, 2.0 ms later"
                                                : "Noticed: Nobody's recording says who noticed"));
  }
}

TEST(Explain, AMachineThatIsLostIsOneIncidentAndTwoEndsOnOneThatLivesAreTwo) {
  const auto titles = [](bool machine) {
    Job job;
    job.ends();
    std::vector<Recording> all = job.recordings();
    for (const char* who : {"node5", "coordinator c1"}) {
      MadeUp lost(who, machine ? 5 : 1, who[0]);
      for (std::int64_t t = 1200; t < 1600; t += 100) lost.add(t * ms, Kind::beat);
      if (who[0] == 'c') lost.add(1900 * ms, Kind::beat);
      for (std::int64_t t = 100; machine && t < 1500; t += 100) {
        lost.hear(job.coordinator, t * ms, t * ms + 100'000);
        job.coordinator.hear(lost, t * ms, t * ms + 100'000);
      }
      all.push_back(lost.recording());
    }
    all[0] = job.coordinator.recording();
    const auto joined = join(std::move(all));
    std::vector<std::string> all_titles;
    for (const auto& one : find_incidents(joined).all) all_titles.push_back(one.title());
    return all_titles;
  };
  EXPECT_THAT(titles(true), testing::ElementsAre("epoch 2, without replica 1",
                                                 "the end of node5, coordinator c1, without a new epoch"));
  EXPECT_THAT(titles(false), testing::ElementsAre("epoch 2, without replica 1", "the end of node5, without a new epoch",
                                                  "the end of coordinator c1, without a new epoch"));
}

TEST(Explain, WhoLeavesInOrderIsNoUnknownLoss) {
  Job job;
  std::erase_if(job.node.made.events, [](const auto& event) { return event.kind == Kind::rank_down; });
  job.node.add(1002 * ms, Kind::rank_left, {.replica = 1, .number = 0, .a = 11}, "of its own accord");
  job.r1.add(1001 * ms, Kind::left);
  job.r1.add(1003 * ms, Kind::ended);
  job.ends();
  const auto lines = told(job.recordings());
  ASSERT_FALSE(lines.empty());
  EXPECT_THAT(lines[1],
              AllOf(HasSubstr("Rank 0 of replica 1 (process 11) left in order at"), HasSubstr(": of its own accord.")));
  EXPECT_THAT(lines[2], HasSubstr("Daemon node1 said of rank 0: of its own accord"));
}

TEST(Explain, ADaemonThatWasRestartedBeforeHasNotCausedIt) {
  Job job;
  // The one before it ended without a word, and its trainer has come to this one since.
  MadeUp before("node1", 1, 3);
  before.add(1 * ms, Kind::rank_up, {.replica = 1, .number = 0, .a = 11});
  before.add(500 * ms, Kind::beat);
  job.node.made.events.front().at = 700 * ms;
  job.all.push_back(&before);
  for (auto* one : job.all)
    if (one != &job.r1 && one != &before) one->add(3000 * ms, Kind::ended, {}, "in order");
  const auto joined = join(job.recordings());
  const auto incidents = find_incidents(joined);
  ASSERT_EQ(incidents.all.size(), 2u);
  EXPECT_EQ(incidents.all[0].title(), "the end of node1, without a new epoch");
  const auto lines = explain(joined, incidents, incidents.all[1]);
  EXPECT_THAT(lines[1], AllOf(HasSubstr("Trainer r1.0 (process 11 on host) ended"), Not(HasSubstr("node1"))));
}

TEST(Explain, WhereNoContributorIsLeftItDoesNotSayThatNothingIsLost) {
  Job job;
  job.coordinator.made.events.back().text = "\nwithout replicas 0, 1, 2: their processes ended";
  job.ends();
  const auto lines = told(job.recordings());
  EXPECT_THAT(lines,
              Contains(HasSubstr("No contributor was left: committed steps are lost that are in no checkpoint")));
  EXPECT_THAT(lines, Not(Contains(HasSubstr("No committed step was lost"))));
}

// The steps after the one that the job goes back to are committed for another time.
TEST(Explain, AfterARollBackItTellsOfTheStepThatIsTrainedAgain) {
  Job job;
  job.comes_back();
  job.ends();
  MadeUp again("coordinator", 1, 4), r2("r2.0", 1, 13);
  again.add(5000 * ms, Kind::opened);
  again.add(5010 * ms, Kind::rolled_back, {.a = 20, .b = 5});
  again.add(5010 * ms, Kind::epoch, {.epoch = 5, .step = 6}, "0,1,2\nstart");
  for (std::uint64_t step = 6; step <= 30; ++step)
    again.add(5000 * ms + static_cast<std::int64_t>(step) * 100 * ms + (step > 12 ? 70 * ms : 0), Kind::commit,
              {.epoch = step > 12 ? 6u : 5u, .step = step});
  again.add(6230 * ms, Kind::epoch, {.epoch = 6, .step = 13}, "0,1\nwithout replica 2: its process 13 ended");
  r2.add(6225 * ms, Kind::bucket_begun, {.epoch = 5, .step = 13});
  again.add(8000 * ms, Kind::ended, {}, "in order");
  job.all.insert(job.all.end(), {&again, &r2});
  const auto second = told(job.recordings(), 1);
  ASSERT_FALSE(second.empty());
  EXPECT_THAT(second[0], HasSubstr("epoch 6, without replica 2"));
  EXPECT_THAT(second, Contains(HasSubstr("Step 13 was committed 170.0 ms after the one before it (median of the steps "
                                         "before: 100.0 ms), so about 70.0 ms were lost")));
  EXPECT_THAT(second, Contains(HasSubstr("Cost: About 70.0 ms for everybody")));
  // The first one is what it was, and one that no step followed before the roll-back has no cost in time.
  EXPECT_THAT(told(job.recordings()), Contains(HasSubstr("Step 11 was committed 150.0 ms after")));
  std::erase_if(job.coordinator.made.events, [](const auto& event) { return event.at > 1010 * ms; });
  const auto first = told(job.recordings());
  EXPECT_THAT(first,
              Contains(HasSubstr("The job was rolled back after it: the next step that was committed is step 6")));
  EXPECT_THAT(first, Contains(HasSubstr("Cost: How much time everybody lost is unknown")));
}

TEST(Explain, WhoEndsAfterTheJobIsFinishedIsNoIncidentUnlessItWasGivenMoreSteps) {
  const auto titles = [](bool more) {
    Job job;
    job.coordinator.add(2100 * ms, Kind::finished);
    MadeUp again("coordinator", 1, 4), late("node2", 1, 5);
    late.add(2200 * ms, Kind::beat);
    again.add(3000 * ms, Kind::opened);
    for (std::int64_t step = 21; more && step < 30; ++step)
      again.add(1000 * ms + step * 100 * ms, Kind::commit, {.epoch = 2, .step = static_cast<std::uint64_t>(step)});
    MadeUp victim("node3", 1, 6);
    victim.add(3500 * ms, Kind::beat);
    job.all.insert(job.all.end(), {&again, &late, &victim});
    for (auto* one : {&job.coordinator, &job.node, &job.r0, &again}) one->add(5000 * ms, Kind::ended, {}, "in order");
    const auto joined = join(job.recordings());
    std::vector<std::string> all;
    for (const auto& one : find_incidents(joined).all) all.push_back(one.title());
    return all;
  };
  EXPECT_THAT(titles(false), testing::ElementsAre("epoch 2, without replica 1"));
  EXPECT_THAT(titles(true),
              testing::ElementsAre("epoch 2, without replica 1", "the end of node3, without a new epoch"));
}

// Copied from one machine after the other while all of them live.
TEST(Explain, ProcessesThatLivedWhenTheirRecordingsWereCopiedHaveNotEnded) {
  const auto titles = [](bool lost) {
    Job job;
    job.comes_back();
    for (MadeUp* one : {&job.coordinator, &job.node, &job.r0, &job.r1_again}) one->add(9000 * ms, Kind::beat);
    job.node.add(9500 * ms, Kind::beat);
    MadeUp node2("node2", 2, 3), r2("r2.0", 2, 13), standby("coordinator c1", 2, 4);
    node2.add(1 * ms, Kind::rank_up, {.replica = 2, .number = 0, .a = 13});
    r2.add(2000 * ms, Kind::bucket_begun, {.epoch = 4, .step = 20});  // its steps are long
    node2.add(5000 * ms, Kind::beat);
    standby.add(4800 * ms, Kind::beat);
    if (lost) job.coordinator.add(5900 * ms, Kind::node_lost, {}, "node2\nconnection reset");
    job.all.insert(job.all.end(), {&node2, &r2, &standby});
    for (std::int64_t t = 100; t < 2000; t += 100) {
      node2.hear(job.coordinator, t * ms, t * ms + 100'000);
      job.coordinator.hear(node2, t * ms, t * ms + 100'000);
    }
    const auto joined = join(job.recordings());
    const auto found = find_incidents(joined);
    std::vector<std::string> all;
    for (const auto& one : found.all) all.push_back(one.title());
    EXPECT_THAT(explain(joined, found, found.all[0]).back(), HasSubstr("processes it is unknown whether they lived"));
    return all;
  };
  EXPECT_THAT(titles(false), testing::ElementsAre("epoch 2, without replica 1"));
  EXPECT_THAT(titles(true),
              testing::ElementsAre("epoch 2, without replica 1", "the end of node2, without a new epoch"));
}

TEST(Explain, AnIncidentIsFoundByItsTimeItsEpochAndInTheList) {
  constexpr std::int64_t day = 86400'000 * ms, near = 20'000 * day + 23 * 3600'000 * ms;
  EXPECT_EQ(*parse_time("23:59:59.5", near), 20'000 * day + day - 500 * ms);
  EXPECT_EQ(*parse_time("00:00:01", near), 20'001 * day + 1000 * ms) << "the nearest one is after midnight";
  EXPECT_EQ(*parse_time("2024-10-04T23:00:00Z", 0), near);
  EXPECT_EQ(*parse_time("2024-10-04 23:00:00.250", 0), near + 250 * ms);
  EXPECT_EQ(*parse_time("12.5", 0), 12'500 * ms);
  for (const char* wrong :
       {"", "soon", "25:00:00", "2024-13-04T23:00:00", "12:00:00 h", "-1", "1:2", "nan", "2024-10-04"})
    EXPECT_FALSE(parse_time(wrong, near)) << wrong;
  Job job;
  job.comes_back();
  job.ends();
  const auto joined = join(job.recordings());
  EXPECT_THAT(
      list(joined, find_incidents(joined)),
      testing::ElementsAre(AllOf(HasSubstr("  1  2026-09-"),
                                 HasSubstr("epoch 2, without replica 1 (without replica 1: its process 11 ended)"))));
}

}  // namespace
}  // namespace rejoin::daemon
