// An etcd that lacks what was written there, and one that is none of the cluster.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include "daemon/etcd_client_parts.h"
#include "daemon/tests/etcd_support.h"

namespace rejoin::daemon {
namespace {

using testing::HasSubstr;
using namespace std::chrono_literals;

TEST(EtcdStore, WhatALeaderWroteLastIsThereOrNothingIsWritten) {
  SKIP_WITHOUT_ETCD();
  test::EtcdCluster etcd({});
  const std::string prefix = own_prefix();
  Client a({.endpoints = etcd.endpoints(), .prefix = prefix, .deadline = 2s});
  const auto token = a.claim(0, "a").leader_revision;
  ASSERT_EQ(a.append(token, 0, "0").outcome, Outcome::done);
  ASSERT_EQ(a.append(token, 5, "5").outcome, Outcome::done);
  const auto delete_key = [&](const std::string& key) {
    test::run({test::EtcdCluster::program("etcdctl"), "--endpoints", etcd.endpoint(0), "del", prefix + key},
              {"ETCDCTL_API=3"});
  };
  const auto write = [&](Kind kind, std::uint64_t position, StoreRequest::Behind behind) {
    return a.ask({.kind = kind, .token = token, .position = position, .leader = "a", .value = "v", .behind = behind});
  };
  EXPECT_EQ(write(Kind::renew, 0, {.entry = 5}).outcome, Outcome::done);
  EXPECT_EQ(write(Kind::append, 6, {.entry = 5}).outcome, Outcome::done);
  delete_key("log/00000000000000000006");
  for (const Kind kind : {Kind::append, Kind::renew}) {
    const auto refused = write(kind, 9, {.entry = 6});
    EXPECT_EQ(refused.outcome, Outcome::refused);
    EXPECT_EQ(refused.leader, "a") << "it leads still";
    EXPECT_EQ(refused.leader_revision, token);
    EXPECT_EQ(refused.existing, "");
  }
  const StoreRequest mends{.kind = Kind::compact,
                           .token = token,
                           .position = 12,
                           .leader = "a",
                           .value = "snapshot",
                           .entry = "10 and 11",
                           .entry_at = 10};
  EXPECT_EQ(a.ask(mends).outcome, Outcome::done);
  EXPECT_EQ(a.ask(mends).outcome, Outcome::done) << "by an earlier try";
  const auto behind = a.read(7), in_time = a.read(10);
  EXPECT_EQ(behind.snapshot, "snapshot") << "who lacks some reads the snapshot";
  EXPECT_EQ(behind.entries, Entries{});
  EXPECT_EQ(in_time.snapshot, "") << "and who has them the entry";
  EXPECT_EQ(in_time.entries, (Entries{{10, "10 and 11"}}));
  ASSERT_NE(in_time.snapshot_revision, 0u);
  EXPECT_EQ(write(Kind::renew, 0, {.entry = {}, .snapshot_revision = in_time.snapshot_revision}).outcome,
            Outcome::done);
  EXPECT_EQ(write(Kind::renew, 0, {.entry = {}, .snapshot_revision = in_time.snapshot_revision - 1}).outcome,
            Outcome::refused);
  EXPECT_EQ(write(Kind::append, 12, {.entry = 10}).outcome, Outcome::done);
}

TEST(EtcdStore, AnEtcdOfAnotherClusterAnswersNothing) {
  SKIP_WITHOUT_ETCD();
  test::EtcdCluster etcd({}), other({});
  Client a({.endpoints = {etcd.endpoint(0), other.endpoint(0)}, .prefix = own_prefix(), .deadline = 250ms});
  const StoreRequest claim{.kind = Kind::claim, .value = "a"};
  const auto token = a.insist(claim).leader_revision;
  const StoreRequest append{.kind = Kind::append, .token = token, .leader = "a", .value = "entry"};
  ASSERT_EQ(a.insist(append).outcome, Outcome::done);
  etcd.stop(0);
  for (int i = 0; i < 2; ++i) {
    const auto answer = a.read();
    EXPECT_EQ(answer.outcome, Outcome::unknown) << "that nobody leads, and nothing is in the log";
    EXPECT_THAT(answer.error, HasSubstr("etcd at " + other.endpoint(0) + ": it is of another cluster ("));
    EXPECT_THAT(answer.error, HasSubstr(" than " + etcd.endpoint(0) + " ("));
  }
  etcd.resume(0);
  EXPECT_EQ(a.insist({.kind = Kind::read}).entries, (Entries{{0, "entry"}}));
}

TEST(EtcdClusters, TheFirstAnswersCountsUntilAllEndpointsAreOfOneOther) {
  etcd_client::Clusters of({"e0:1", "e1:1", "e2:1"});
  EXPECT_EQ(of.on_answer(1, 7), "");
  EXPECT_EQ(of.on_answer(0, 0), "") << "it does not say";
  EXPECT_THAT(of.on_answer(0, 0xab), HasSubstr("another cluster (ab) than e1:1 (7)"));
  EXPECT_EQ(of.on_answer(2, 7), "");
  EXPECT_NE(of.on_answer(1, 0xab), "") << "e2 is as it was";
  EXPECT_EQ(of.on_answer(2, 7), "");
  EXPECT_EQ(of.on_answer(2, 0xab), "") << "all were put back";
  EXPECT_EQ(of.on_answer(0, 0xab), "");
  EXPECT_NE(of.on_answer(1, 7), "");
  etcd_client::Clusters alone({"e0:1"});
  EXPECT_EQ(alone.on_answer(0, 7), "");
  EXPECT_EQ(alone.on_answer(0, 8), "");
}

TEST(EtcdEndpoints, AnIPv6AddressIsInBrackets) {
  for (const char* usable : {"[::1]:2379", "[fe80::1%eth0]:2379", "etcd0:2379", "10.0.0.1:2379"})
    EXPECT_TRUE(etcd_client::check({.endpoints = {usable}})) << usable;
  for (const char* none : {"::1:2379", "fd00:5::2:2379", "[::1]", "[::1:2379", "::1]:2379", "[::1]2379", "::"})
    EXPECT_FALSE(etcd_client::check({.endpoints = {none}})) << none;
  const auto refused = etcd_client::check({.endpoints = {"::1:2379"}});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::invalid_argument);
  EXPECT_THAT(refused.error().message, HasSubstr("in brackets; write e.g. [::1]:2379"));
}

}  // namespace
}  // namespace rejoin::daemon
