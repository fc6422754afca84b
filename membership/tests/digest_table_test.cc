// Ranks' digests on their way to the coordinator.
#include "membership/digest_table.h"

#include <gtest/gtest.h>

#include <vector>

#include "membership/node.h"
#include "membership/relay.h"

namespace rejoin::membership {
namespace {

using namespace std::chrono_literals;

// Rank → daemon → relay: whatever the order of reports, each digest arrives under its rank.
TEST(Digests, ComeThroughDaemonsAndRelaysUnderTheirRanks) {
  const TimePoint now(1s);
  Relay relay("relay", 1s);
  relay.on_coordinator_up(now);
  std::vector<Node> nodes;
  nodes.emplace_back("a", 1s, 1), nodes.emplace_back("b", 1s, 2);
  proto::Reduced heard;
  const auto up = [&](std::size_t node, const Node::Actions& actions) {
    for (const auto& message : actions.to_coordinator)
      for (const auto& said : relay.on_node_message(NodeId(node), message, now).to_coordinator)
        if (said.has_reduced()) heard = said.reduced();
  };
  for (std::size_t n = 0; n < 2; ++n) up(n, nodes[n].on_coordinator_up(now));
  // Ranks 0 and 2 on one node, 1 and 3 on the other.
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    proto::FromNode message;
    message.mutable_rank_up()->set_rank(rank);
    message.mutable_rank_up()->set_instance(rank + 1);
    message.mutable_rank_up()->set_incarnation(1);
    up(rank % 2, nodes[rank % 2].on_rank_message(RankConnection(rank), message, now));
  }
  for (const std::uint32_t rank : {3u, 0u, 2u, 1u}) {
    proto::FromNode message;
    auto& reduced = *message.mutable_reduced();
    reduced.set_epoch(1);
    reduced.set_step(1);
    RankSet(rank).to(reduced.mutable_ranks());
    reduced.add_results(100 + rank);
    reduced.add_state(200 + rank);
    up(rank % 2, nodes[rank % 2].on_rank_message(RankConnection(rank), message, now));
  }
  ASSERT_EQ(RankSet(heard.ranks(), 100).size(), 4u);
  DigestTable table;
  table.take(heard, 4);
  for (std::uint32_t rank = 0; rank < 4; ++rank) EXPECT_EQ(table.of(rank), (RankDigests{100 + rank, 200 + rank}));
}

TEST(Digests, OfEndlessRangesAreNoEndlessWork) {
  proto::Reduced reduced, told;
  reduced.add_ranks()->set_end(~std::uint64_t{0});
  reduced.add_results(1);
  DigestTable table;
  table.take(reduced, ~std::uint64_t{0});
  table.write_to(RankSet(reduced.ranks(), ~std::uint64_t{0}), told);
  EXPECT_EQ(table.of(0).reduced, 1u);
  EXPECT_EQ(static_cast<std::uint64_t>(told.results_size()), kMostRanks);
}

}  // namespace
}  // namespace rejoin::membership
