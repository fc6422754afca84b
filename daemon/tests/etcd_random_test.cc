// Two stores that claim and append at random while members of etcd die, stop and come back: whatever they were told
// is true of the log in the end.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "daemon/tests/etcd_support.h"

namespace rejoin::daemon {
namespace {

using Random = std::mt19937_64;

bool chance(Random& random, double of) { return std::bernoulli_distribution(of)(random); }

struct History {
  std::map<std::uint64_t, std::string> appended;  // position, entry: what a store was told to be there
  std::set<std::uint64_t> claims;                 // the tokens of those that were done
  int unknown = 0, fenced = 0, found = 0;         // outcomes; claims and appends that an earlier try had done
  int compactions = 0;
  std::size_t doubtful =
      0;  // appends that were fenced after an outcome that was unknown: compacted since, or never done
};

// Entries have a line each, and snapshots all lines. They are so long that a snapshot soon has several fragments.
std::string entry_of(const std::string& text) { return text + std::string(400, '.') + '\n'; }

void add_lines(std::vector<std::string>& to, std::string_view of) {
  for (std::size_t end = 0; !of.empty(); of.remove_prefix(end + 1)) {
    end = of.find('\n');
    to.emplace_back(of.substr(0, end + 1));
  }
}

// A coordinator that appends while it leads, and otherwise follows, and claims now and then.
struct Coordinator {
  Coordinator(asio::io_context& io, EtcdOptions options, std::string called, History& of, std::uint64_t seed)
      : store(std::move(*EtcdStore::create(io, std::move(options)))),
        name(std::move(called)),
        history(of),
        random(seed) {}

  void go_on() {
    if (!idle) return;
    if (again) return ask();
    if (over) return;
    if (behind || token == 0 || chance(random, 0.02)) return follow();
    request = {.kind = Kind::append, .token = token, .position = lines.size()};
    request.value = entry_of(fmt::format("{} {} {}", token, name, ++count));
    if (!lines.empty() && chance(random, 0.02)) {
      request.kind = Kind::compact;
      request.value = fmt::format("{}", fmt::join(lines, ""));
    }
    ask();
  }
  bool at_rest() const { return idle && !again; }

  // Until its outcome is known.
  void ask() {
    idle = false;
    store->submit(request, [this](const StoreAnswer& answer) {
      idle = true;
      const bool doubt = again;
      again = answer.outcome == Outcome::unknown;
      if (again) ++history.unknown;
      else heard(answer, doubt);
    });
  }
  void heard(const StoreAnswer& answer, bool doubt) {
    const bool claim = request.kind == Kind::claim;
    const bool found = answer.outcome == Outcome::refused && (claim ? answer.leader : answer.existing) == request.value;
    const bool done = answer.outcome == Outcome::done || found;
    history.found += found ? 1 : 0;
    if (claim) {
      token = done ? answer.leader_revision : 0;
      behind = true;
      if (done) history.claims.insert(token);
    } else if (done && request.kind == Kind::compact) {
      ++history.compactions;
    } else if (done) {
      history.appended[request.position] = request.value;
      lines.push_back(request.value);
    } else {
      ++history.fenced;
      history.doubtful += doubt && request.kind == Kind::append ? 1 : 0;
      token = 0;
    }
  }
  // What others have appended; a leader appends when it knows all of it.
  void follow() {
    idle = false;
    store->submit({.kind = Kind::read, .position = lines.size(), .recent = behind}, [this](const StoreAnswer& answer) {
      idle = true;
      if (answer.outcome == Outcome::unknown) return;
      if (!answer.snapshot.empty()) lines.clear();
      add_lines(lines, answer.snapshot);
      EXPECT_TRUE(answer.snapshot.empty() || lines.size() == answer.snapshot_position);
      for (const auto& [position, entry] : answer.entries) {
        EXPECT_EQ(position, lines.size());
        lines.push_back(entry);
      }
      behind = answer.more;
      if (over || !chance(random, 0.02)) return;
      request = {.kind = Kind::claim, .token = answer.leader_revision, .value = fmt::format("{} {}", name, ++count)};
      ask();
    });
  }

  std::unique_ptr<EtcdStore> store;
  const std::string name;
  History& history;
  Random random;
  std::uint64_t token = 0;
  std::vector<std::string> lines;  // what it knows of the log
  int count = 0;
  bool idle = true, again = false, behind = false, over = false;
  StoreRequest request;
};

// Kills or stops one member, and lets it come back before the next.
struct Chaos {
  test::EtcdCluster& etcd;
  Random random;
  std::optional<std::size_t> down;
  bool stopped = false;

  void turn() {
    if (down) {
      if (stopped) etcd.resume(*down);
      else etcd.restart(*down);
      down.reset();
      return;
    }
    down = std::uniform_int_distribution<std::size_t>(0, 2)(random);
    for (std::size_t i = 0; i < 3 && chance(random, 0.8); ++i)
      if (etcd.leads(i)) down = i;
    stopped = chance(random, 0.5);
    if (stopped) etcd.stop(*down);
    else etcd.kill(*down);
  }
};

// The log as etcd has it, with the revision in which each entry was created.
std::vector<etcd::KeyValue> log_of(asio::io_context& io, const EtcdOptions& options) {
  auto client = EtcdClient::create(io, options);
  etcd::TxnRequest transaction;
  auto& range = *transaction.add_success()->mutable_request_range();
  range.set_key(options.prefix + "log/");
  range.set_range_end(options.prefix + "log0");
  std::optional<std::vector<etcd::KeyValue>> log;
  while (!log) {
    bool answered = false;
    (*client)->transact(transaction, [&](Result<etcd::TxnResponse> answer) {
      answered = true;
      if (!answer) return;
      const auto& kvs = answer->responses(0).response_range().kvs();
      log.emplace(kvs.begin(), kvs.end());
    });
    if (!until(io, [&] { return answered; })) break;
  }
  return log.value_or(std::vector<etcd::KeyValue>{});
}

TEST(EtcdStoreAtRandom, WhatWasDoneIsInTheLogOnceAndNothingIsOfAFormerLeader) {
  SKIP_WITHOUT_ETCD();
  const std::uint64_t seed = test::seed_of_this_run();
  test::EtcdCluster etcd({.members = 3});
  asio::io_context io(1);
  const EtcdOptions options{
      .endpoints = etcd.endpoints(), .prefix = own_prefix(), .deadline = std::chrono::milliseconds(60)};
  History history;
  Coordinator a(io, options, "a", history, seed), b(io, options, "b", history, seed + 1);
  Chaos chaos{etcd, Random(seed + 2), {}};
  const auto go_on = [&] {
    for (Coordinator* each : {&a, &b}) each->go_on();
  };
  const TimePoint end = SteadyClock().now() + std::chrono::seconds(7);
  TimePoint turn = SteadyClock().now();
  EXPECT_TRUE(until(io, [&] {
    go_on();
    if (SteadyClock().now() < turn + std::chrono::milliseconds(300)) return SteadyClock().now() > end;
    turn = SteadyClock().now();
    chaos.turn();
    return false;
  }));
  if (chaos.down) chaos.turn();
  a.over = b.over = true;  // but for what is under way
  EXPECT_TRUE(until(io, [&] {
    go_on();
    return a.at_rest() && b.at_rest();
  }));

  // The whole log, and of its entries that are there yet when they were created.
  std::map<std::uint64_t, std::uint64_t> created;
  for (const auto& entry : log_of(io, options))
    created[std::stoull(entry.key().substr(entry.key().rfind('/') + 1))] =
        static_cast<std::uint64_t>(entry.create_revision());
  Coordinator reader(io, options, "reader", history, seed);
  reader.behind = reader.over = true;
  EXPECT_TRUE(until(io, [&] {
    if (reader.idle && reader.behind) reader.follow();
    return reader.idle && !reader.behind;
  }));
  const auto& log = reader.lines;
  const std::set<std::string> values(log.begin(), log.end());
  EXPECT_EQ(values.size(), log.size()) << "something is there twice";
  std::uint64_t newest = 0;
  for (std::size_t i = 0; i < log.size(); ++i) {
    const std::uint64_t token = std::stoull(log[i]);
    EXPECT_GE(token, newest) << "of a former leader, at " << i;
    newest = token;
    const auto claimed = history.claims.upper_bound(token);
    if (claimed != history.claims.end() && created.contains(i))
      EXPECT_LT(created[i], *claimed) << "after the claim of the next one, at " << i;
  }
  for (const auto& [position, entry] : history.appended)
    EXPECT_EQ(position < log.size() ? log[position] : "", entry) << "which was done";
  EXPECT_LE(log.size(), history.appended.size() + history.doubtful) << "others were asked until it was known";
  std::printf("%zu appends, %zu claims, %d of them found to be done; %d compactions; %d times fenced, %d unknown\n",
              log.size(), history.claims.size(), history.found, history.compactions, history.fenced, history.unknown);
  EXPECT_GT(history.compactions, 0);
  EXPECT_GT(log.size(), 20u);
  EXPECT_GT(history.claims.size(), 1u);
}

}  // namespace
}  // namespace rejoin::daemon
