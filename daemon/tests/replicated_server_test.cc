// Several coordinators and their nodes over real sockets, with a store in memory.
#include "daemon/replicated_server.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>

#include "daemon/coordinators.h"
#include "daemon/tests/memory_store.h"
#include "membership/node.h"
#include "membership/rank.h"

namespace rejoin::daemon {
namespace {

using namespace std::chrono_literals;
using membership::RankConnection;

constexpr auto kServersSilence = 1000ms;

// A daemon with the one rank of a replica, which reduces whatever the plan says at once.
struct TestNode {
  TestNode(asio::io_context& io, const std::string& addresses, std::uint32_t replica, const JobKeys& keys)
      : number(replica),
        machine(fmt::format("node{}", replica), kServersSilence, replica + 1),
        rank(ReplicaId(replica)),
        all(io, addresses, fmt::format("node{}", replica), keys, kServersSilence,
            [this](proto::LeaderView& view) { machine.write_hosts(view); },
            {.up = [this] { keep(machine.on_coordinator_up(now())); },
             .message = [this](const proto::ToNode& message) { keep(machine.on_coordinator_message(message, now())); },
             .down = [this] { keep(machine.on_coordinator_down()); },
             .over = [] { return false; },
             .rejected = [] {}}) {
    proto::FromNode up;
    auto& its = *up.mutable_rank_up();
    its.set_replica(number);
    its.set_instance(number + 100);
    its.set_plan_hash(3);
    its.set_digest(1);
    keep(machine.on_rank_message(kConnection, up, now()));
    all.connect();
  }
  static TimePoint now() { return SteadyClock().now(); }
  void keep(const membership::Node::Actions& actions) {
    for (const auto& message : actions.to_coordinator) all.send(message);
    for (const auto& [connection, message] : actions.to_ranks) hear(message);
  }
  void hear(const proto::ToNode& message) {
    if (message.has_registered()) rank.on_registered(Incarnation(message.registered().incarnation()));
    if (message.has_evicted()) ++evictions;
    if (message.has_waits()) waits = message.waits().why();
    if (message.has_peers()) {
      proto::FromNode links;
      links.mutable_links()->set_replica(number);
      links.mutable_links()->set_instance(number + 100);
      (void)peers.apply(message.peers());
      peers.incarnations(0).to(links.mutable_links()->mutable_incarnations());
      keep(machine.on_rank_message(kConnection, links, now()));
    }
    if (!message.has_plan()) return;
    if (rank.on_plan(message.plan()) == membership::Rank::Meaning::evicted) ++evictions;
    epochs = std::max(epochs, message.plan().epoch());
  }
  // Now and then: a step takes its time.
  void tick() {
    proto::FromNode message;
    message.mutable_heartbeat();
    keep(machine.on_rank_message(kConnection, message, now()));
    keep(machine.on_tick(now()));
    all.tick(now());
    if (machine.coordinator_up()) all.check(machine.coordinator_heard());
    if (!rank.member() || rank.reduced() || !rank.has_contributors()) return;
    rank.on_reduced();
    auto& done = *message.mutable_reduced();
    done.set_replica(number);
    done.set_epoch(rank.epoch().value);
    done.set_step(rank.step().value);
    membership::RankSet(0).to(done.mutable_ranks());
    keep(machine.on_rank_message(kConnection, message, now()));
  }
  static constexpr RankConnection kConnection{1};
  const std::uint32_t number;
  membership::Node machine;
  membership::Rank rank;
  membership::PeerTable peers;
  int evictions = 0;
  std::uint64_t epochs = 0;
  std::string waits;
  Coordinators all;
};

struct Cluster : testing::Test {
  Cluster() {
    char name[] = "/tmp/rejoin-several.XXXXXX";
    directory = ::mkdtemp(name);
    job.replicas = 2;
    job.ranks = 1;
    job.batch = 4;
    job.silence = kServersSilence;
    job.audit.on = false;
  }
  ~Cluster() override {
    nodes.clear();
    servers.clear();
    io.poll();
    std::filesystem::remove_all(directory);
  }
  std::string log_directory(std::size_t i) const { return fmt::format("{}/{}", directory, i); }

  Result<> start(std::size_t i, membership::Disk disk = membership::Disk::real()) {
    if (servers.size() <= i) servers.resize(i + 1), addresses.resize(i + 1, "127.0.0.1:0"), why_failed.resize(i + 1);
    ReplicatedServer::Options options;
    options.name = fmt::format("c{}", i);
    options.listen = addresses[i];
    options.job = job;
    options.per_snapshot = per_snapshot;
    options.log_compact = log_compact;
    options.log_directory = log_directory(i);
    options.disk = std::move(disk);
    options.kind = "memory";
    options.failed = [this, i](const Error& error) { why_failed[i] = error.message; };
    auto started = ReplicatedServer::start(io, std::move(options), std::make_unique<MemoryStore>(io, store), keys);
    if (!started) return tl::unexpected(started.error());
    servers[i] = std::move(*started);
    addresses[i] = servers[i]->address();
    return {};
  }
  void start_nodes() {
    const std::string list = fmt::format("{}", fmt::join(addresses, ","));
    for (std::uint32_t r = 0; r < job.replicas; ++r) nodes.push_back(std::make_unique<TestNode>(io, list, r, keys));
  }
  void end(std::size_t i) {
    io.poll();
    servers[i].reset();
  }
  std::optional<std::size_t> leader() const {
    for (std::size_t i = 0; i < servers.size(); ++i)
      if (servers[i] && servers[i]->machine().leading() != nullptr) return i;
    return std::nullopt;
  }
  std::uint64_t committed() const {  // as every node has heard
    std::uint64_t least = ~std::uint64_t{0};
    for (const auto& node : nodes) least = std::min(least, node->rank.committed().value);
    return least;
  }
  bool until(const std::function<bool()>& condition) {
    const TimePoint deadline = SteadyClock().now() + 30s;
    for (TimePoint tick{}; !condition();) {
      const TimePoint now = SteadyClock().now();
      if (now > deadline) return false;
      if (now - tick > 3ms) {
        tick = now;
        for (auto& node : nodes) node->tick();
      }
      io.run_one_for(1ms);
      io.poll();
      io.restart();
    }
    return true;
  }
  bool commit_more(std::uint64_t steps) {
    const std::uint64_t to = committed() + steps;
    return until([&] { return committed() >= to; });
  }
  std::vector<proto::LogRecord> copy_of(std::size_t i) const {
    auto records = membership::parse_one_file(log_directory(i) + "/decisions.log");
    EXPECT_TRUE(records) << records.error().message;
    return records ? records->records : std::vector<proto::LogRecord>{};
  }

  asio::io_context io{1};
  JobKeys keys{JobKey("0123456789abcdef")};
  std::string directory;
  membership::JobConfig job;
  std::uint64_t per_snapshot = 1024, log_compact = 64 * MiB;
  MemoryStoreData store;
  std::vector<std::string> addresses, why_failed;
  std::vector<std::unique_ptr<ReplicatedServer>> servers;
  std::vector<std::unique_ptr<TestNode>> nodes;
};

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
  const std::uint64_t before = committed();
  const TimePoint begun = SteadyClock().now();
  ASSERT_TRUE(until([&] { return SteadyClock().now() - begun > kServersSilence; }));
  EXPECT_EQ(committed(), before);
  store.stands_still = false;
  ASSERT_TRUE(commit_more(5));
  EXPECT_EQ(nodes[0]->epochs, epochs) << "the same members in the same epoch";
  for (const auto& node : nodes) EXPECT_EQ(node->evictions, 0);
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
