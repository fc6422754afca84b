// Replicas that are put out soon after each admission.
#include "membership/readmissions.h"

#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {
namespace {

TEST(Readmissions, WhoIsPutOutSoonAgainAndAgainWaitsEverLonger) {
  Readmissions all(1s);
  TimePoint now{1s};
  const ReplicaId id(1);
  EXPECT_FALSE(all.on_put_out(id, Step(10), now)) << "it was there from the start";
  std::vector<Duration> pauses;
  for (std::uint64_t step = 20; step < 120; step += 5) {
    all.on_admitted(id, Step(step), now);
    now += 5s;
    const auto held = all.on_put_out(id, Step(step + 1), now);
    pauses.push_back(held ? held->pause : Duration{});
    if (held) EXPECT_EQ(all.until(id, now), now + held->pause);
    now += pauses.back();
    EXPECT_FALSE(all.until(id, now));
  }
  EXPECT_EQ(pauses[0], Duration{});
  EXPECT_EQ(pauses[1], Duration(4s));
  EXPECT_EQ(pauses[2], Duration(8s));
  EXPECT_EQ(pauses[5], Duration(64s));
  EXPECT_EQ(pauses.back(), Duration(150s));
}

TEST(Readmissions, WhoHasBeenInTheJobForLongBeginsAgain) {
  Readmissions all(1s);
  TimePoint now{1s};
  const ReplicaId id(1);
  const auto goes_on = [&](std::uint64_t steps, Duration time) {
    all.on_admitted(id, Step(100), now);
    now += time;
    return all.on_put_out(id, Step(100 + steps), now).has_value();
  };
  EXPECT_FALSE(goes_on(1, 1s));
  EXPECT_TRUE(goes_on(1, 1s));
  EXPECT_TRUE(goes_on(100, 29s)) << "many steps in a short time";
  EXPECT_TRUE(goes_on(15, 1000s)) << "few steps in a long time";
  EXPECT_FALSE(goes_on(16, 30s));
  EXPECT_FALSE(goes_on(1, 1s));
  EXPECT_TRUE(goes_on(1, 1s));
}

struct PutOut : Bench {
  PutOut() { start(); }
  std::size_t instances = 1;
  bool in() const {
    return std::ranges::any_of(coordinator.members(), [](const auto& m) { return m.replica == ReplicaId(1); });
  }
  // The connections with it break as soon as they are to carry anything.
  void put_out() {
    for (int i = 0; i < 40 && in(); ++i) {
      accuse(0, 1, /*lost=*/true);
      accuse(2, 1, /*lost=*/true);
      pass(125ms);
    }
    ASSERT_FALSE(in());
    reduced(0);
    reduced(2);
  }
  void come_back() {
    up(1, ++instances);
    link_all();
    reduced(0);
    reduced(2);
  }
};

TEST(Readmissions, TheCoordinatorSaysWhyAReplicaThatIsThereIsNotAdmitted) {
  PutOut bench;
  bench.put_out();
  bench.come_back();
  ASSERT_TRUE(bench.in());
  bench.put_out();
  bench.come_back();
  ASSERT_TRUE(bench.in()) << "once may be chance";
  bench.put_out();
  const std::string line =
      "replica 1 was put out soon after its admission, 2 times (replicas 0, 2 have no connection with it: replica 0 "
      "lost it: connection reset): the next is in 4 s at the earliest";
  EXPECT_NE(bench.warnings.find(line), std::string::npos) << bench.warnings;
  bench.come_back();
  ASSERT_FALSE(bench.in());
  EXPECT_EQ(bench.coordinator.outages(bench.now).front().next,
            "it has registered, and is admitted again in 4 s at the earliest: it was put out soon after its last "
            "admissions");
  bench.pass(4s);
  bench.reduced(0);
  bench.reduced(2);
  EXPECT_TRUE(bench.in());
}

}  // namespace
}  // namespace rejoin::membership
