// Coordinators of other jobs at the addresses of a job's nodes, and one coordinator at two of them.
#include <nlohmann/json.hpp>

#include "daemon/tests/cluster.h"

namespace rejoin::daemon {
namespace {

// With a wrong letter in --job, or another --store.
TEST_F(Cluster, OneThatLeadsAnotherJobAtAnAddressOfTheNodesDisturbsNobody) {
  for (std::size_t i = 0; i < 2; ++i) ASSERT_TRUE(start(i));
  MemoryStoreData others;
  ReplicatedServer::Options options;
  options.name = "stray";
  options.listen = "127.0.0.1:0";
  options.job = job;
  options.log_directory = directory + "/stray";
  options.kind = "memory";
  auto stray = ReplicatedServer::start(io, options, std::make_unique<MemoryStore>(io, others), keys);
  ASSERT_TRUE(stray);
  options.listen = (*stray)->address();
  addresses.push_back((*stray)->address());
  stray->reset();
  start_nodes();
  ASSERT_TRUE(commit_more(5));
  const auto at_work = leader();
  const std::uint64_t epochs = nodes[0]->epochs;
  stray = ReplicatedServer::start(io, options, std::make_unique<MemoryStore>(io, others), keys);
  ASSERT_TRUE(stray) << stray.error().message;
  ASSERT_TRUE(until([&] { return !(*stray)->status().at("alarms").empty(); }));
  const TimePoint begun = SteadyClock().now();
  ASSERT_TRUE(until([&] { return SteadyClock().now() - begun > 2 * kServersSilence; }));
  ASSERT_TRUE(commit_more(10));
  EXPECT_EQ(leader(), at_work);
  EXPECT_EQ(servers[*at_work]->machine().takeovers(), 1u);
  EXPECT_EQ(servers[*at_work]->machine().leader().term(), 1u);
  EXPECT_EQ((*stray)->machine().takeovers(), 1u);
  EXPECT_EQ((*stray)->machine().leader().term(), 1u);
  EXPECT_EQ(nodes[0]->epochs, epochs);
  for (const auto& node : nodes) {
    EXPECT_EQ(node->evictions, 0);
    const auto status = node->all.status(true);
    EXPECT_TRUE(status.at("all").back().at("reason").get<std::string>().starts_with("is of another job than this node"))
        << status.dump();
  }
  const auto alarm = (*stray)->status().at("alarms").front().get<std::string>();
  EXPECT_TRUE(alarm.starts_with("node node")) << alarm;
  EXPECT_NE(alarm.find("Is the --job or --store of this coordinator another job's"), std::string::npos) << alarm;
  EXPECT_TRUE(servers[*at_work]->status().at("alarms").empty());
}

TEST_F(Cluster, ANodeThatReachesACoordinatorUnderTwoAddressesIsNotSilent) {
  ASSERT_TRUE(start(0));
  addresses.push_back("localhost" + addresses[0].substr(addresses[0].rfind(':')));
  start_nodes();
  ASSERT_TRUE(commit_more(5));
  const TimePoint begun = SteadyClock().now();
  ASSERT_TRUE(until([&] { return SteadyClock().now() - begun > 3 * kServersSilence; }));
  ASSERT_TRUE(commit_more(5));
  for (const auto& node : nodes) {
    EXPECT_EQ(node->evictions, 0);
    const auto status = node->all.status(true);
    for (const auto& one : status.at("all")) EXPECT_EQ(one.at("reason"), "");
    EXPECT_LE(node->ups, 2) << "where its connections are made one after the other";
  }
}

}  // namespace
}  // namespace rejoin::daemon
