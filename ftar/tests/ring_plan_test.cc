// Plans and members that a ring refuses.
#include "ftar/tests/ring_cluster.h"

namespace rejoin::ftar {
namespace {

TEST(FtarPlans, AMemberWithAnotherPlanOrKeyIsRefused) {
  Cluster cluster(1, {1000});
  Rank& first = cluster.add();
  cluster.sizes = {1001};
  Rank& second = cluster.add();
  EXPECT_TRUE(cluster.until([&] { return second.lost_someone(); }));
  EXPECT_FALSE(first.communicator->connected(second.self));
}

// Who knows the job's secret, and was led to somebody else than it meant.
TEST(FtarPlans, AMemberOfAnotherJobOrRankIsRefused) {
  for (const Group other : {Group{.job = 43, .rank = 0}, Group{.job = 42, .rank = 1}}) {
    Cluster cluster(1, {1000});
    Rank& first = cluster.add();
    cluster.group = other;
    Rank& second = cluster.add();
    EXPECT_TRUE(cluster.until([&] { return second.lost_someone(); }));
    EXPECT_FALSE(first.communicator->connected(second.self));
  }
}

TEST(FtarPlans, AConnectionThatWasMeantForAnotherMemberIsRefused) {
  for (const Member wanted : {Member{ReplicaId(7), Incarnation(1)}, Member{ReplicaId(0), Incarnation(8)}}) {
    Cluster cluster(1, {1000});
    Rank& first = cluster.add();
    const auto address = std::exchange(first.address, cluster.fabric.make_engine()->listen({"sim"}).value());
    Rank& second = cluster.add();  // which does not find the first
    ASSERT_TRUE(second.communicator->connect(wanted, address));
    EXPECT_TRUE(cluster.until([&] {
      return std::any_of(second.outcomes.begin(), second.outcomes.end(),
                         [&](const Outcome& o) { return o.kind == Outcome::Kind::peer_lost && o.member == wanted; });
    }));
    EXPECT_FALSE(first.communicator->connected(second.self));
    ASSERT_TRUE(second.communicator->connect(first.self, address));
    EXPECT_TRUE(cluster.until([&] { return first.communicator->connected(second.self); })) << "whom it means it finds";
  }
}

TEST(FtarPlans, BadPlansAreRefusedWithTheReason) {
  VirtualClock clock;
  transport::sim::Fabric fabric({}, clock);
  auto engine = fabric.make_engine();
  std::vector<float> buffer(10);
  const auto bytes = std::as_writable_bytes(std::span(buffer));
  EXPECT_FALSE(Communicator::make(*engine, {}, {}, {}, {1, 0}));
  auto short_input = Communicator::make(*engine, {}, {}, {{DataType::float32, 11, bytes, bytes}}, {1, 0});
  ASSERT_FALSE(short_input);
  EXPECT_NE(short_input.error().message.find("need 44 bytes"), std::string::npos) << short_input.error().message;
  EXPECT_FALSE(
      Communicator::make(*engine, {.chunks_in_flight = 65}, {}, {{DataType::float32, 10, bytes, bytes}}, {1, 0}));
}

}  // namespace
}  // namespace rejoin::ftar
