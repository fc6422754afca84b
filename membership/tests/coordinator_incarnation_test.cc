// An incarnation belongs to one process in each place: nothing else tells two of them apart.
#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {
namespace {

constexpr std::uint64_t kOfRank0 = 10, kRival = 11, kOfRank1 = 12;  // nodes

// Both ranks of replica 0 have registered and wait for the other replicas.
struct Waiting : Bench {
  std::uint64_t before = 0;  // its incarnation
  explicit Waiting(const std::vector<proto::LogRecord>& earlier = {}) : Bench(earlier) {}
  static Waiting registered() {
    Waiting job;
    job.send(kOfRank0, introduction(0, 0, 1));
    job.send(kOfRank1, introduction(0, 1, 1));
    job.before = job.incarnations.at(0);
    return job;
  }
  static Waiting restarted() {
    const Waiting first = registered();
    Waiting job(first.log);
    job.before = first.before;
    return job;
  }
  std::uint64_t registered_as(std::uint64_t node) {  // the last time
    std::uint64_t last = 0;
    for (const auto& sent : inbox[node])
      if (sent.has_registered()) last = sent.registered().incarnation();
    return last;
  }
  bool evicted(std::uint64_t node, std::uint64_t incarnation) {
    return std::ranges::any_of(inbox[node], [&](const auto& sent) {
      return sent.has_evicted() && sent.evicted().incarnation() == incarnation;
    });
  }
  std::string why_evicted(std::uint64_t node) {
    std::string last;
    for (const auto& sent : inbox[node])
      if (sent.has_evicted()) last = sent.evicted().reason();
    return last;
  }
  void comes_back(std::uint32_t rank, std::uint64_t node, std::uint64_t instance = 1) {
    auto message = introduction(0, rank, instance);
    message.mutable_rank_up()->set_incarnation(before);
    send(node, message);
  }
};

// Of its ranks one is back, another is still cut off, and a second process comes for its place.
TEST(Coordinator, AfterItsRestartNobodyNewHasAnIncarnationThatSomebodyMayComeBackWith) {
  for (const bool rival_first : {false, true}) {
    Waiting job = Waiting::restarted();
    if (!rival_first) job.comes_back(0, kOfRank0);
    job.send(kRival, Bench::introduction(0, 1, 2));
    if (rival_first) job.comes_back(0, kOfRank0);
    const std::uint64_t anew = job.registered_as(kRival);
    EXPECT_GT(anew, job.before);
    EXPECT_TRUE(job.evicted(kOfRank0, job.before)) << "it is of the same replica, and starts again";
    EXPECT_NE(job.why_evicted(kOfRank0).find(rival_first ? "was given to a new process since"
                                                         : "rank 1 has come as a new process, and a coordinator that"),
              std::string::npos)
        << job.why_evicted(kOfRank0);
    job.comes_back(1, kOfRank1);
    EXPECT_TRUE(job.evicted(kOfRank1, job.before));
    job.send(kOfRank0, Bench::introduction(0, 0, 3));
    EXPECT_EQ(job.registered_as(kOfRank0), anew);
    for (std::uint32_t r : {1u, 2u}) job.up(r);
    EXPECT_FALSE(job.evicted(kRival, anew));
    const auto& ranks = job.coordinator.replicas().at(ReplicaId(0)).ranks;
    EXPECT_EQ(ranks[1].instance, 201u);
  }
}

// Without a restart: one of its processes ends while another is cut off, and comes back.
TEST(Coordinator, AnIncarnationThatWasDroppedAndIsBackIsNobodysWhoComesNew) {
  Waiting job = Waiting::registered();
  job.keep(job.coordinator.on_node_lost(NodeId(kOfRank1), job.now));
  job.down(0, 1, 0);
  job.comes_back(1, kOfRank1);
  job.send(kOfRank0, Bench::introduction(0, 0, 2));
  EXPECT_GT(job.registered_as(kOfRank0), job.before);
  EXPECT_TRUE(job.evicted(kOfRank1, job.before));
}

// Nobody else of its place is alive that could come back, whatever has become of it.
TEST(Coordinator, ProcessesThatEndBeforeTheyAreMembersLeaveOneIncarnationBehind) {
  Bench job;
  job.start();
  job.down(2);
  for (std::uint64_t i = 2; i < 500; ++i) {
    job.up(2, i);
    job.down(2, i);
    for (std::uint32_t replica : {0u, 1u}) job.reduced(replica);
  }
  job.up(2, 500);
  const auto last = job.incarnations.at(2);
  EXPECT_GE(last, 500u) << "each has its own";
  const auto snapshot = job.coordinator.snapshot();
  EXPECT_EQ(snapshot.snapshot().never_members_size(), 1);
  for (const bool whole_log : {false, true}) {
    Bench again(whole_log ? job.log : std::vector{snapshot});
    EXPECT_TRUE(again.coordinator.has_recovered_like(Bench(job.log).coordinator));
    again.incarnations = {{2, last - 1}};
    again.back_with(2, 0, 11, 499);
    EXPECT_TRUE(again.evicted_anybody()) << "its place is another one's";
    again.inbox.clear();
    again.incarnations[2] = last;
    again.back(2, 12, 500);
    EXPECT_FALSE(again.evicted_anybody());
    again.up(2, 501);
    EXPECT_GT(again.incarnations.at(2), last) << "no number is given out twice";
  }
}

// They have no part in it, and end when they have heard so.
TEST(Coordinator, ProcessesThatComeToAFinishedJobLeaveOneIncarnationForEachRankBehind) {
  const BenchOptions two_steps{.steps = 2};
  Bench job({}, two_steps);
  job.start();
  job.steps(2);
  ASSERT_TRUE(job.coordinator.finished());
  std::map<std::uint32_t, std::uint64_t> last;  // of replica 2's ranks
  for (std::uint64_t i = 2; i < 100; ++i)
    for (std::uint32_t rank : {0u, 1u}) {
      job.send(2, Bench::introduction(2, rank, i));
      last[rank] = job.incarnations.at(2);
    }
  const auto snapshot = job.coordinator.snapshot();
  EXPECT_EQ(snapshot.snapshot().never_members_size(), 2);
  Bench again({snapshot}, two_steps);
  for (const auto& [rank, incarnation] : last) {
    again.incarnations[2] = incarnation;
    again.back_with(2, rank, 11, 99);
  }
  EXPECT_FALSE(again.evicted_anybody());
  EXPECT_TRUE(std::ranges::any_of(again.inbox[11], [](const auto& sent) { return sent.plan().finished(); }));
}

// Nothing says where those belong that an older release has given out: they stay until the job goes on without them.
TEST(Coordinator, IncarnationsOfOlderLogsAreKeptUntilAnEpochAndACommit) {
  Bench job;
  auto older = job.log;
  for (std::uint64_t incarnation : {1u, 2u, 3u})
    older.emplace_back().mutable_incarnated()->set_incarnation(incarnation);
  Bench later(older);
  EXPECT_EQ(later.coordinator.snapshot().snapshot().never_members_size(), 3);
  EXPECT_TRUE(Bench({later.coordinator.snapshot()}).coordinator.has_recovered_like(later.coordinator));
  later.nobody_comes_back();
  later.start();
  later.steps(1);
  EXPECT_EQ(later.coordinator.snapshot().snapshot().never_members_size(), 0);
}

// By a log that was put back an incarnation may be given out again.
TEST(Coordinator, WhoComesBackWithTheIncarnationOfWhoHasItsPlaceIsRefused) {
  Waiting job = Waiting::restarted();
  for (std::uint32_t rank : {0u, 1u}) job.comes_back(rank, kOfRank0);
  job.comes_back(1, kRival, 2);
  EXPECT_NE(job.refusal(kRival).find("is replica 0 rank 1 in incarnation 1, too: end one of them"), std::string::npos)
      << job.refusal(kRival);
  EXPECT_FALSE(job.evicted_anybody());
  EXPECT_EQ(job.coordinator.replicas().at(ReplicaId(0)).ranks[1].instance, 101u);
}

// Connections are told by incarnations alone.
TEST(Coordinator, WhatALogThatWasPutBackGivesToAnotherReplicaIsNobodyElses) {
  Bench bench;
  bench.up(1);
  const auto older = bench.log;
  bench.up(0);
  Bench again(older);
  again.up(2);
  ASSERT_EQ(again.incarnations.at(2), bench.incarnations.at(0));
  again.incarnations[0] = bench.incarnations.at(0);
  again.back(0, 0);
  EXPECT_FALSE(again.registered(0));
  EXPECT_TRUE(again.evicted_anybody()) << "nothing has gone on with it: it starts again";
}

}  // namespace
}  // namespace rejoin::membership
