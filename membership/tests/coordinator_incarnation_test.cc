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

}  // namespace
}  // namespace rejoin::membership
