// Several coordinators and their nodes over real sockets, with a store in memory.
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <nlohmann/json.hpp>

#include "daemon/log_transfer.h"
#include "daemon/tests/cluster.h"

namespace rejoin::daemon {
namespace {

TEST_F(Cluster, AnotherOneTakesOverWhereTheLeaderEndsAndNobodyIsPutOut) {
  for (std::size_t i = 0; i < 3; ++i) ASSERT_TRUE(start(i));
  start_nodes();
  ASSERT_TRUE(commit_more(10));
  for (int round = 0; round < 3; ++round) {
    const auto first = leader();
    ASSERT_TRUE(first);
    const std::uint64_t before = committed();
    end(*first);
    ASSERT_TRUE(commit_more(10));
    const auto second = leader();
    ASSERT_TRUE(second);
    EXPECT_NE(*second, *first);
    const auto status = servers[*second]->status();
    EXPECT_EQ(status.at("store").at("leads"), true);
    EXPECT_EQ(status.at("store").at("leader").at("name"), fmt::format("c{}", *second));
    EXPECT_GE(status.at("store").at("takeovers"), 1);
    EXPECT_GT(status.at("store").at("write_us").at("count"), 0);
    EXPECT_GE(status.at("committed"), before);
    ASSERT_TRUE(start(*first));
  }
  for (const auto& node : nodes) EXPECT_EQ(node->evictions, 0);
  // A standby's status is that of what it has read.
  for (std::size_t i = 0; i < 3; ++i) {
    if (i == leader()) continue;
    ASSERT_TRUE(
        until([&] { return servers[i]->machine().leader().term() == servers[*leader()]->machine().leader().term(); }));
    const auto status = servers[i]->status();
    EXPECT_EQ(status.at("store").at("leads"), false);
    EXPECT_EQ(status.at("store").at("leader").at("name"), fmt::format("c{}", *leader()));
    EXPECT_TRUE(status.at("waiting_for").empty());
  }
}

TEST_F(Cluster, AStoreThatStandsStillStopsTheStepsAndPutsNobodyOut) {
  for (std::size_t i = 0; i < 2; ++i) ASSERT_TRUE(start(i));
  start_nodes();
  ASSERT_TRUE(commit_more(5));
  const auto at_work = leader();
  const std::uint64_t epochs = nodes[0]->epochs;
  store.stands_still = true;
  ASSERT_TRUE(until([&] { return servers[*at_work]->machine().stalled() && !nodes[1]->waits.empty(); }));
  const auto told = servers[*at_work]->status().at("store");
  EXPECT_EQ(told.at("stalled"), true);
  EXPECT_EQ(told.at("failing"), "no endpoint answered in time");
  EXPECT_GT(told.at("failing_ms"), 0);
  EXPECT_NE(nodes[1]->waits.find("store"), std::string::npos) << nodes[1]->waits;
  EXPECT_NE(nodes[1]->all.status(true).at("reason"), "");
  const std::uint64_t before = committed();
  const TimePoint begun = SteadyClock().now();
  ASSERT_TRUE(until([&] { return SteadyClock().now() - begun > kServersSilence; }));
  EXPECT_EQ(committed(), before);
  store.stands_still = false;
  ASSERT_TRUE(commit_more(5));
  EXPECT_EQ(nodes[0]->epochs, epochs) << "the same members in the same epoch";
  for (const auto& node : nodes) EXPECT_EQ(node->evictions, 0);

  // A standby reads who is out, and knows neither since when nor what comes next.
  nodes[1]->keep(nodes[1]->machine.on_rank_gone(TestNode::kConnection, "it ended", membership::Node::Gone::ended));
  const auto out_at = [&](std::size_t i) { return servers[i]->status().at("out"); };
  ASSERT_TRUE(until([&] { return !out_at(*at_work).empty() && !out_at(1 - *at_work).empty(); }));
  EXPECT_NE(out_at(*at_work).at(0).at("next"), "");
  EXPECT_TRUE(out_at(*at_work).at(0).contains("for_ms"));
  EXPECT_EQ(out_at(1 - *at_work).at(0).at("next"), "");
  EXPECT_FALSE(out_at(1 - *at_work).at(0).contains("for_ms"));
}

TEST_F(Cluster, AnswersThatAreLostAreFoundInTheStore) {
  for (std::size_t i = 0; i < 2; ++i) ASSERT_TRUE(start(i));
  start_nodes();
  for (int round = 0; round < 5; ++round) {
    ASSERT_TRUE(commit_more(5));
    store.lose_answers = 1 + round;
  }
  ASSERT_TRUE(commit_more(5));
  EXPECT_EQ(store.lose_answers, 0);
}

// Each record of the store is in each copy once, whatever was restarted when, and whatever the store has deleted.
TEST_F(Cluster, TheCopyHasEveryDecisionOnceAlsoAfterRestarts) {
  per_snapshot = 10;
  for (std::size_t i = 0; i < 2; ++i) ASSERT_TRUE(start(i));
  start_nodes();
  ASSERT_TRUE(commit_more(8));
  for (int round = 0; round < 3; ++round) {
    const std::size_t one = static_cast<std::size_t>(round) % 2;
    end(one);
    ASSERT_TRUE(commit_more(round == 0 ? 25 : 3));  // the first time it misses what the store has deleted
    ASSERT_TRUE(start(one));
    ASSERT_TRUE(commit_more(3));
  }
  nodes.clear();
  ASSERT_TRUE(until([&] {
    return servers[0]->machine().position() == store.end() && servers[1]->machine().position() == store.end();
  }));
  const std::uint64_t end_of_store = store.end();
  EXPECT_GT(store.snapshot_position, 0u);
  for (std::size_t i = 0; i < 2; ++i) {
    end(i);
    const auto copy = LogCopy::open(log_directory(i));
    ASSERT_TRUE(copy) << copy.error().message;
    EXPECT_EQ((*copy)->position(), end_of_store) << i;
    EXPECT_NE((*copy)->job(), 0u);
    auto recovered = membership::Coordinator(job);
    const auto all = copy_of(i);
    const auto good = recovered.recover(all, SteadyClock().now());
    EXPECT_TRUE(good) << good.error().message;
    const auto read = membership::read_log(log_directory(i) + "/decisions.log");
    ASSERT_TRUE(read) << read.error().message;
    EXPECT_EQ(read->size(), all.size());
    EXPECT_TRUE(i != 0 || all.front().has_snapshot());
  }
}

TEST_F(Cluster, TheCopyIsCompactedInUseAndItsArchivesHaveWhatWasInIt) {
  per_snapshot = 50;
  log_compact = 2 * KiB;
  for (std::size_t i = 0; i < 2; ++i) ASSERT_TRUE(start(i));
  start_nodes();
  const auto twice = [&](std::size_t i) { return std::filesystem::exists(log_directory(i) + "/decisions.2.log"); };
  // A thread of each server's writes its copy, and may be behind.
  ASSERT_TRUE(until([&] { return committed() >= 100 && twice(0) && twice(1); }));
  nodes.clear();
  ASSERT_TRUE(until([&] {
    return servers[0]->machine().position() == store.end() && servers[1]->machine().position() == store.end();
  }));
  const auto steps = servers[0]->machine().following().committed().value;
  for (std::size_t i = 0; i < 2; ++i) {
    end(i);
    const auto copy = copy_of(i);
    ASSERT_FALSE(copy.empty());
    EXPECT_TRUE(copy.front().has_snapshot()) << i;
    EXPECT_LT(copy.size(), steps) << i << ": most are in the archives alone";
    membership::TrainedSteps trained;
    const auto read = membership::for_each_record(log_directory(i) + "/decisions.log",
                                                  [&](const proto::LogRecord& record) { trained.take(record); });
    ASSERT_TRUE(read) << read.error().message;
    EXPECT_EQ(trained.by_step().size(), steps) << i;
    const auto again = LogCopy::open(log_directory(i));
    ASSERT_TRUE(again) << again.error().message;
    EXPECT_EQ((*again)->position(), store.end()) << i;
  }
}

TEST_F(Cluster, ACopyThatIsAheadOfTheStoreIsRefused) {
  ASSERT_TRUE(start(0));
  start_nodes();
  ASSERT_TRUE(commit_more(3));
  nodes.clear();
  end(0);
  store = {};
  ASSERT_TRUE(start(0));
  ASSERT_TRUE(until([&] { return !why_failed[0].empty(); }));
  EXPECT_NE(why_failed[0].find("the store holds nothing of this job, and the decisions in --log-directory are "),
            std::string::npos)
      << why_failed[0];
  EXPECT_NE(why_failed[0].find("'rejoin log import'"), std::string::npos) << why_failed[0];
}

// The documented way back leads to where they were.
TEST_F(Cluster, AStoreThatBecomesAnotherJobsEndsThemAndTheirCopiesHaveTheirJobStill) {
  for (std::size_t i = 0; i < 2; ++i) ASSERT_TRUE(start(i));
  start_nodes();
  ASSERT_TRUE(commit_more(3));
  const std::uint64_t own = servers[*leader()]->machine().following().job();
  ASSERT_TRUE(until([&] {
    return std::ranges::all_of(servers, [&](const auto& one) { return one->machine().following().job() == own; });
  })) << "who knows of no job yet takes any";
  const auto import = [&](MemoryStoreData& into, const std::string& log) {
    asio::io_context alone{1};
    MemoryStore other(alone, into);
    const auto done = import_log(alone, other, log, false, "job x in memory", "/rejoin/x/", 20ms);
    EXPECT_TRUE(done) << done.error().message;
  };
  {
    auto log = membership::Log::open(directory + "/other");
    proto::LogRecord snapshot;
    auto& of = *snapshot.mutable_snapshot();
    of.mutable_job()->set_replicas(2), of.mutable_job()->set_ranks(1);
    of.mutable_job()->set_batch(4), of.mutable_job()->set_id(own + 1);
    of.set_position(1000);
    ASSERT_TRUE(log && log->append({snapshot}));
  }
  MemoryStoreData others;
  import(others, directory + "/other/decisions.log");
  others.leader_revision += store.revision;
  store = others;
  ASSERT_TRUE(until([&] { return !why_failed[0].empty() && !why_failed[1].empty(); }));
  std::pair<std::uint64_t, std::size_t> longest;
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_NE(
        why_failed[i].find(fmt::format("are of job {:016x} now, and this coordinator is of job {:016x}", own + 1, own)),
        std::string::npos)
        << why_failed[i];
    end(i);
    const auto copy = LogCopy::open(log_directory(i));
    ASSERT_TRUE(copy) << copy.error().message;
    EXPECT_EQ((*copy)->job(), own);
    longest = std::max(longest, {(*copy)->position(), i});
  }
  store = {};
  import(store, log_directory(longest.second) + "/decisions.log");
  for (std::size_t i = 0; i < 2; ++i) ASSERT_TRUE(start(i));
  ASSERT_TRUE(commit_more(3));
  for (const auto& node : nodes) EXPECT_EQ(node->evictions, 0);
}

TEST_F(Cluster, ALogThatWasCompactedWithoutAStoreIsNoCopy) {
  {
    auto log = membership::Log::open(log_directory(0));
    proto::LogRecord snapshot;
    snapshot.mutable_snapshot()->mutable_job()->set_id(7);
    ASSERT_TRUE(log && log->append({snapshot}));
  }
  const auto refused = start(0);
  ASSERT_FALSE(refused);
  for (const char* part : {"'rejoin log import'", "another --log-directory"})
    EXPECT_NE(refused.error().message.find(part), std::string::npos) << refused.error().message;
}

// A disk that can be full, and one that can stand still.
struct Tap {
  std::mutex mutex;
  std::condition_variable wake;
  bool full = false, still = false;
  membership::Disk disk() {
    auto disk = membership::Disk::real();
    disk.write = [this](int fd, const void* bytes, std::size_t size, off_t at) -> ssize_t {
      std::unique_lock lock(mutex);
      wake.wait(lock, [this] { return !still; });
      return full ? (errno = ENOSPC, -1) : ::pwrite(fd, bytes, size, at);
    };
    return disk;
  }
  void set(bool now_full, bool now_still) {
    const std::lock_guard lock(mutex);
    full = now_full;
    still = now_still;
    wake.notify_all();
  }
};

TEST_F(Cluster, ADiskOfTheCopyThatIsSlowOrFullStopsNoDecisions) {
  Tap tap;
  ASSERT_TRUE(start(0, tap.disk()));
  start_nodes();
  ASSERT_TRUE(commit_more(3));
  tap.set(false, true);
  ASSERT_TRUE(commit_more(20));
  EXPECT_EQ(servers[0]->status().at("store").at("copy"), "");
  tap.set(true, false);
  ASSERT_TRUE(commit_more(3));
  ASSERT_TRUE(until([&] { return servers[0]->status().at("store").at("copy") != ""; }));
  ASSERT_TRUE(commit_more(20));
  const auto status = servers[0]->status();
  EXPECT_NE(status.at("store").at("copy").get<std::string>().find("No space left"), std::string::npos);
  ASSERT_EQ(status.at("alarms").size(), 1u);
  EXPECT_NE(status.at("alarms").at(0).get<std::string>().find("is given up"), std::string::npos);
  const std::uint64_t before = copy_of(0).size();
  end(0);
  ASSERT_TRUE(start(0));
  ASSERT_TRUE(commit_more(3));
  nodes.clear();
  ASSERT_TRUE(until([&] { return servers[0]->machine().position() == store.end(); }));
  end(0);
  EXPECT_EQ(copy_of(0).size(), store.end()) << "it has gone on behind " << before;
}

}  // namespace
}  // namespace rejoin::daemon
