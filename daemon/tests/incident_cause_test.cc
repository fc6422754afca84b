// Who is named for the loss of a replica: nobody who had no part in it, and whoever stood still or was cut off.
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

// Started twice by mistake, on another node; the process that had the place dies later.
TEST(IncidentCause, WhoWasRefusedThePlaceOfAnotherIsNotNamedForItsEnd) {
  for (const bool recorded : {true, false}) {
    Job job;
    MadeUp twice("r1.0", 1, 19), other("node0", 1, 3);
    other.add(500 * ms, Kind::rank_up, {.replica = 1, .number = 0, .a = 19});
    other.add(505 * ms, Kind::rank_down, {.replica = 1, .number = 0, .a = 19}, "it has left: process 11 on node node1");
    if (recorded) {
      twice.add(490 * ms, Kind::opened);
      twice.add(504 * ms, Kind::failed, {}, "process 11 on node node1 is replica 1 rank 0");
      twice.add(505 * ms, Kind::ended);
    } else {
      std::erase_if(job.r1.made.events, [](const auto&) { return true; });
    }
    job.all.insert(job.all.end(), {&twice, &other});
    job.ends();
    if (!recorded) twice.made.events.clear();
    const auto lines = told(job.recordings());
    ASSERT_GT(lines.size(), 3u);
    EXPECT_THAT(lines[1], Not(HasSubstr("node node1"))) << recorded;
    EXPECT_THAT(lines[1], HasSubstr(recorded ? "Trainer r1.0 (process 11 on host) ended without a word"
                                             : "its daemon said: its process 11 ended. That process has no recording"));
    if (!recorded) continue;
    EXPECT_THAT(lines[2], Not(HasSubstr("node0")));
    EXPECT_THAT(lines[3], HasSubstr("6.0 ms later than the last sign of life"));
  }
}

TEST(IncidentCause, WhoWasFollowedByAnotherProcessIsNotNamedForItsEnd) {
  Job job;
  MadeUp old("r1.0", 1, 9);
  old.add(0, Kind::registered, {.a = 1});
  old.add(600 * ms, Kind::put_out, {}, "it was silent");
  job.node.add(598 * ms, Kind::rank_up, {.replica = 1, .number = 0, .a = 9, .b = 1});
  job.node.add(601 * ms, Kind::rank_down, {.replica = 1, .number = 0, .a = 9}, "it has left: it was silent");
  job.all.push_back(&old);
  job.ends();
  EXPECT_THAT(told(job.recordings())[1], HasSubstr("Trainer r1.0 (process 11 on host) ended without a word"));
}

// No process of replica 1 ends, and its daemon says nothing of it.
struct CutOff : Job {
  CutOff() {
    std::erase_if(node.made.events, [](const auto& event) { return event.kind == Kind::rank_down; });
    r1.add(1500 * ms, Kind::put_out, {}, "it was silent");
    r1.add(1501 * ms, Kind::ended);
  }
  std::vector<std::string> lines() {
    ends();
    auto told_lines = told(recordings());
    told_lines.resize(std::max<std::size_t>(told_lines.size(), 3));
    return told_lines;
  }
};

TEST(IncidentCause, ADaemonThatStoodStillIsNamed) {
  CutOff job;
  job.coordinator.add(1007 * ms, Kind::node_lost, {}, "node1\nit was silent");
  job.node.add(1300 * ms, Kind::warning, {}, "this daemon was paused for 700 ms; nobody is put out for that time");
  job.node.add(1301 * ms, Kind::coordinator_lost, {}, "here:1\nit closed the connection");
  job.node.add(1400 * ms, Kind::coordinator_up, {}, "here:1");
  const auto lines = job.lines();
  EXPECT_THAT(lines[1], HasSubstr("Daemon node1 (process 2 on host) stood still for 700.0 ms: its last sign of life"));
  EXPECT_THAT(lines[2], HasSubstr("oordinator lost node node1: it was silent, 407.0 ms later"));
  EXPECT_THAT(lines[3], HasSubstr("406.0 ms later than the last sign of life"));
  EXPECT_THAT(lines, Contains(HasSubstr("Back: Daemon node1 had the coordinator again 800.0 ms later.")));
}

TEST(IncidentCause, ADaemonThatWasEndedIsNamed) {
  CutOff job;
  job.node.add(400 * ms, Kind::ended, {}, "signal 15");
  job.node.add(401 * ms, Kind::ended, {}, "in order");
  job.coordinator.add(402 * ms, Kind::node_lost, {}, "node1\nit closed the connection");
  job.r1.add(403 * ms, Kind::daemon_lost, {}, "it closed the connection");
  std::erase(job.all, &job.node);
  auto all = std::vector{job.node.recording()};
  job.ends();
  for (auto& one : job.recordings()) all.push_back(one);
  const auto lines = told(all);
  EXPECT_THAT(lines[1], HasSubstr("Daemon node1 (process 2 on host) ended at"));
  EXPECT_THAT(lines[1], HasSubstr(": signal 15."));
  EXPECT_THAT(lines[2], AllOf(HasSubstr("Coordinator lost node node1: it closed the connection, 2.0 ms later"),
                              HasSubstr("rainer r1.0 lost its daemon")));
  // Of its daemon there is no recording.
  EXPECT_THAT(told(job.recordings())[1], HasSubstr("Trainer r1.0 (process 11 on host) lost its daemon at"));
}

TEST(IncidentCause, ADaemonThatIsNotBackAfterTheCoordinatorsRestartIsNamed) {
  CutOff job;
  job.node.add(300 * ms, Kind::coordinator_up, {}, "here:1");
  job.node.add(500 * ms, Kind::coordinator_lost, {}, "here:1\nit closed the connection");
  job.node.add(2000 * ms, Kind::coordinator_up, {}, "there:1");
  EXPECT_THAT(job.lines()[1], AllOf(HasSubstr("Daemon node1 (process 2 on host) lost the coordinator at"),
                                    HasSubstr("it closed the connection; it was not back by then")));
  // Where nothing says why, it does not say that there is no recording.
  CutOff unexplained;
  EXPECT_THAT(unexplained.lines()[1], HasSubstr("Unknown: recordings of replica 1 go on after it, and do not say why"));
}

TEST(IncidentCause, WhereOneDaemonWasKilledAndAnotherOneStoodStillBothAreNamed) {
  CutOff job;
  MadeUp node2("node2", 1, 3);
  node2.add(1 * ms, Kind::rank_up, {.replica = 2, .number = 0, .a = 13});
  node2.add(900 * ms, Kind::beat);
  job.node.add(1300 * ms, Kind::warning, {}, "this daemon was paused for 700 ms; nobody is put out for that time");
  job.coordinator.made.events.back().text = "0\nwithout replicas 1, 2: not back after the coordinator's restart";
  job.r0.made.events.clear();
  job.ends();
  job.all.push_back(&node2);
  const auto lines = told(job.recordings());
  ASSERT_GT(lines.size(), 1u);
  EXPECT_THAT(lines[1], AllOf(HasSubstr("Daemon node2 (process 3 on host) ended without a word"),
                              HasSubstr("Daemon node1 (process 2 on host) stood still for 700.0 ms")));
}

TEST(IncidentCause, AProcessThatComesAgainAndIsSentAwayIsNotTheOneThatCameBack) {
  Job job;
  job.node.add(1100 * ms, Kind::rank_up, {.replica = 1, .number = 0, .a = 11, .b = 2});
  job.node.add(1103 * ms, Kind::rank_down, {.replica = 1, .number = 0, .a = 11}, "it has left: it was silent for 3 s");
  auto alone = job;
  alone.all = {&alone.coordinator, &alone.node, &alone.r0};
  alone.ends();
  EXPECT_THAT(told(alone.recordings()),
              Contains(HasSubstr("A process registered for it 94.0 ms later (process 11), and was gone 3.0 ms later: "
                                 "it has left: it was silent for 3 s. It is not back")));
  job.comes_back();
  job.ends();
  EXPECT_THAT(told(job.recordings()), Contains(HasSubstr("registered for it 204.0 ms later (process 12). Admitted")));
}

}  // namespace
}  // namespace rejoin::daemon
