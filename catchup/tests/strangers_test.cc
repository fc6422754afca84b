// Who is not served: joiners of another job or with another model, and whoever sends what makes no sense.
#include "base/refusals.h"
#include "catchup/tests/cluster.h"

namespace rejoin::catchup {
namespace {

TEST(CatchUpService, AStrangerOrAnotherModelIsRefused) {
  Cluster cluster(5);
  Replica& source = cluster.add(true);
  cluster.elementwise = false;  // another manifest
  Replica& joiner = cluster.add(false);
  cluster.catch_up(joiner);
  cluster.pump(200);
  EXPECT_EQ(source.service->bytes_served(), 0u);
  EXPECT_EQ(joiner.service->progress({joiner.id, RankId(0)}, cluster.clock.now())->sources, 0u);
}

// Ports are used again, and two jobs may have one model and one key.
TEST(CatchUpService, AJoinerOfAnotherJobIsRefused) {
  Cluster cluster(5);
  cluster.model = model_of(10);
  Replica &source = cluster.add(true), &joiner = cluster.add(false);
  source.service->serve({source.id, RankId(0)}, Incarnation(1), /*job=*/7);
  const auto refused = [] { return refusals::counted()[static_cast<std::size_t>(refusals::Why::job)]; };
  const auto before = refused();
  const auto catch_up = [&](std::uint64_t job) {
    joiner.service->catch_up({joiner.id, RankId(0)}, {{source.id, Incarnation(1), source.address, job}}, Step(0),
                             cluster.clock.now());
    cluster.pump(2000);
  };
  catch_up(8);
  EXPECT_GT(refused(), before);
  EXPECT_EQ(source.service->bytes_served(), 0u);
  cluster.clock.advance(std::chrono::seconds(1));
  catch_up(7);
  EXPECT_TRUE(joiner.caught_up);
}

TEST(CatchUpService, WhoAsksForWhatIsNotThereIsCutOff) {
  Cluster cluster(5);
  Replica& source = cluster.add(true);
  source.service->serve({source.id, RankId(0)}, Incarnation(1));
  const auto engine = cluster.fabric.make_engine();
  const Hello hello{0, source.id.value, 0, 1, source.owner->manifest().hash()};
  const auto endpoint = engine->connect({source.address.text, transport::Secret::of({5, 0})}, bytes_of(hello));
  ASSERT_TRUE(endpoint);
  int connected = 0, closed = 0;
  const auto go_on = [&] {
    for (int i = 0; i < 500; ++i) {
      cluster.pump(1);
      for (const auto& event : engine->poll()) {
        if (event.kind == transport::EventKind::connected) ++connected;
        if (event.kind == transport::EventKind::closed) ++closed;
      }
    }
  };
  go_on();
  ASSERT_EQ(connected, 1);
  ASSERT_EQ(closed, 0);
  proto::Stream message;
  message.mutable_verify()->add_slices(1'000'000);
  const std::string bytes = message.SerializeAsString();
  ASSERT_TRUE(engine->send(*endpoint, as_bytes(bytes)));
  go_on();
  EXPECT_EQ(closed, 1);
  EXPECT_EQ(source.service->serving(), 0u);
}

}  // namespace
}  // namespace rejoin::catchup
