#include "membership/link_rates.h"

#include "membership/node.h"
#include "membership/relay.h"
#include "membership/tests/order_bench.h"

namespace rejoin::membership {
namespace {

TEST(CoarseRate, IsAPowerOfTwoAndStaysWhereItIsAtTheLimit) {
  EXPECT_EQ(coarse_rate(0), 0);
  EXPECT_EQ(coarse_rate(999e3), 0);
  EXPECT_EQ(coarse_rate(1e6), 1);
  EXPECT_EQ(coarse_rate(63e6), 6);
  EXPECT_EQ(coarse_rate(64e6), 7);
  EXPECT_EQ(mb_of(7), 128u);
  EXPECT_LE(coarse_rate(1e300), kFastest);
  EXPECT_EQ(coarse_rate(140e6, 7), 7) << "128 and a little more";
  EXPECT_EQ(coarse_rate(60e6, 7), 7) << "64 less a little";
  EXPECT_EQ(coarse_rate(170e6, 7), 8);
  EXPECT_EQ(coarse_rate(40e6, 7), 6);
}

LinkRates told(std::initializer_list<LinkRates::Link> links) {
  LinkRates rates;
  for (const auto& link : links) rates.keep_lower(link);
  return rates;
}

TEST(LinkRates, OfAReplicasRanksTheLowestOfEachPeerComesThroughDaemonAndRelay) {
  Node node("node", 1s, 1);
  Relay relay("relay", 1s);
  const TimePoint now{1s};
  std::vector<LinkRates> heard;
  (void)relay.on_coordinator_up(now);
  const auto pass = [&](const Node::Actions& actions) {
    for (const auto& message : actions.to_coordinator)
      for (const auto& further : relay.on_node_message(NodeId(1), message, now).to_coordinator)
        if (further.has_replica_status()) heard.emplace_back(further.replica_status().rates());
  };
  pass(node.on_coordinator_up(now));
  const auto say = [&](std::uint32_t rank, const LinkRates& rates) {
    proto::FromNode message;
    message.mutable_links()->set_rank(rank);
    rates.to(message.mutable_links()->mutable_rates());
    pass(node.on_rank_message(RankConnection(rank + 1), message, now));
  };
  for (const std::uint32_t rank : {0u, 1u}) {
    proto::FromNode message;
    message.mutable_rank_up()->set_rank(rank);
    message.mutable_rank_up()->set_instance(rank + 1);
    message.mutable_rank_up()->set_incarnation(5);
    pass(node.on_rank_message(RankConnection(rank + 1), message, now));
  }
  say(0, told({{6, 9, 0}, {7, 9, 0}}));
  say(1, told({{7, 4, 1}}));
  ASSERT_EQ(heard.size(), 1u);
  EXPECT_EQ(heard.back(), told({{6, 9, 0}, {7, 4, 1}}));
  say(0, told({{6, 9, 0}, {7, 8, 0}}));
  EXPECT_EQ(heard.size(), 1u) << "the lower one is the other's";
  proto::FromNode nonsense;
  nonsense.mutable_links()->set_rank(1);
  nonsense.mutable_links()->add_rates()->set_rate(kFastest + 1);
  pass(node.on_rank_message(RankConnection(2), nonsense, now));
  ASSERT_EQ(heard.size(), 2u);
  EXPECT_EQ(heard.back(), told({{6, 9, 0}, {7, 8, 0}}));
}

std::vector<RingLink> ring(std::vector<CoarseRate> rates) {
  std::vector<RingLink> links;
  for (std::uint32_t i = 0; i < rates.size(); ++i)
    links.push_back({ReplicaId(i), ReplicaId((i + 1) % static_cast<std::uint32_t>(rates.size())), 0, rates[i]});
  return links;
}

TEST(SlowLink, IsTheSlowestAtAQuarterOfTheMedianAndNamedUntilItIsHalfwayBack) {
  SlowLinkFinder finder{Duration{}};
  const auto from = [&](std::vector<CoarseRate> rates, int step) {
    finder.look(ring(std::move(rates)), Step(static_cast<std::uint64_t>(step)), TimePoint(std::chrono::seconds(step)));
    return finder.found() ? static_cast<int>(finder.found()->link.from.value) : -1;
  };
  EXPECT_EQ(from({}, 1), -1);
  EXPECT_EQ(from({1}, 1), -1);
  EXPECT_EQ(from({9, 9, 8, 10}, 1), -1);
  EXPECT_EQ(from({9, 9, 7, 10}, 2), 2);
  EXPECT_EQ(finder.found()->usual, 9);
  EXPECT_EQ(from({9, 9, 6, 10}, 3), 2);
  EXPECT_EQ(finder.found()->since, Step(2));
  EXPECT_EQ(from({9, 9, 8, 10}, 4), 2) << "not half as fast yet, give or take";
  EXPECT_EQ(from({9, 6, 6, 10, 9, 9}, 5), 2) << "of two that are alike the one that has been named";
  EXPECT_EQ(finder.found()->since, Step(2));
  EXPECT_EQ(from({9, 5, 6, 10, 9, 9}, 6), 1);
  EXPECT_EQ(finder.found()->since, Step(6));
  EXPECT_EQ(from({9, 9, 9, 10}, 7), -1);
  EXPECT_EQ(from({9, 9, 8, 10}, 8), -1);
}

TEST(SlowLink, IsNamedWhenItHasBeenSoForAWhile) {
  SlowLinkFinder finder{3s};
  const auto named_at = [&](CoarseRate rate, Duration at) {
    finder.look(ring({9, 9, rate, 10}), Step(1), TimePoint(at));
    return finder.found().has_value();
  };
  EXPECT_FALSE(named_at(5, 1s));
  EXPECT_FALSE(named_at(5, 3s));
  EXPECT_TRUE(named_at(5, 4s));
  EXPECT_EQ(finder.found()->since_at, TimePoint(1s));
  EXPECT_FALSE(named_at(9, 5s));
  EXPECT_FALSE(named_at(5, 6s));
}

// Between neighbours in the ring alone, both ways.
TEST(SlowLink, IsNamedByTheCoordinatorFromWhomToWhom) {
  OrderBench job(std::vector<std::string>(4));
  std::map<std::uint32_t, std::map<std::uint32_t, CoarseRate>> rates;  // from, to
  const auto link = [&](std::uint32_t replica) {
    proto::FromNode message;
    auto& status = *message.mutable_replica_status();
    status.set_replica(replica);
    status.set_incarnation(job.incarnations[replica]);
    RankSet all;
    all.add(0, job.config.ranks);
    all.to(status.mutable_ranks());
    Incarnations links;
    LinkRates measured;
    for (const auto& [other, incarnation] : job.incarnations) {
      if (other != replica) links.insert(incarnation);
      if (rates[replica].contains(other)) measured.keep_lower({incarnation, rates[replica][other], 1});
    }
    links.to(status.mutable_links());
    measured.to(status.mutable_rates());
    job.send(replica, message);
  };
  for (std::uint32_t replica = 0; replica < 4; ++replica) job.come(replica);
  for (std::uint32_t replica = 0; replica < 4; ++replica) link(replica);
  ASSERT_TRUE(job.coordinator.started());
  for (std::uint32_t replica = 0; replica < 4; ++replica) {
    rates[replica] = {{(replica + 1) % 4, 10}, {(replica + 3) % 4, 10}};
    if (replica == 0) rates[0][2] = 1;  // of an earlier epoch, say
    if (replica == 3) rates[3][2] = 5;
    link(replica);
  }
  job.step();
  job.pass(1s, {0, 1, 2, 3});
  EXPECT_FALSE(job.coordinator.slow_link());
  job.pass(24s, {0, 1, 2, 3});
  const auto slow = job.coordinator.slow_link();
  ASSERT_TRUE(slow);
  EXPECT_EQ(std::pair(slow->link.from, slow->link.to), std::pair(ReplicaId(3), ReplicaId(2)));
  EXPECT_EQ(slow->link.rank, 1u);
  EXPECT_EQ(slow->link.rate, 5);
  EXPECT_EQ(slow->usual, 10);
  job.down(3);
  job.pass(25s, {0, 1, 2});
  EXPECT_EQ(job.coordinator.slow_link()->link.from, ReplicaId(0)) << "0 and 2 are neighbours now";
}

}  // namespace
}  // namespace rejoin::membership
