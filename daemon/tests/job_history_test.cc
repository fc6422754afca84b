// What a coordinator remembers for people, and what metrics and page make of it.
#include "daemon/job_history.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <numeric>

#include "base/recent_longest.h"
#include "daemon/metrics.h"
#include "daemon/overview.h"
#include "daemon/status_pages.h"
#include "daemon/tests/made_up_job.h"

namespace rejoin::daemon {
namespace {

using namespace std::chrono_literals;
using Cause = JobHistory::Cause;
using nlohmann::json;
using testing::HasSubstr, testing::Not;

std::uint64_t count(const Histogram& of) { return std::accumulate(of.counts().begin(), of.counts().end(), 0ull); }

TEST(JobHistory, TellsWhatALossCostAndHowLongTheReplicaWasAway) {
  TellsHistory job;
  job.begins(1, "ccc");
  job.steps(20);
  job.now += 500ms;
  job.begins(2, "c.c");
  job.steps(1, 800ms);  // 1.3 s in all
  const auto& failure = job.history.last_failure();
  ASSERT_TRUE(failure && failure->recovery && failure->cost);
  EXPECT_EQ(failure->cause, Cause::lost);
  EXPECT_EQ(*failure->recovery, Duration(800ms));
  EXPECT_EQ(*failure->cost, Duration(300ms));
  EXPECT_EQ(count(job.history.recovery_seconds()), 1u);
  EXPECT_EQ(job.history.steps().back().broken, 1u);
  job.steps(5);
  job.begins(3, "cjc");
  job.steps(4);
  EXPECT_FALSE(job.history.median_absence());
  job.begins(4, "ccc");
  job.steps(1);
  EXPECT_EQ(job.history.median_absence(), Duration(9800ms));
  EXPECT_EQ(job.history.epochs_by(Cause::joined), 1u);
  EXPECT_EQ(job.history.epochs_by(Cause::promoted), 1u);
  EXPECT_EQ(count(job.history.step_seconds()), 31u);
  const auto effective = job.history.effective(job.now, true);
  EXPECT_EQ(effective.total, Duration(31300ms));
  EXPECT_EQ(effective.lost, Duration(300ms));
}

TEST(JobHistory, NamesEachEpochByWhatItChanges) {
  const std::vector<std::pair<std::string, Cause>> epochs{
      {"cc.", Cause::start},  {"c..", Cause::lost},     {"cj.", Cause::joined},   {"cc.", Cause::promoted},
      {"cs.", Cause::silent}, {"cc.", Cause::returned}, {"cc.", Cause::repeated}, {"c.j", Cause::lost},
      {"...", Cause::lost},   {"ccc", Cause::start}};
  JobHistory history(3);
  for (std::size_t i = 0; i < epochs.size(); ++i) {
    history.on_records({epoch(i + 1, 1, epochs[i].first)}, TimePoint(1s));
    EXPECT_STREQ(JobHistory::name(history.epochs().back().cause), JobHistory::name(epochs[i].second)) << i;
  }
  proto::LogRecord dropped;
  dropped.mutable_dropped()->set_replica(1);
  history.on_records({dropped, epoch(11, 1, "c.c")}, TimePoint(1s));
  EXPECT_EQ(history.epochs().back().cause, Cause::dropped);
  auto upgraded = epoch(12, 1, "c.c");
  upgraded.mutable_epoch()->set_protocol(16);
  history.on_records({upgraded}, TimePoint(1s));
  EXPECT_EQ(history.epochs().back().cause, Cause::protocol);
}

TEST(JobHistory, WhatWasDecidedBeforeHasNoTimesAndIsShownAllTheSame) {
  JobHistory history(2);
  history.on_records({epoch(1, 1, "cc"), commit(1), commit(2), epoch(2, 3, "c.")}, {});
  EXPECT_EQ(history.steps().size(), 2u);
  EXPECT_EQ(history.states(), "c.");
  EXPECT_EQ(count(history.step_seconds()), 0u);
  EXPECT_EQ(history.epochs_by(Cause::lost), 0u);  // by this coordinator
  history.on_lead(TimePoint(10s));
  history.on_records({commit(3)}, TimePoint(12s));
  EXPECT_EQ(history.steps().back().took, Duration(2s));
  EXPECT_EQ(history.effective(TimePoint(12s), true).total, Duration(2s));
}

TEST(RecentLongest, IsOfTheLastTenToTwentySeconds) {
  RecentLongest longest;
  EXPECT_EQ(longest.at(TimePoint(100s)), Duration{});
  longest.add(5ms, TimePoint(100s));
  longest.add(9ms, TimePoint(101s));
  longest.add(2ms, TimePoint(102s));
  EXPECT_EQ(longest.at(TimePoint(109s)), Duration(9ms));
  longest.add(1ms, TimePoint(111s));
  EXPECT_EQ(longest.at(TimePoint(111s)), Duration(9ms));
  longest.add(1ms, TimePoint(122s));
  EXPECT_EQ(longest.at(TimePoint(122s)), Duration(1ms));
  EXPECT_EQ(longest.at(TimePoint(150s)), Duration{});
}

proto::Report report(std::uint32_t replica, const std::string& node) {
  proto::Report told;
  told.set_replica(replica);
  told.set_node(node);
  return told;
}

TEST(JobHistory, OfDaemonsItKeepsTheLatestForAWhileAndNoMoreThanSoMany) {
  JobHistory history(1024);
  history.on_report(report(0, "a"), TimePoint(1s));
  history.on_report(report(0, "a"), TimePoint(2s));
  history.on_report(report(1024, "a"), TimePoint(2s));  // there is no such replica
  EXPECT_EQ(history.reports(TimePoint(2s)).size(), 1u);
  for (int i = 0; i < 1000; ++i) history.on_report(report(1, std::to_string(i)), TimePoint(2s));
  EXPECT_EQ(history.reports(TimePoint(2s)).size(), 1 + JobHistory::kMostNodes);
  EXPECT_TRUE(history.reports(TimePoint(20s)).empty());
  history.on_report(report(1, "later"), TimePoint(20s));
  EXPECT_EQ(history.reports(TimePoint(20s)).size(), 1u);
}

TEST(JobHistory, TwoDaemonsOfOneNameAreNoticedAndOneThatWasStartedAgainIsNone) {
  JobHistory history(4);
  const auto tell = [&](std::uint64_t daemon, std::uint32_t replica, int second) {
    auto told = report(replica, "node7");
    told.set_daemon(daemon);
    history.on_report(told, TimePoint(std::chrono::seconds(second)));
  };
  for (int second = 1; second < 5; ++second) tell(1, 0, second), tell(1, 1, second);
  for (int second = 5; second < 30; ++second) tell(2, 0, second);
  EXPECT_TRUE(history.twins().empty());
  for (int second = 30; second < 33; ++second) tell(2, 0, second), tell(3, 1, second);
  EXPECT_TRUE(history.twins().contains("node7"));
}

// A replica of 512 nodes, as of a job of 24 of them; nobody has given them names.
TEST(JobHistory, ADaemonIsFoundAmongManyOfOneName) {
  JobHistory history(24);
  for (int second = 1; second < 30; ++second)
    for (std::uint64_t daemon = 1; daemon <= 512; ++daemon) {
      auto told = report(3, "node");
      told.set_daemon(daemon);
      told.mutable_slowest()->set_rank(static_cast<std::uint32_t>(daemon));
      told.mutable_slowest()->set_gap_us(daemon == 500 ? 90'000 : 1000);
      history.on_report(told, TimePoint(std::chrono::seconds(second)));
    }
  EXPECT_EQ(history.reports(TimePoint(30s)).size(), 512u);
  const auto slow = history.slow_hop(TimePoint(30s));
  ASSERT_TRUE(slow);
  EXPECT_EQ(slow->rank, 500u);
}

// As a coordinator that leads has it.
json status_of_coordinator(bool leads = true) {
  return {
      {"coordinator_role",
       {{"epoch", 4},
        {"committed", 31},
        {"job", "00000000000000ab"},
        {"finished", false},
        {"nodes", 3},
        {"rejected", 2},
        {"strangers", 0},
        {"waiting_for", json::array()},
        {"audit",
         {{"period", 7},
          {"rounds", 4},
          {"result_differences", 1},
          {"state_differences", 0},
          {"drift_reports", 0},
          {"last_difference", ""}}},
        {"stopped", ""},
        {"out", json::array()},
        {"alarms", json::array()},
        {"refused", json::array()},
        {"blocked_on", json::array()},
        {"stragglers",
         json::array({{{"what", "compute"}, {"replica", 2}, {"times", 1.5}, {"since_step", 9}, {"for_ms", 8000}}})},
        {"members", json::array()},
        {"neighbourhoods", json::array()},
        {"orders_by_round_trips", true},
        {"balance", {{"on", true}, {"at_least", 0.5}, {"at_most", 1.5}, {"in_force", true}}},
        {"steps_rolled_back", 0},
        {"versions",
         {{"protocol", 15},
          {"mixed", true},
          {"oldest", 15},
          {"newest", 16},
          {"coordinators", 16},
          {"release", "0.2.0"},
          {"nodes", {{{"protocol", 16}, {"release", "0.2.0"}, {"count", 3}, {"some", {"a", "b", "c"}}}}},
          {"ranks",
           {{{"protocol", 15}, {"release", "0.1.0"}, {"daemon_release", "0.1.0"}, {"count", 2}, {"some", {"0.0"}}},
            {{"protocol", 15}, {"release", "0.1.0"}, {"daemon_release", "0.2.0"}, {"count", 1}, {"some", {"1.0"}}}}}}},
        {"store", {{"kind", "file"}, {"leads", leads}, {"write_us", {{"last", 1}, {"mean", 1}, {"longest", 1}}}}}}}};
}

TEST(JobHistory, AJobThatStandsStillFromTheStartOfItsCoordinatorOnDoesNotGetOn) {
  JobHistory history(2);
  history.on_records({epoch(1, 1, "cc"), commit(1)}, {});
  history.on_lead(TimePoint(1h));
  const json status = status_of_coordinator();
  const auto state = [&](TimePoint at) {
    return overview(status, &history, at).at("coordinator").at("training").at("state").get<std::string>();
  };
  EXPECT_EQ(state(TimePoint(1h) + 9min), "starting");
  EXPECT_EQ(history.effective(TimePoint(1h) + 9min, true).lost, Duration{});
  EXPECT_EQ(state(TimePoint(1h) + 11min), "waiting");
  EXPECT_EQ(history.effective(TimePoint(1h) + 11min, true).lost, Duration(10min));
  history.on_records({commit(2)}, TimePoint(1h) + 12min);
  EXPECT_EQ(history.effective(TimePoint(1h) + 12min, true).lost, Duration(11min));
}

TEST(Metrics, HaveAbsentReplicasHistogramsAndCountersThatAreCounters) {
  TellsHistory job;
  job.begins(1, "ccc");
  job.steps(3);
  job.begins(2, "c.j");
  job.steps(1);
  job.history.on_append(30ms);
  json status = status_of_coordinator();
  status["refused"] = refusals_json(std::array<std::uint64_t, 2>{5, 0});
  const std::string text = metrics_text(status, &job.history, job.now);
  for (const char* line : {"rejoin_replica_state{replica=\"1\",state=\"absent\"} 1\n",
                           "rejoin_replica_state{replica=\"2\",state=\"absent\"} 0\n",
                           "rejoin_replica_state{replica=\"2\",state=\"catching_up\"} 1\n",
                           "rejoin_replicas{state=\"contributor\"} 1\n",
                           "# TYPE rejoin_epochs_total counter\n",
                           "rejoin_epochs_total{reason=\"lost\"} 1\n",
                           "rejoin_epochs_total{reason=\"silent\"} 0\n",
                           "rejoin_step_duration_seconds_bucket{le=\"1\"} 4\n",
                           "rejoin_recovery_duration_seconds_count 1\n",
                           "rejoin_log_append_duration_seconds_bucket{le=\"0.05\"} 1\n",
                           "rejoin_log_append_duration_seconds_bucket{le=\"0.025\"} 0\n",
                           "rejoin_gradient_differences_total 1\n",
                           "rejoin_job_protocol 15\n",
                           "rejoin_job_mixed 1\n",
                           "rejoin_job_nodes{protocol=\"16\",release=\"0.2.0\"} 3\n",
                           "rejoin_job_ranks{protocol=\"15\",release=\"0.1.0\"} 3\n",  // under whichever daemons
                           "rejoin_straggler_times{replica=\"2\",what=\"compute\"} 1.5\n",
                           "rejoin_stragglers 1\n",
                           "rejoin_build_info{protocol=",
                           "rejoin_rejected_messages_total{by=\"coordinator\"} 2\n",
                           "rejoin_refused_total{by=\"daemon\",reason=\"key\"} 5\n",
                           "rejoin_refused_total{by=\"daemon\",reason=\"memory_access\"} 0\n"})
    EXPECT_THAT(text, HasSubstr(line));
  EXPECT_THAT(text, Not(testing::ContainsRegex("# TYPE rejoin_[a-z_]*_total gauge")));
  const std::string standby = metrics_text(status_of_coordinator(false), &job.history, job.now);
  EXPECT_THAT(standby, HasSubstr("rejoin_leads 0\n"));
  EXPECT_THAT(standby, Not(HasSubstr("rejoin_replica_state")));
}

// One gap is none: a hop is slow that stands out for longer than a gap is told of.
TEST(JobHistory, NamesAHopThatStandsOutForAWhile) {
  TellsHistory job;
  job.begins(1, "ccc");
  const auto tell = [&](int seconds, std::uint64_t gap_us) {
    for (; seconds > 0; --seconds) {
      job.steps(1);
      for (std::uint32_t to = 0; to < 3; ++to) {
        proto::Report told = report(to, "n" + std::to_string(to));
        told.mutable_slowest()->set_from((to + 2) % 3);
        told.mutable_slowest()->set_gap_us(to == 1 ? gap_us : 2000);
        job.history.on_report(told, job.now);
      }
    }
  };
  tell(30, 2500);
  EXPECT_FALSE(job.history.slow_hop(job.now));
  tell(15, 80'000);
  EXPECT_FALSE(job.history.slow_hop(job.now));
  tell(10, 80'000);
  const auto slow = job.history.slow_hop(job.now);
  ASSERT_TRUE(slow);
  EXPECT_EQ(slow->replica, 1u);
  EXPECT_EQ(slow->from, 0u);
  EXPECT_EQ(slow->gap_us, 80'000u);
  EXPECT_EQ(slow->usual_us, 2000u);
  EXPECT_EQ(slow->since_step, 32u) << "the first second after which a look finds it";
  EXPECT_FALSE(job.history.slow_hop(job.now + 30s)) << "nobody tells any more";
  tell(2, 3000);
  EXPECT_FALSE(job.history.slow_hop(job.now));
}

// The largest job there is, with an epoch for each step and texts without an end.
TEST(Overview, IsOfBoundedSizeAndSoAreTheMetrics) {
  constexpr std::uint32_t replicas = 1024;
  JobHistory history(replicas);
  std::string states(replicas, 'c');
  const std::string endless(5000, 'x');
  for (std::uint64_t step = 1; step <= 600; ++step) {
    for (std::size_t r = step % 2; r < replicas; r += 2) states[r] = states[r] == 'c' ? 'j' : 'c';
    history.on_records({epoch(step, step, states, endless), commit(step)}, TimePoint(std::chrono::seconds(step)));
  }
  EXPECT_LE(history.epochs().size(), JobHistory::kMostEpochs);
  EXPECT_EQ(history.steps().size(), JobHistory::kSteps);
  json status = status_of_coordinator();
  auto& c = status.at("coordinator_role");
  for (const char* list : {"waiting_for", "alarms"})
    for (int i = 0; i < 2000; ++i) c.at(list).push_back(endless);
  for (std::uint32_t r = 0; r < replicas; ++r) {
    c.at("out").push_back({{"replica", r}, {"reason", endless}, {"next", endless}});
    proto::Report told = report(r, endless);
    told.mutable_stream();
    told.mutable_slowest()->set_gap_us(r);
    for (int i = 0; i < 100; ++i) told.add_rails()->set_peers(1);
    history.on_report(told, TimePoint(600s));
  }
  const json o = overview(status, &history, TimePoint(600s));
  EXPECT_LT(o.dump().size(), 1 << 20);
  EXPECT_EQ(o.at("coordinator").at("hops").at("rows").at(0).at("gap_us"), replicas - 1);
  EXPECT_EQ(o.at("coordinator").at("out").at("count"), replicas);
  const std::string text = metrics_text(status, &history, TimePoint(600s));
  EXPECT_LT(std::ranges::count(text, '\n'), 4 * replicas + 250);
}

TEST(Overview, SaysWhereMembersAreWhereTheyOrRoundTripsTell) {
  const JobHistory history(4);
  json status = status_of_coordinator();
  auto& c = status.at("coordinator_role");
  const auto told = [&] { return overview(status, &history, TimePoint(1s)).at("coordinator"); };
  const json nothing{{"rows", json::array()}, {"count", 0}};
  for (int replica : {0, 2, 1, 3})
    c.at("members").push_back({{"replica", replica},
                               {"role", replica == 3 ? "catching_up" : "contributor"},
                               {"round_trip_us", {{"nearest", 128}, {"farthest", 128}}}});
  EXPECT_EQ(told().at("locations"), nothing) << "all are near each other";
  c.at("neighbourhoods") = {{0, 2}, {1, 3}};
  json o = told();
  EXPECT_EQ(o.at("neighbourhoods").at("rows"), json({"0 2", "1 3"}));
  EXPECT_EQ(o.at("locations").at("count"), 4);
  EXPECT_EQ(o.at("locations").at("rows").at(3),
            json({{"replica", 3}, {"catches_up", true}, {"round_trip_us", {{"nearest", 128}, {"farthest", 128}}}}));
  c.at("neighbourhoods") = json::array();
  c.at("members").at(1)["location"] = "dc/a";
  o = told();
  EXPECT_EQ(o.at("neighbourhoods"), nothing);
  EXPECT_EQ(o.at("locations").at("rows").at(1), json({{"replica", 2}, {"catches_up", false}, {"location", "dc/a"}}));
}

TEST(StatusPages, AnswerByTheirPathsAndKeepWhatTheyMadeForAMoment) {
  json status{{"node_role", {{"coordinator", {{"connected", false}, {"address", "a:1"}, {"reason", "\xff none"}}}}}};
  int made = 0;
  TimePoint now{1h};
  StatusPages pages({.status =
                         [&] {
                           ++made;
                           return status;
                         },
                     .now = [&] { return now; }});
  EXPECT_THAT(*pages.answer("/status").body, HasSubstr("node_role"));  // whose bytes are no UTF-8
  pages.answer("/status");
  EXPECT_EQ(made, 1);
  now += 1s;
  pages.answer("/status");
  EXPECT_EQ(made, 2);
  EXPECT_EQ(pages.answer("/healthz").code, 200u);
  EXPECT_EQ(pages.answer("/readyz").code, 503u);
  EXPECT_THAT(*pages.answer("/readyz").body, HasSubstr("not connected with the coordinator at a:1"));
  EXPECT_EQ(made, 3);
  status["node_role"]["coordinator"]["connected"] = true;
  now += 1s;
  EXPECT_EQ(pages.answer("/readyz").code, 200u);
  EXPECT_EQ(pages.answer("/etc/passwd").code, 404u);
  const auto page = pages.answer("/");
  EXPECT_THAT(*page.body, testing::StartsWith("<!doctype html>"));
  EXPECT_THAT(page.policy, HasSubstr("script-src 'sha256-"));
  EXPECT_THAT(*page.body, Not(testing::ContainsRegex("https?://[a-z]")));  // nothing comes from elsewhere
}

}  // namespace
}  // namespace rejoin::daemon
