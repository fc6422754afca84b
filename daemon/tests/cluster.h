// Several coordinators and their nodes over real sockets, with a store in memory.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>

#include "daemon/coordinators.h"
#include "daemon/replicated_server.h"
#include "daemon/tests/memory_store.h"
#include "membership/node.h"
#include "membership/rank.h"

namespace rejoin::daemon {

using namespace std::chrono_literals;
using membership::RankConnection;

inline constexpr auto kServersSilence = 1000ms;

// A daemon with the one rank of a replica, which reduces whatever the plan says at once.
struct TestNode {
  TestNode(asio::io_context& io, const std::string& addresses, std::uint32_t replica, const JobKeys& keys)
      : number(replica),
        machine(fmt::format("node{}", replica), kServersSilence, replica + 1),
        rank(ReplicaId(replica)),
        all(io, addresses, fmt::format("node{}", replica), keys, kServersSilence,
            [this](proto::LeaderView& view) { machine.write_hosts(view); },
            {.up =
                 [this] {
                   ++ups;
                   keep(machine.on_coordinator_up(now()));
                 },
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
  int evictions = 0, ups = 0;
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
    options.log_archives = log_archives;
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
  std::uint32_t log_archives = 0;
  MemoryStoreData store;
  std::vector<std::string> addresses, why_failed;
  std::vector<std::unique_ptr<ReplicatedServer>> servers;
  std::vector<std::unique_ptr<TestNode>> nodes;
};

}  // namespace rejoin::daemon
