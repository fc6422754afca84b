// Each request to a store in etcd, and each refusal, with one member.
#include "daemon/etcd_store.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "base/bytes.h"
#include "base/fail.h"
#include "daemon/etcd_request.h"
#include "daemon/tests/etcd_support.h"

namespace rejoin::daemon {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

class EtcdStoreRequests : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (!test::EtcdCluster::program().empty()) etcd = std::make_unique<test::EtcdCluster>(test::EtcdCluster::Options{});
  }
  static void TearDownTestSuite() { etcd.reset(); }
  void SetUp() override { SKIP_WITHOUT_ETCD(); }

  EtcdOptions options() const {
    return {.endpoints = etcd->endpoints(), .prefix = prefix, .deadline = std::chrono::seconds(2)};
  }
  static std::string etcdctl(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {test::EtcdCluster::program("etcdctl"), "--endpoints", etcd->endpoint(0)});
    return test::run(std::move(arguments), {"ETCDCTL_API=3"}).output;
  }
  std::size_t keys(const std::string& behind) const {
    const std::string listed = etcdctl({"get", "--prefix", "--keys-only", prefix + behind});
    std::size_t count = 0;
    for (std::size_t at = 0; (at = listed.find(prefix, at)) != listed.npos; ++at) ++count;
    return count;
  }

  static inline std::unique_ptr<test::EtcdCluster> etcd;
  const std::string prefix = own_prefix();
};

TEST_F(EtcdStoreRequests, ClaimIsForWhoKnowsTheLastClaim) {
  Client a(options()), b(options());
  const auto none = a.read();
  EXPECT_EQ(none.outcome, Outcome::done);
  EXPECT_EQ(none.leader_revision, 0u);
  EXPECT_EQ(none.leader, "");

  const auto first = a.claim(0, "a");
  EXPECT_EQ(first.outcome, Outcome::done);
  EXPECT_GT(first.leader_revision, 0u);
  EXPECT_EQ(first.leader, "a");

  const auto late = b.claim(0, "b");
  EXPECT_EQ(late.outcome, Outcome::refused);
  EXPECT_EQ(late.leader_revision, first.leader_revision);
  EXPECT_EQ(late.leader, "a");

  const auto second = b.claim(late.leader_revision, "b");
  EXPECT_EQ(second.outcome, Outcome::done);
  EXPECT_GT(second.leader_revision, first.leader_revision);
  const auto read = a.read();
  EXPECT_EQ(read.leader_revision, second.leader_revision);
  EXPECT_EQ(read.leader, "b");
}

TEST_F(EtcdStoreRequests, OfTwoThatClaimAtOnceOneLeads) {
  asio::io_context io(1);
  auto a = EtcdStore::create(io, options()), b = EtcdStore::create(io, options());
  std::uint64_t token = 0;
  for (int round = 0; round < 50; ++round) {
    std::vector<StoreAnswer> answers;
    for (auto* store : {&*a, &*b})
      (*store)->submit({.kind = Kind::claim, .token = token, .value = store == &*a ? "a" : "b"},
                       [&](StoreAnswer answer) { answers.push_back(std::move(answer)); });
    ASSERT_TRUE(until(io, [&] { return answers.size() == 2; }));
    const bool first = answers[0].outcome == Outcome::done;
    EXPECT_EQ(answers[first ? 1 : 0].outcome, Outcome::refused);
    EXPECT_EQ(answers[0].leader_revision, answers[1].leader_revision);
    EXPECT_EQ(answers[0].leader, answers[1].leader);
    token = answers[0].leader_revision;
  }
}

TEST_F(EtcdStoreRequests, AppendIsForTheLeaderAndForAPlaceThatIsFree) {
  Client a(options()), b(options());
  EXPECT_EQ(a.append(17, 0, "x").outcome, Outcome::refused) << "nobody leads";
  const auto token = a.claim(0, "a").leader_revision;
  const auto first = a.append(token, 0, "first");
  EXPECT_EQ(first.outcome, Outcome::done);
  EXPECT_EQ(first.leader_revision, token);
  EXPECT_EQ(first.leader, "a");
  EXPECT_EQ(a.append(token, 3, "second").outcome, Outcome::done);

  // As after an outcome that was unknown: what is there is its own.
  const auto repeated = a.append(token, 3, "second");
  EXPECT_EQ(repeated.outcome, Outcome::refused);
  EXPECT_EQ(repeated.existing, "second");
  EXPECT_EQ(repeated.leader_revision, token);

  const auto newer = b.claim(token, "b").leader_revision;
  const auto fenced = a.append(token, 4, "third");
  EXPECT_EQ(fenced.outcome, Outcome::refused);
  EXPECT_EQ(fenced.existing, "");
  EXPECT_EQ(fenced.leader_revision, newer);
  EXPECT_EQ(fenced.leader, "b");
  EXPECT_EQ(b.append(newer, 4, "of b").outcome, Outcome::done);
  EXPECT_EQ(b.read().entries, (Entries{{0, "first"}, {3, "second"}, {4, "of b"}}));
}

TEST_F(EtcdStoreRequests, RenewWritesASignOfLifeOfTheLeaderOnly) {
  Client a(options()), b(options());
  const auto token = a.claim(0, "a").leader_revision;
  EXPECT_EQ(b.read().alive_revision, 0u);
  EXPECT_EQ(a.renew(token).outcome, Outcome::done);
  const auto first = b.read().alive_revision;
  EXPECT_GT(first, 0u);
  EXPECT_EQ(a.renew(token).outcome, Outcome::done);
  const auto second = b.read(0, false).alive_revision;
  EXPECT_GT(second, first);
  const auto newer = b.claim(token, "b").leader_revision;
  const auto fenced = a.renew(token);
  EXPECT_EQ(fenced.outcome, Outcome::refused);
  EXPECT_EQ(fenced.leader_revision, newer);
  EXPECT_EQ(b.read().alive_revision, second);
}

TEST_F(EtcdStoreRequests, ALongLogIsReadInPortions) {
  Client a(options());
  const auto token = a.claim(0, "a").leader_revision;
  for (std::uint64_t i = 0; i < 150; ++i) a.append(token, 2 * i, fmt::format("entry {}", 2 * i));
  for (bool recent : {true, false}) {
    std::uint64_t position = 0;
    int portions = 0;
    for (bool more = true; more; ++portions) {
      const auto read = a.read(position, recent);
      ASSERT_FALSE(read.entries.empty());
      for (const auto& [at, entry] : read.entries) {
        EXPECT_EQ(at, position);
        EXPECT_EQ(entry, fmt::format("entry {}", at));
        position = at + 2;
      }
      more = read.more;
    }
    EXPECT_EQ(position, 300u);
    EXPECT_EQ(portions, 3);
  }
  const auto end = a.read(300);
  EXPECT_THAT(end.entries, IsEmpty());
  EXPECT_FALSE(end.more);
}

std::string megabytes(double count, char of) { return std::string(static_cast<std::size_t>(count * MiB), of); }

TEST_F(EtcdStoreRequests, ASnapshotOfManyFragmentsStandsForWhatIsBeforeIt) {
  Client a(options());
  const auto token = a.claim(0, "a").leader_revision;
  for (std::uint64_t i = 0; i < 10; ++i) a.append(token, i, fmt::format("{}", i));
  EXPECT_EQ(a.compact(token, 4, "of 4").outcome, Outcome::done);
  EXPECT_EQ(keys("log/"), 10u) << "the first: who follows the log misses none of it";
  EXPECT_EQ(a.read().snapshot, "");
  EXPECT_EQ(a.read().snapshot_position, 4u);
  EXPECT_EQ(a.compact(token, 8, "of 8").outcome, Outcome::done);
  EXPECT_EQ(keys("log/"), 6u);
  const std::string snapshot = megabytes(2.9, 's') + "end";
  EXPECT_EQ(a.compact(token, 9, snapshot).outcome, Outcome::done);
  EXPECT_EQ(keys("snapshot/"), 6u);
  EXPECT_EQ(keys("log/"), 2u);
  for (std::uint64_t gap : {0u, 7u}) {
    const auto read = a.read(gap);
    EXPECT_EQ(read.snapshot_position, 9u);
    EXPECT_TRUE(read.snapshot == snapshot);
    EXPECT_EQ(read.entries, (Entries{{9, "9"}}));
  }
  const auto behind = a.read(8);
  EXPECT_EQ(behind.snapshot_position, 9u);
  EXPECT_EQ(behind.snapshot, "");
  EXPECT_EQ(behind.entries, (Entries{{8, "8"}, {9, "9"}}));

  // An append that is done once more, late, where the compaction has deleted it.
  etcdctl({"put", prefix + "log/00000000000000000006", "6"});
  EXPECT_EQ(a.read().entries, (Entries{{9, "9"}}));
  EXPECT_TRUE(a.read().snapshot == snapshot);

  EXPECT_EQ(a.compact(token, 9, snapshot).outcome, Outcome::done) << "it had been done";
  EXPECT_EQ(a.compact(token, 5, "of less").outcome, Outcome::done) << "one stands for more";
  EXPECT_TRUE(a.read().snapshot == snapshot);

  EXPECT_EQ(a.compact(token, 10, "small").outcome, Outcome::done);
  EXPECT_EQ(keys("snapshot/"), 1u);
  EXPECT_EQ(keys("log/"), 1u);
  const auto read = a.read(8);
  EXPECT_EQ(read.snapshot_position, 10u);
  EXPECT_EQ(read.snapshot, "small");
  EXPECT_THAT(read.entries, IsEmpty());
  EXPECT_EQ(a.append(token, 10, "10").outcome, Outcome::done);
  EXPECT_EQ(a.read().entries, (Entries{{10, "10"}}));
}

TEST_F(EtcdStoreRequests, CompactionIsFencedAndWhatWasGivenUpGoesWithTheNext) {
  Client a(options()), b(options());
  const auto token = a.claim(0, "a").leader_revision;
  for (std::uint64_t i = 0; i < 4; ++i) a.append(token, i, "entry");
  const auto newer = b.claim(token, "b").leader_revision;
  const auto fenced = a.compact(token, 4, "late");
  EXPECT_EQ(fenced.outcome, Outcome::refused);
  EXPECT_EQ(fenced.leader_revision, newer);
  EXPECT_EQ(keys("snapshot"), 0u);
  etcdctl({"del", prefix + "log/00000000000000000000"});  // so that a reader wants a snapshot
  for (const char* left : {"snapshot/00000000000000000001/0000", "snapshot/00000000000000000004/0000",
                           "snapshot/00000000000000000004/0007", "snapshot/00000000000000000900/0000"})
    etcdctl({"put", prefix + left, "rubbish"});
  EXPECT_EQ(b.read().snapshot_position, 0u) << "without a head they are none";
  EXPECT_EQ(b.compact(newer, 4, "whole").outcome, Outcome::done);
  EXPECT_EQ(keys("snapshot/"), 1u);
  EXPECT_EQ(b.read().snapshot, "whole");
}

TEST_F(EtcdStoreRequests, ASecondStoreOfTheLeaderCompactsWhileTheFirstAppends) {
  Client a(options()), b(options());
  const auto token = a.claim(0, "a").leader_revision;
  std::optional<StoreAnswer> compacted;
  b.store->submit({.kind = Kind::compact, .token = token, .position = 1, .value = megabytes(5, 's')},
                  [&](StoreAnswer answer) { compacted = std::move(answer); });
  std::uint64_t end = 1;
  for (; !compacted && end < 1000; ++end) {
    EXPECT_EQ(a.append(token, end, fmt::format("{}", end)).outcome, Outcome::done);
    b.io.poll();
    b.io.restart();
  }
  ASSERT_TRUE(until(b.io, [&] { return compacted.has_value(); }));
  EXPECT_EQ(compacted->outcome, Outcome::done) << compacted->error;
  EXPECT_GT(end, 2u);
  const auto read = a.read();
  EXPECT_EQ(read.snapshot_position, 1u);
  ASSERT_FALSE(read.entries.empty());
  EXPECT_EQ(read.entries.front(), (std::pair<std::uint64_t, std::string>(1, "1")));
}

// Does something before the transaction of this number, which begins with 1.
struct Meddled : EtcdClient {
  Meddled(EtcdClient& of, int transaction, std::function<void()> what) : real(of), at(transaction), meddle(what) {}
  void transact(const etcd::TxnRequest& transaction, Done done) override {
    if (++count == at) meddle();
    seen.push_back(transaction);
    real.transact(transaction, std::move(done));
  }
  void status(std::function<void(Result<etcd::StatusResponse>)> done) override { real.status(std::move(done)); }
  EtcdClient& real;
  int at = 0, count = 0;
  std::function<void()> meddle;
  std::vector<etcd::TxnRequest> seen;
};

class EtcdStoreMeddled : public EtcdStoreRequests {
 protected:
  StoreAnswer ask(const StoreRequest& request, int transaction, const std::function<void()>& meddle) {
    asio::io_context io(1);
    auto client = EtcdClient::create(io, options());
    Meddled meddled(**client, transaction, meddle);
    std::optional<StoreAnswer> answer;
    auto asked =
        EtcdRequest::make(meddled, {prefix}, request, [&](StoreAnswer said) { answer.emplace(std::move(said)); });
    asked->begin();
    EXPECT_TRUE(until(io, [&] { return answer.has_value(); }));
    transactions = meddled.seen;
    return answer.value_or(StoreAnswer{});
  }
  // As an endpoint does that is late. Whether it wrote something.
  bool repeat(const etcd::TxnRequest& transaction) {
    asio::io_context io(1);
    auto client = EtcdClient::create(io, options());
    std::optional<bool> wrote;
    (*client)->transact(transaction, [&](Result<etcd::TxnResponse> answer) { wrote = answer && answer->succeeded(); });
    EXPECT_TRUE(until(io, [&] { return wrote.has_value(); }));
    return wrote.value_or(false);
  }
  std::vector<etcd::TxnRequest> transactions;
};

TEST_F(EtcdStoreMeddled, AReaderSeesOneSnapshotThoughANewerOneComesMeanwhile) {
  Client a(options());
  const auto token = a.claim(0, "a").leader_revision;
  for (std::uint64_t i = 1; i < 3; ++i) a.append(token, i, "entry");
  a.compact(token, 1, megabytes(3, 'x'));
  const auto read =
      ask({.kind = Kind::read}, 3, [&] { EXPECT_EQ(a.compact(token, 2, megabytes(3, 'y')).outcome, Outcome::done); });
  EXPECT_EQ(read.outcome, Outcome::done);
  EXPECT_EQ(read.snapshot_position, 1u);
  EXPECT_TRUE(read.snapshot == megabytes(3, 'x'));
  EXPECT_EQ(read.entries, (Entries{{1, "entry"}, {2, "entry"}}));

  // And if etcd has it no more: from the beginning.
  const auto again = ask({.kind = Kind::read}, 3, [&] {
    const auto renewed = a.compact(token, 3, megabytes(3, 'z'));
    a.renew(token);
    const std::string status = etcdctl({"endpoint", "status", "-w", "json"});
    const auto at = status.find("\"revision\":") + 11;
    etcdctl({"compact", status.substr(at, status.find(',', at) - at)});
  });
  EXPECT_EQ(again.outcome, Outcome::done) << again.error;
  EXPECT_EQ(again.snapshot_position, 3u);
  EXPECT_TRUE(again.snapshot == megabytes(3, 'z'));
  EXPECT_THAT(again.entries, IsEmpty());
}

TEST_F(EtcdStoreMeddled, ASnapshotIsNotMixedWithFragmentsThatComeLate) {
  Client a(options());
  const auto token = a.claim(0, "a").leader_revision;
  const std::string snapshot = megabytes(1.2, 's');
  const StoreRequest compact{.kind = Kind::compact, .token = token, .position = 1, .value = snapshot};
  const auto answer = ask(compact, 5, [&] { etcdctl({"put", prefix + "snapshot/00000000000000000001/0001", "late"}); });
  EXPECT_EQ(answer.outcome, Outcome::done) << answer.error;
  EXPECT_EQ(transactions.size(), 10u) << "it looks at the head, puts three fragments, and then the head: twice";
  EXPECT_TRUE(a.read().snapshot == snapshot);

  // What is late itself comes after a newer one.
  for (std::uint64_t i = 1; i < 5; ++i) a.append(token, i, "entry");
  const auto late = ask({.kind = Kind::compact, .token = token, .position = 2, .value = snapshot}, 5,
                        [&] { EXPECT_EQ(a.compact(token, 3, "newer").outcome, Outcome::done); });
  EXPECT_EQ(late.outcome, Outcome::done) << "one stands for more";
  EXPECT_EQ(a.read().snapshot, "newer");
  EXPECT_EQ(a.read().entries, (Entries{{3, "entry"}, {4, "entry"}}));

  // The leader goes in the middle.
  const auto fenced = ask({.kind = Kind::compact, .token = token, .position = 4, .value = snapshot}, 4,
                          [&] { EXPECT_EQ(a.claim(token, "b").outcome, Outcome::done); });
  EXPECT_EQ(fenced.outcome, Outcome::refused);
  EXPECT_EQ(fenced.leader, "b");
  EXPECT_EQ(a.read().snapshot, "newer");
}

TEST_F(EtcdStoreMeddled, WhatIsDoneIsNotDoneAgain) {
  Client a(options());
  EXPECT_EQ(ask({.kind = Kind::claim, .value = "a"}, 0, {}).outcome, Outcome::done);
  EXPECT_FALSE(repeat(transactions[0]));
  const auto token = a.read().leader_revision;
  EXPECT_EQ(ask({.kind = Kind::append, .token = token, .value = "entry"}, 0, {}).outcome, Outcome::done);
  EXPECT_FALSE(repeat(transactions[0]));
  const std::string snapshot = megabytes(1.2, 's');
  const StoreRequest compact{.kind = Kind::compact, .token = token, .position = 1, .value = snapshot};
  EXPECT_EQ(ask(compact, 0, {}).outcome, Outcome::done);
  ASSERT_EQ(transactions.size(), 5u);
  for (std::size_t i = 1; i < transactions.size(); ++i) EXPECT_FALSE(repeat(transactions[i])) << i;
}

TEST_F(EtcdStoreRequests, WhatIsTooLargeIsSaidSo) {
  Client a(options());
  const auto token = a.claim(0, "a").leader_revision;
  for (double size : {1.7, 3.0}) {
    const auto answer = a.append(token, 0, megabytes(size, 'x'));
    EXPECT_EQ(answer.outcome, Outcome::unknown);
    EXPECT_THAT(answer.error, HasSubstr("--max-request-bytes"));
  }
  EXPECT_THAT(a.compact(token, 1, megabytes(61, 'x')).error, HasSubstr("at most 60 MiB"));
  EXPECT_EQ(a.append(token, 0, "x").outcome, Outcome::done);
}

TEST_F(EtcdStoreRequests, AReadThatFindsWhatIsNotRejoinsSaysSo) {
  Client a(options());
  etcdctl({"put", prefix + "log/hello", "x"});
  EXPECT_THAT(a.read().error, HasSubstr("log/hello, which is none of Rejoin's"));
  etcdctl({"del", prefix + "log/hello"});
  const auto token = a.claim(0, "a").leader_revision;
  a.compact(token, 1, megabytes(1.2, 'x'));
  etcdctl({"del", prefix + "snapshot/00000000000000000001/0001"});
  EXPECT_THAT(a.read().error, HasSubstr("is not complete"));
}

TEST(EtcdStore, SpaceThatIsUsedUpIsSaidSo) {
  SKIP_WITHOUT_ETCD();
  test::EtcdCluster etcd({.flags = {"--quota-backend-bytes=3000000"}});
  Client a({.endpoints = etcd.endpoints(), .prefix = "/rejoin/job/", .deadline = std::chrono::seconds(2)});
  const auto token = a.claim(0, "a").leader_revision;
  StoreAnswer answer;
  std::uint64_t position = 0;  // etcd notices what was written only when it is on its disk
  EXPECT_TRUE(test::eventually([&] {
    answer = a.append(token, position++, megabytes(1, 'x'));
    return answer.outcome == Outcome::unknown;
  }));
  EXPECT_THAT(answer.error, HasSubstr("etcdctl alarm disarm"));
  EXPECT_EQ(a.read().leader, "a") << "who only reads is answered";
}

TEST_F(EtcdStoreRequests, ASnapshotsHeadWithNothingInItIsNone) {
  Client a(options());
  const auto token = a.claim(0, "a").leader_revision;
  (void)etcdctl({"put", prefix + "snapshot", "--", ""});
  for (const auto& answer : {a.read(), a.compact(token, 1, "s")}) {
    EXPECT_EQ(answer.outcome, Outcome::unknown);
    EXPECT_THAT(answer.error, HasSubstr("none of Rejoin's snapshots"));
  }
}

}  // namespace
}  // namespace rejoin::daemon
