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

TEST(FtarPlans, BadPlansAreRefusedWithTheReason) {
  VirtualClock clock;
  transport::sim::Fabric fabric({}, clock);
  auto engine = fabric.make_engine();
  std::vector<float> buffer(10);
  const auto bytes = std::as_writable_bytes(std::span(buffer));
  EXPECT_FALSE(Communicator::make(*engine, {}, {}, {}, 1));
  auto short_input = Communicator::make(*engine, {}, {}, {{DataType::float32, 11, bytes, bytes}}, 1);
  ASSERT_FALSE(short_input);
  EXPECT_NE(short_input.error().message.find("need 44 bytes"), std::string::npos) << short_input.error().message;
  EXPECT_FALSE(Communicator::make(*engine, {.chunks_in_flight = 65}, {}, {{DataType::float32, 10, bytes, bytes}}, 1));
}

}  // namespace
}  // namespace rejoin::ftar
