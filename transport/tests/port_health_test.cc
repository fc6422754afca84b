// What people are told of ports, on devices made of software.
#include "transport/ibverbs/port_health.h"

#include <gtest/gtest.h>

#include "base/bytes.h"
#include "transport/tests/fake_verbs.h"

namespace rejoin::transport {
namespace {

TEST(PortHealth, TellsWhatAnEngineWouldFindOnEachPort) {
  constexpr FakeVerbsGid link_local{0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7};
  fake_verbs_gids("fake0", {link_local});
  fake_verbs_port("fake1", false);
  const auto all = ibverbs::examine_ports({}, MiB);
  const auto named = ibverbs::examine_ports({"fake0;gid=9", "nothing"}, MiB);
  fake_verbs_gids("fake0", {});
  fake_verbs_port("fake1", true);
  ASSERT_TRUE(all);
  ASSERT_EQ(all->size(), 2u);
  EXPECT_EQ(all->front().name, "fake0:1");
  EXPECT_EQ(all->front().why, "");
  EXPECT_EQ(all->front().unregistered, "");
  EXPECT_EQ(all->front().gid, "fe80::7");
  EXPECT_EQ(all->front().gid_index, 1u);
  EXPECT_EQ(all->front().mtu, 4096u);
  EXPECT_TRUE(all->front().ethernet && all->front().link_local);
  EXPECT_NE(all->back().why.find("is its link up?"), std::string::npos) << all->back().why;
  ASSERT_TRUE(named);
  EXPECT_NE(named->front().why.find("no GID of index 9"), std::string::npos) << named->front().why;
  EXPECT_NE(named->back().why.find("no RDMA device 'nothing'"), std::string::npos) << named->back().why;
}

}  // namespace
}  // namespace rejoin::transport
