// Who gets how many samples, by how fast each is; and who is named as slow.
#include "membership/balance.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <set>

#include "membership/ahead.h"
#include "membership/node.h"
#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {
namespace {

std::vector<ReplicaId> replicas(std::uint32_t count) {
  std::vector<ReplicaId> all;
  for (std::uint32_t i = 0; i < count; ++i) all.emplace_back(i);
  return all;
}

using Dealt = std::vector<std::uint64_t>;

TEST(Balance, DealsInProportionAndRoundsInFavourOfWhoLacksMost) {
  Balance balance{.at_least = 500, .at_most = 1500, .shares = {{ReplicaId(3), 500}}};
  EXPECT_EQ(deal(32, replicas(4), balance), (Dealt{9, 9, 9, 5}));
  EXPECT_EQ(deal(700, replicas(4), balance), (Dealt{200, 200, 200, 100}));
  EXPECT_EQ(deal(10, replicas(3), {}), (Dealt{4, 3, 3})) << "equal shares, the first ones more";
  EXPECT_EQ(deal(2, replicas(3), balance), (Dealt{1, 1, 1})) << "nobody gets nothing";
}

TEST(Balance, NobodyGetsLessOrMoreThanAllowed) {
  Balance balance{.at_least = 500, .at_most = 1200, .shares = {{ReplicaId(3), 100}}};
  EXPECT_EQ(deal(80, replicas(4), balance), (Dealt{24, 23, 23, 10}));
  balance.shares = {{ReplicaId(0), 4000}};
  EXPECT_EQ(deal(80, replicas(4), balance), (Dealt{24, 19, 19, 18}));
}

// Whatever the shares and bounds, as a plan may bring them from anywhere.
TEST(Balance, DealsAllOfItWithinTheBoundsWhateverTheSharesAre) {
  std::mt19937_64 random(1);
  const auto pick = [&](std::uint64_t n) { return random() % n; };
  for (int round = 0; round < 20000; ++round) {
    const auto count = static_cast<std::uint32_t>(1 + pick(round % 100 == 0 ? 1024 : 9));
    proto::Balance told;
    told.set_at_least(static_cast<std::uint32_t>(pick(1200)));
    told.set_at_most(static_cast<std::uint32_t>(1 + pick(20000)));
    for (std::uint32_t i = 0; i < count; ++i)
      if (pick(4) > 0) {
        auto& one = *told.add_shares();
        one.set_replica(i);
        one.set_share(static_cast<std::uint32_t>(pick(8) == 0 ? random() : pick(3000)));
      }
    const std::uint64_t units = pick(5) == 0 ? (std::uint64_t{1} << 31) - 1 : 1 + pick(2000);
    const Balance balance = Balance::from(told);
    const auto dealt = deal(units, replicas(count), balance);
    const std::uint64_t all = std::max<std::uint64_t>(units, count), equal = (all + count - 1) / count;
    ASSERT_EQ(std::accumulate(dealt.begin(), dealt.end(), std::uint64_t{0}), all);
    for (auto one : dealt) {
      ASSERT_GE(one, std::max<std::uint64_t>(1, all * balance.at_least / count / 1000));
      ASSERT_LE(one, std::max(equal, all * balance.at_most / count / 1000));
    }
    ASSERT_EQ(dealt, deal(units, replicas(count), balance));
  }
}

TEST(Balance, ChangesWhereItPaysAndNotOtherwise) {
  const BalanceRule rule{.on = true};
  const auto speeds = [](std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t d) {
    return std::vector<Speed>{{ReplicaId(0), a}, {ReplicaId(1), b}, {ReplicaId(2), c}, {ReplicaId(3), d}};
  };
  EXPECT_FALSE(better(rule, 320, speeds(100, 101, 99, 102), {})) << "as fast as each other";
  const auto halved = better(rule, 320, speeds(100, 100, 100, 200), {});
  ASSERT_TRUE(halved);
  EXPECT_EQ(deal(320, replicas(4), *halved), (Dealt{92, 91, 91, 46}));
  EXPECT_FALSE(better(rule, 320, speeds(100, 100, 100, 200), *halved)) << "it is as good as can be";
  EXPECT_FALSE(better(rule, 320, speeds(101, 100, 100, 203), *halved)) << "not worth it";
  const auto recovered = better(rule, 320, speeds(100, 100, 100, 100), *halved);
  ASSERT_TRUE(recovered);
  EXPECT_EQ(deal(320, replicas(4), *recovered), (Dealt{80, 80, 80, 80}));
  EXPECT_FALSE(better(rule, 320, speeds(0, 0, 0, 0), {}));
  EXPECT_FALSE(better(rule, 320, {}, {}));
  const auto stuck = better(rule, 320, speeds(100, 100, 100, ~std::uint64_t{0}), {});
  ASSERT_TRUE(stuck);
  EXPECT_EQ(deal(320, replicas(4), *stuck)[3], 40u) << "half of an equal share, at least";
}

TEST(Paces, AStragglerIsNamedAfterAWindowAndUntilItHasRecovered) {
  Paces paces;
  TimePoint now{1s};
  std::uint64_t step = 0;
  const auto steps = [&](int count, std::vector<std::uint64_t> us) {
    for (; count > 0; --count) {
      std::vector<Paces::Measured> all;
      for (std::uint32_t i = 0; i < us.size(); ++i) all.push_back({ReplicaId(i), Incarnation(i + 1), 8, us[i]});
      paces.on_step(Step(++step), all, now += 1s);
    }
  };
  steps(7, {8000, 8100, 16000});
  EXPECT_FALSE(paces.of(ReplicaId(0)));
  EXPECT_TRUE(paces.stragglers().empty());
  steps(1, {8000, 8100, 16000});
  EXPECT_EQ(paces.of(ReplicaId(0)), 1'000'000'000u);
  ASSERT_EQ(paces.stragglers().size(), 1u);
  EXPECT_EQ(paces.stragglers()[0].replica, ReplicaId(2));
  EXPECT_EQ(paces.stragglers()[0].since, Step(8));
  EXPECT_NEAR(static_cast<double>(paces.stragglers()[0].slower), 1975, 5);
  steps(3, {8000, 900'000, 16000});
  EXPECT_EQ(paces.stragglers().size(), 1u) << "a few steps are no habit";
  EXPECT_EQ(paces.of(ReplicaId(1)), 1'012'500'000u);
  steps(4, {8000, 0, 16000});
  steps(4, {8000, ~std::uint64_t{0}, 16000});
  EXPECT_EQ(paces.of(ReplicaId(1)), 1'012'500'000u) << "who says nothing, or what can't be, is not heard";
  paces.begin_again();
  EXPECT_FALSE(paces.of(ReplicaId(2)));
  EXPECT_EQ(paces.stragglers().size(), 1u);
  steps(8, {8000, 8000, 9100});
  EXPECT_EQ(paces.stragglers().size(), 1u) << "not better by enough";
  EXPECT_EQ(paces.stragglers()[0].since, Step(8));
  steps(8, {8000, 8000, 8500});
  EXPECT_TRUE(paces.stragglers().empty());
  steps(8, {8000, 20000, 8500});
  ASSERT_EQ(paces.stragglers().size(), 1u);
  steps(1, {8000});
  EXPECT_TRUE(paces.stragglers().empty()) << "it has gone";
  EXPECT_FALSE(paces.of(ReplicaId(1)));
  // Where steps are that short, it is the system's scheduler that decides who takes longer.
  steps(8, {1, 2, 602});
  EXPECT_TRUE(paces.stragglers().empty()) << "301 times as long, and less than a millisecond";
  steps(8, {1, 2, 1010});
  EXPECT_EQ(paces.stragglers().size(), 1u);
  steps(8, {1, 2, 600});
  EXPECT_EQ(paces.stragglers().size(), 1u) << "it does not come and go at the limit";
  steps(8, {1, 2, 490});
  EXPECT_TRUE(paces.stragglers().empty());
}

using PerReplica = std::map<std::uint32_t, std::uint64_t>;

// A job of three replicas that say how long they compute for a sample.
struct SpeedBench : Bench {
  PerReplica us{{0, 1000}, {1, 1000}, {2, 1000}};                    // for a sample
  std::map<std::uint64_t, std::map<std::uint32_t, Batch>> foretold;  // by step and replica
  std::uint32_t protocol = 16;
  bool weighs = true;
  explicit SpeedBench(const std::vector<proto::LogRecord>& earlier = {}, BenchOptions told = {.balance = {.on = true}})
      : Bench(earlier, told) {}
  void begin() {
    for (std::uint32_t r = 0; r < 3; ++r) come(r);
    link_all();
  }
  void come(std::uint32_t replica, std::uint64_t instance = 1) {
    proto::FromNode hello;
    Versions{}.put_into(*hello.mutable_hello());
    send(replica, hello);
    for (std::uint32_t rank = 0; rank < config.ranks; ++rank) {
      auto message = introduction(replica, rank, instance);
      message.mutable_rank_up()->set_speaks(protocol);
      message.mutable_rank_up()->set_weighs(weighs);
      send(replica, message);
    }
  }
  const Batch* batch(std::uint32_t replica) const { return coordinator.ledger().batch_of(ReplicaId(replica)); }
  PerReplica samples() const {
    PerReplica all;
    for (const auto& [replica, held] : coordinator.ledger().held()) all[replica.value] = samples_of(held);
    return all;
  }
  proto::Plan plan() {
    const auto& told = inbox[0];
    return std::find_if(told.rbegin(), told.rend(), [](const auto& message) { return message.has_plan(); })->plan();
  }
  PerReplica weights() {
    PerReplica all;
    const proto::Plan now_planned = plan();
    for (const auto& member : now_planned.members()) all[member.replica()] = member.weight();
    return all;
  }
  void train(int count) {
    for (; count > 0; --count) {
      const proto::Plan now_planned = plan();
      now += 200ms;
      const auto members = coordinator.members();
      for (const auto& m : members) {
        if (!m.catching_up) foretold[plan().step() + 1][m.replica.value] = Ahead(now_planned, m.replica).batches(1)[0];
        reduced(m.replica.value, m.replica.value, m.catching_up ? 0 : us[m.replica.value] * samples()[m.replica.value]);
      }
      if (plan().epoch() != now_planned.epoch()) continue;
      for (const auto& m : coordinator.members())
        if (!m.catching_up) {
          EXPECT_EQ(*batch(m.replica.value), foretold[plan().step()][m.replica.value]) << "step " << plan().step();
        }
    }
  }
  void expect_recovered_alike() const {
    SpeedBench other(log);
    EXPECT_EQ(other.coordinator.ledger(), coordinator.ledger());
    Coordinator from_snapshot(config);
    EXPECT_TRUE(from_snapshot.recover({coordinator.snapshot()}, now));
    EXPECT_EQ(from_snapshot.ledger(), coordinator.ledger());
  }
};

// It would deal in another way, and say at best that the log is damaged.
TEST(Coordinator, ALogOfSharesBySpeedIsReadByNobodyWhoPassesOverThem) {
  SpeedBench job;
  job.begin();
  job.train(4);
  EXPECT_TRUE(std::ranges::none_of(job.log, [](const auto& record) { return record.has_needs(); }));
  job.us[2] = 2000;
  job.train(20);
  ASSERT_NE(job.samples()[0], job.samples()[2]);
  int shared = 0;
  for (std::size_t i = 1; i < job.log.size(); ++i) {
    if (!job.log[i].has_committed()) continue;
    std::set<std::uint64_t> numbers;
    for (const auto& m : job.log[i].committed().members()) numbers.insert(samples_of(batch_of(m)));
    if (numbers.size() == 1 && !job.log[i].committed().has_balance()) continue;
    EXPECT_TRUE(job.log[i - 1].has_needs()) << job.log[i].committed().step();
    ++shared;
  }
  EXPECT_GT(shared, 5);
  job.log.emplace_back().mutable_needs()->set_protocol(kProtocolVersion + 1);
  const auto refused = Coordinator(job.config).recover(job.log, job.now);
  EXPECT_TRUE(!refused && refused.error().code == ErrorCode::mismatch);
}

TEST(Coordinator, WhoIsSlowerGetsFewerSamplesAndIsNamed) {
  SpeedBench job;
  job.begin();
  job.us[2] = 2000;
  EXPECT_EQ(job.weights(), (PerReplica{{0, 0}, {1, 0}, {2, 0}})) << "all alike, so far";
  EXPECT_FALSE(job.plan().balances());
  job.train(8);
  EXPECT_EQ(job.samples(), (PerReplica{{0, 10}, {1, 10}, {2, 10}})) << "as the plan before has foretold";
  ASSERT_EQ(job.coordinator.stragglers().size(), 1u);
  EXPECT_EQ(job.coordinator.stragglers()[0].replica, ReplicaId(2));
  EXPECT_NE(job.news.find(": of 30 in a step from 6 (replica 2) to 12 (replica 1)"), std::string::npos) << job.news;
  job.train(1);
  EXPECT_EQ(job.samples(), (PerReplica{{0, 12}, {1, 12}, {2, 6}})) << "in units of two ranks";
  EXPECT_EQ(job.weights(), job.samples());
  job.expect_recovered_alike();
  const auto changes = [&] {
    return std::ranges::count_if(job.log, [](const auto& record) { return record.committed().has_balance(); });
  };
  job.train(60);
  EXPECT_EQ(changes(), 1) << "it stays as it is";
  job.us[2] = 1000;
  job.train(12);
  EXPECT_EQ(job.samples(), (PerReplica{{0, 10}, {1, 10}, {2, 10}}));
  EXPECT_TRUE(job.coordinator.stragglers().empty());
  EXPECT_EQ(changes(), 2);
  job.expect_recovered_alike();
}

TEST(Coordinator, ALostReplicasShareIsForgottenAndItsSamplesGoOutAgain) {
  SpeedBench job;
  job.begin();
  job.us[2] = 2000;
  job.train(11);
  ASSERT_EQ(job.samples(), (PerReplica{{0, 12}, {1, 12}, {2, 6}}));
  const Batch its = *job.batch(2);
  job.down(2);
  EXPECT_EQ(job.samples(), (PerReplica{{0, 12}, {1, 12}})) << "they have begun";
  EXPECT_EQ(job.weights(), (PerReplica{{0, 12}, {1, 12}}));
  job.expect_recovered_alike();
  job.train(1);
  EXPECT_EQ(job.samples(), (PerReplica{{0, 10}, {1, 10}}));
  EXPECT_EQ(job.batch(0)->front().begin, its.front().begin);
  job.come(2, 2);
  job.link_all();
  job.train(1);
  job.caught_up(2);
  job.train(1);
  EXPECT_EQ(job.samples(), (PerReplica{{0, 10}, {1, 10}, {2, 10}})) << "who has come again is as good as any";
  job.expect_recovered_alike();
  // Where nobody is left that has begun the step, there is nothing to be weighed.
  job.train(20);
  ASSERT_NE(job.samples(), (PerReplica{{0, 10}, {1, 10}, {2, 10}}));
  for (std::uint32_t replica : {0u, 1u, 2u}) job.down(replica, replica == 2 ? 2 : 1);
  EXPECT_FALSE(job.coordinator.ledger().balance().in_force());
  job.expect_recovered_alike();
}

TEST(Coordinator, AConstantBatchIsSharedBySpeedToo) {
  SpeedBench job({}, {.constant_batch = true, .balance = {.on = true}});
  job.begin();
  job.us[0] = 2000;
  job.train(10);
  EXPECT_EQ(job.samples(), (PerReplica{{0, 6}, {1, 12}, {2, 12}}));
  job.down(1);
  job.train(1);
  EXPECT_EQ(job.samples(), (PerReplica{{0, 10}, {2, 20}})) << "all of the 30";
}

// Until all trainers know of weights, and from when one comes that doesn't.
TEST(Coordinator, SharesAreEqualAsLongAsATrainerIsOfAnOlderVersion) {
  for (const bool old : {true, false}) {  // or does not weigh its gradients
    SpeedBench job;
    job.protocol = old ? 0 : 16;
    job.weighs = old;
    job.begin();
    job.us[2] = 2000;
    job.train(20);
    EXPECT_EQ(job.samples(), (PerReplica{{0, 10}, {1, 10}, {2, 10}}));
    EXPECT_FALSE(job.plan().balances());
    EXPECT_EQ(job.coordinator.stragglers().size(), 1u) << "it is named all the same";
    const auto told = job.news.find("replica 0 is of an older release, or does not weigh its gradients");
    EXPECT_EQ(told != std::string::npos, !old) << job.news;
    EXPECT_EQ(job.news.find("use_weights", told + 100), std::string::npos) << "once";
  }
  SpeedBench newer;
  newer.begin();
  newer.us[2] = 2000;
  newer.train(12);
  newer.down(2);
  newer.train(1);
  ASSERT_TRUE(newer.coordinator.ledger().balance().in_force());
  newer.protocol = 15;
  newer.come(2, 2);
  newer.link_all();
  newer.train(1);
  EXPECT_EQ(newer.coordinator.members().size(), 2u) << "the step that is planned is weighed";
  newer.train(1);
  EXPECT_EQ(newer.coordinator.members().size(), 3u);
  EXPECT_FALSE(newer.coordinator.ledger().balance().in_force());
  EXPECT_EQ(newer.weights(), (PerReplica{{0, 0}, {1, 0}, {2, 0}})) << "nothing is to be weighed";
  newer.expect_recovered_alike();
}

// An operator may change the setting with a restart: the log knows what was dealt under which.
TEST(Coordinator, AJobGoesOnWithoutBalancedBatchesWhereTheSettingIsTakenOut) {
  SpeedBench job;
  job.begin();
  job.us[2] = 2000;
  job.train(12);
  SpeedBench without(job.log, BenchOptions{});
  EXPECT_EQ(without.coordinator.ledger(), job.coordinator.ledger());
  without.incarnations = job.incarnations;
  for (std::uint32_t replica : {0u, 1u, 2u}) without.back_from(job, replica);
  EXPECT_EQ(without.samples(), (PerReplica{{0, 12}, {1, 12}, {2, 6}})) << "as it was planned";
  without.train(3);
  EXPECT_EQ(without.samples(), (PerReplica{{0, 10}, {1, 10}, {2, 10}}));
  EXPECT_EQ(without.weights(), (PerReplica{{0, 0}, {1, 0}, {2, 0}}));
  EXPECT_FALSE(without.plan().balances());
}

// Nothing that a trainer says moves more than its own share, or what can't be.
TEST(Coordinator, WhatATrainerCanNotHaveComputedIsNotHeard) {
  SpeedBench job;
  job.begin();
  for (int i = 0; i < 40; ++i) {
    job.now += 200ms;
    for (std::uint32_t replica : {0u, 1u}) job.reduced(replica, replica, 10'000);
    job.reduced(2, 2, i % 2 == 0 ? 400'000 : ~std::uint64_t{0} >> i);  // longer than the step is under way
  }
  EXPECT_EQ(job.samples(), (PerReplica{{0, 10}, {1, 10}, {2, 10}}));
  EXPECT_TRUE(job.coordinator.stragglers().empty());
  for (int i = 0; i < 40; ++i) {
    job.now += 200ms;
    for (std::uint32_t replica : {0u, 1u}) job.reduced(replica, replica, 10'000);
    job.reduced(2, 2, 1);  // as if it took no time
  }
  EXPECT_EQ(job.samples(), (PerReplica{{0, 8}, {1, 8}, {2, 14}})) << "no more than --balance-at-most";
}

// The replica is as fast as the slowest of its ranks, if all say how fast they are.
TEST(Node, ReportsTheLongestThatItsRanksHaveComputed) {
  Node node("node", 1s, 1);
  const TimePoint now{1s};
  (void)node.on_coordinator_up(now);
  const auto says = [&](std::uint64_t rank, const proto::FromNode& message) {
    return node.on_rank_message(RankConnection(rank + 1), message, now).to_coordinator;
  };
  for (std::uint32_t rank : {0u, 1u}) {
    proto::FromNode message;
    message.mutable_rank_up()->set_rank(rank);
    message.mutable_rank_up()->set_instance(rank + 1);
    message.mutable_rank_up()->set_incarnation(5);
    (void)says(rank, message);
  }
  const auto reported = [&](std::uint64_t step, std::uint64_t one, std::uint64_t other) {
    proto::FromNode message;
    message.mutable_reduced()->set_epoch(1);
    message.mutable_reduced()->set_step(step);
    message.mutable_reduced()->set_compute_us(one);
    EXPECT_TRUE(says(0, message).empty());
    message.mutable_reduced()->set_compute_us(other);
    return says(1, message).at(0).reduced().compute_us();
  };
  EXPECT_EQ(reported(1, 4000, 7000), 7000u);
  EXPECT_EQ(reported(2, 6000, 5000), 6000u);
  EXPECT_EQ(reported(3, 0, 7000), 0u);
}

}  // namespace
}  // namespace rejoin::membership
