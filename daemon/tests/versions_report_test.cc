// What a coordinator says of the releases in its job.
#include "daemon/versions_report.h"

#include <nlohmann/json.hpp>

#include "base/release.h"
#include "membership/tests/coordinator_bench.h"

namespace rejoin::daemon {
namespace {

using membership::Bench;
using membership::Coordinator;

void say_hello(Bench& job, std::uint64_t node, std::uint32_t newest, const std::string& release) {
  proto::FromNode message;
  message.mutable_hello()->set_protocol(15);
  message.mutable_hello()->set_newest(newest);
  message.mutable_hello()->set_node("n" + std::to_string(node));
  message.mutable_hello()->set_release(release);
  job.send(node, message);
}

void come(Bench& job, std::uint32_t replica, std::uint32_t speaks, const std::string& trainer,
          const std::string& daemon) {
  for (std::uint32_t rank = 0; rank < job.config.ranks; ++rank) {
    auto message = Bench::introduction(replica, rank, 1);
    message.mutable_rank_up()->set_speaks(speaks);
    message.mutable_rank_up()->set_release(trainer);
    message.mutable_rank_up()->set_daemon_release(daemon);
    job.send(replica, message);
  }
}

TEST(VersionsReport, NamesWhoIsOfWhichReleaseUntilAllAreOfOne) {
  Bench job;
  const std::string here = release();
  say_hello(job, 0, 16, here);
  say_hello(job, 1, 16, here);
  say_hello(job, 2, 0, "");
  come(job, 0, 16, here, here);
  come(job, 1, 0, "", here);
  come(job, 2, 0, "", "");
  job.link_all();
  const auto mixed = versions_of(job.coordinator);
  EXPECT_TRUE(mixed.at("mixed"));
  EXPECT_EQ(mixed.at("protocol"), 15);
  EXPECT_EQ(mixed.at("nodes").size(), 2u);
  EXPECT_EQ(mixed.at("ranks").size(), 3u);
  EXPECT_EQ(versions_line(mixed),
            "MIXED: all members speak protocol 15, this coordinator 16 (" + here +
                "); 1 node speaks 15 (an older release: n2); 2 nodes speak 16 (" + here +
                ": n0, n1); 2 ranks speak 15 (an older release: 2.0, 2.1); 2 ranks speak 15 (an older release under "
                "daemons of " +
                here + ": 1.0, 1.1); 2 ranks speak 16 (" + here + ": 0.0, 0.1)");

  Bench whole;
  for (std::uint32_t replica = 0; replica < 3; ++replica) say_hello(whole, replica, 16, here);
  for (std::uint32_t replica = 0; replica < 3; ++replica) come(whole, replica, 16, here, here);
  whole.link_all();
  const auto one = versions_of(whole.coordinator);
  EXPECT_FALSE(one.at("mixed"));
  EXPECT_EQ(versions_line(one), "all are of release " + here + " and speak protocol 16");
}

TEST(VersionsReport, WhatOtherCoordinatorsSpeakIsSaidOnceANodeHas) {
  Bench job;
  job.coordinator.set_protocol_of_coordinators(std::nullopt);
  EXPECT_EQ(versions_line(versions_of(job.coordinator)),
            "all are of release " + std::string(release()) + " and speak protocol 16");
  job.coordinator.set_protocol_of_coordinators(membership::Spoken());
  EXPECT_THAT(versions_line(versions_of(job.coordinator)), testing::HasSubstr("; another coordinator speaks 15"));
}

// They say what they like: it is bounded, and printable.
TEST(VersionsReport, ReleasesWithoutNumberAreNotKept) {
  Bench job;
  job.config.ranks = 1;
  for (int i = 0; i < 200; ++i) {
    auto message = Bench::introduction(0, 0, 1);
    message.mutable_rank_up()->set_release(std::string(100, 'x') + std::to_string(i));
    message.mutable_rank_up()->set_daemon_release("\x1b[2J" + std::to_string(i));
    job.send(0, message);
  }
  const auto ranks = versions_of(job.coordinator).at("ranks");
  ASSERT_EQ(ranks.size(), 1u);
  EXPECT_LE(ranks[0].at("release").get<std::string>().size(), 40u);
  EXPECT_EQ(ranks[0].at("daemon_release").get<std::string>().find('\x1b'), std::string::npos);
}

}  // namespace
}  // namespace rejoin::daemon
