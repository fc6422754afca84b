// Jobs in which not all members are connected with each other: whom a replica is told to connect with, and what a start
// and an admission wait for.
#include "membership/prospect.h"
#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {
namespace {

constexpr std::uint32_t kReplicas = 12;
const LinkRule kFew{.full_mesh_members = 0, .spares = 1};

struct LargeJob : Bench {
  explicit LargeJob(const std::vector<proto::LogRecord>& earlier = {}, LinkRule links = kFew)
      : Bench(earlier, {.replicas = kReplicas, .links = links}) {}

  void pass(Duration time) {
    std::vector<std::uint64_t> all;
    for (std::uint32_t replica = 0; replica < kReplicas; ++replica) all.push_back(replica);
    Bench::pass(time, all);
  }
  const proto::Prospect* told(std::uint32_t replica) const {
    const proto::Prospect* last = nullptr;
    if (inbox.contains(replica))
      for (const auto& message : inbox.at(replica))
        if (message.has_prospect()) last = &message.prospect();
    return last;
  }
  Incarnations links_of(std::uint32_t replica) const {
    return told(replica) == nullptr ? Incarnations{}
                                    : links_of_candidate(kFew, *told(replica), incarnations.at(replica));
  }
  void connected(std::uint32_t replica, const Incarnations& links) {
    proto::FromNode message;
    auto& status = *message.mutable_replica_status();
    status.set_replica(replica);
    status.set_incarnation(incarnations[replica]);
    for (std::uint32_t rank = 0; rank < config.ranks; ++rank) RankSet(rank).to(status.mutable_ranks());
    links.to(status.mutable_links());
    send(replica, message);
  }
  void start() {
    for (std::uint32_t replica = 0; replica < kReplicas; ++replica) up(replica);
    for (std::uint32_t replica = 0; replica < kReplicas; ++replica) connected(replica, links_of(replica));
    ASSERT_TRUE(coordinator.started());
  }
  void step() {
    for (const auto& m : std::vector(coordinator.members())) reduced(m.replica.value);
  }
  bool is_member(std::uint32_t replica) const {
    return std::ranges::any_of(coordinator.members(), [&](const auto& m) { return m.replica.value == replica; });
  }
};

Incarnations without(Incarnations all, std::uint64_t one) {
  Incarnations gone;
  gone.insert(one);
  all.remove(gone);
  return all;
}

TEST(CoordinatorLinks, ALargeJobStartsWhenEachIsConnectedWithThoseThatItWillNeed) {
  LargeJob job;
  for (std::uint32_t replica = 0; replica < kReplicas; ++replica) {
    EXPECT_EQ(job.told(0), nullptr) << "before all have come";
    job.up(replica);
  }
  for (std::uint32_t replica = 0; replica < kReplicas; ++replica) {
    ASSERT_NE(job.told(replica), nullptr);
    EXPECT_EQ(job.told(replica)->members_size(), static_cast<int>(kReplicas));
    EXPECT_LT(job.links_of(replica).size(), kReplicas - 1) << "not with all";
    EXPECT_FALSE(job.coordinator.started());
    const auto links = job.links_of(replica);
    const bool last = replica == kReplicas - 1;
    job.connected(replica, last ? without(links, job.incarnations[0]) : links);
  }
  EXPECT_FALSE(job.coordinator.started()) << "the ring does not close";
  job.connected(kReplicas - 1, job.links_of(kReplicas - 1));
  EXPECT_TRUE(job.coordinator.started());
}

TEST(CoordinatorLinks, AtTheStartThoseWhoWillCatchUpStandBehindTheOthers) {
  LargeJob job;
  for (std::uint32_t replica = 0; replica < kReplicas; ++replica) job.up(replica, 1, replica == 0 ? 0 : 7);
  ASSERT_NE(job.told(3), nullptr);
  EXPECT_EQ(job.told(3)->members(0).replica(), 1u);
  EXPECT_EQ(job.told(3)->members(kReplicas - 1).replica(), 0u);
  EXPECT_TRUE(job.told(3)->members(kReplicas - 1).catching_up());
  for (std::uint32_t replica = 0; replica < kReplicas; ++replica) job.connected(replica, job.links_of(replica));
  EXPECT_TRUE(job.coordinator.started());
}

TEST(CoordinatorLinks, AReplicaIsAdmittedWhenItIsConnectedWithThoseThatItWillNeedAsAMember) {
  LargeJob job;
  job.start();
  job.down(5);
  job.step();
  job.inbox.clear();
  job.pass(1s);
  job.up(5, 2);
  job.pass(100ms);
  ASSERT_NE(job.told(5), nullptr);
  EXPECT_EQ(job.told(5)->candidates(), 1u);
  EXPECT_EQ(job.told(4), nullptr) << "a member has its plan";
  job.step();
  EXPECT_FALSE(job.is_member(5)) << "it is connected with nobody";
  const auto links = job.links_of(5);
  EXPECT_LT(links.size(), kReplicas - 1);
  job.connected(5, without(links, job.incarnations[11]));
  job.step();
  EXPECT_FALSE(job.is_member(5)) << "not with its neighbour";
  job.connected(5, links);
  job.step();
  EXPECT_TRUE(job.is_member(5));
}

TEST(CoordinatorLinks, OneThatCannotConnectKeepsNobodyOutThatHasComeAfterIt) {
  LargeJob job;
  job.start();
  for (std::uint32_t replica : {2u, 5u, 9u}) job.down(replica);
  job.step();
  job.pass(1s);
  for (std::uint32_t replica : {2u, 5u, 9u}) job.up(replica, 2);
  job.pass(100ms);
  ASSERT_NE(job.told(9), nullptr);
  EXPECT_EQ(job.told(9)->candidates(), 3u);
  for (std::uint32_t replica : {5u, 9u}) job.connected(replica, job.links_of(replica));
  job.step();
  EXPECT_FALSE(job.is_member(2));
  EXPECT_TRUE(job.is_member(5));
  job.pass(100ms);
  job.connected(9, job.links_of(9));
  job.step();
  EXPECT_TRUE(job.is_member(9));
}

TEST(CoordinatorLinks, TheLogHasTheSettingAndAnotherOneIsRefused) {
  LargeJob job;
  job.start();
  auto log = job.log;
  Coordinator same(job.config);
  EXPECT_TRUE(same.recover(log, job.now));
  JobConfig other = job.config;
  other.links.full_mesh_members = 7;
  const auto refused = Coordinator(other).recover(log, job.now);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::mismatch);
  EXPECT_NE(refused.error().message.find("--full-mesh-members 0; this one has 7"), std::string::npos)
      << refused.error().message;
}

// Of a release that knew nothing of it: its ranks are connected with all others, and go on so.
TEST(CoordinatorLinks, ALogWithoutTheSettingIsOfAFullMesh) {
  LargeJob before;
  before.start();
  auto log = before.log;
  log[0].mutable_job()->clear_full_mesh_members();
  log[0].mutable_job()->clear_spares();
  LargeJob job(log);
  for (std::uint32_t replica = 0; replica < kReplicas; ++replica) job.back_from(before, replica);
  for (const auto& [node, messages] : job.inbox)
    for (const auto& message : messages) {
      EXPECT_FALSE(message.has_prospect());
      EXPECT_FALSE(message.has_registered() && message.registered().has_full_mesh_members());
    }
}

TEST(Coordinator, AConnectionThatBrokeIsMendedInAnEpochOfTheSameMembers) {
  Bench bench;
  bench.start();
  const Epoch before = bench.coordinator.epoch();
  bench.accuse(0, 2, /*lost=*/true);
  bench.accuse(2, 0, /*lost=*/true);
  bench.pass(200ms);
  EXPECT_EQ(bench.coordinator.epoch(), before.next());
  EXPECT_EQ(bench.contributors(), 3u);
  // It breaks again and again: one of the two has to go.
  for (int i = 0; i < 10 && bench.contributors() == 3; ++i) {
    bench.accuse(0, 2, /*lost=*/true);
    bench.accuse(2, 0, /*lost=*/true);
    bench.pass(400ms);
  }
  EXPECT_EQ(bench.contributors(), 2u);
}

TEST(Coordinator, WhoIsWaitedForHasAQuarterOfTheSilence) {
  Bench bench;
  bench.start();
  for (std::uint32_t r : {0u, 2u}) bench.accuse(r, 1);
  bench.pass(150ms);
  EXPECT_EQ(bench.contributors(), 3u);
  bench.pass(150ms);
  EXPECT_EQ(bench.contributors(), 2u);
}

// They fence it, and wait for it no longer.
TEST(Coordinator, AllAreToldWhoIsGone) {
  Bench bench;
  bench.start();
  bench.inbox.clear();
  bench.down(1);
  for (const std::uint64_t node : {0, 2})
    EXPECT_TRUE(std::ranges::any_of(bench.inbox[node], [&](const auto& told) {
      const auto& gone = told.peers().gone();
      return std::ranges::find(gone, bench.incarnations[1]) != gone.end();
    })) << node;
}

// All would wait for it, as long as it may come back.
TEST(Coordinator, WhoIsKnownToBeAwayIsNotAdmitted) {
  Bench bench;
  bench.start();
  bench.steps(1);
  bench.down(1);
  for (auto replica : {0u, 2u}) bench.reduced(replica);
  bench.up(1, 2);
  bench.link_all();
  bench.keep(bench.coordinator.on_node_lost(NodeId(1), bench.now));
  bench.pass(500ms, {0, 2});
  for (auto replica : {0u, 2u}) bench.reduced(replica);
  EXPECT_EQ(bench.coordinator.members().size(), 2u);
  bench.back(1, 1, 2);
  bench.link_all();
  for (auto replica : {0u, 2u}) bench.reduced(replica);
  EXPECT_EQ(bench.coordinator.members().size(), 3u);
}

}  // namespace
}  // namespace rejoin::membership
