// What peers are told of where an engine listens.
#include "transport/advertise.h"

#include <gtest/gtest.h>

#include <cstring>

#include "transport/socket_address.h"
#include "transport/tcp/factory.h"

namespace rejoin::transport {
namespace {

TEST(Advertise, AHostStandsInForTheOneListenedOnAndThePortStays) {
  EXPECT_EQ(advertised({"0.0.0.0:7000"}, "10.0.0.1")->text, "10.0.0.1:7000");
  EXPECT_EQ(advertised({"127.0.0.1:7000"}, "node7.cluster")->text, "node7.cluster:7000");
  EXPECT_EQ(advertised({"[::]:7000"}, "fd00::1")->text, "[fd00::1]:7000");
  EXPECT_EQ(advertised({"0.0.0.0:7000"}, "[fd00::1]")->text, "[fd00::1]:7000");
  EXPECT_EQ(advertised({"10.0.0.1:7000"}, "")->text, "10.0.0.1:7000");
}

TEST(Advertise, RailsHaveOneHostForAllOrOneForEach) {
  EXPECT_EQ(advertised({"0.0.0.0:1|0.0.0.0:2"}, "h")->text, "h:1|h:2");
  EXPECT_EQ(advertised({"10.0.0.1:1|10.1.0.1:2"}, "a,b")->text, "a:1|b:2");
  const auto wrong = advertised({"0.0.0.0:1|0.0.0.0:2"}, "a,b,c");
  ASSERT_FALSE(wrong);
  EXPECT_NE(wrong.error().message.find("names 3 hosts"), std::string::npos) << wrong.error().message;
  EXPECT_NE(wrong.error().message.find("2 rails"), std::string::npos) << wrong.error().message;
}

TEST(Advertise, AddressesWithoutAHostStayAsTheyAre) {
  for (const char* address : {"shm:@rejoin-0123", "ucx:00ff.0123456789abcdef", "sim:4"}) {
    EXPECT_EQ(with_host_for_any({address}, "10.0.0.1").text, address);
    EXPECT_FALSE(listens_everywhere({address}));
  }
  EXPECT_EQ(advertised({"shm:@rejoin-0123"}, "10.0.0.1")->text, "shm:@rejoin-0123");
}

TEST(Advertise, OnlyAnAddressForAllIsFilledIn) {
  EXPECT_EQ(with_host_for_any({"0.0.0.0:1|10.0.0.1:2|[::]:3"}, "10.9.9.9").text, "10.9.9.9:1|10.0.0.1:2|10.9.9.9:3");
  EXPECT_TRUE(listens_everywhere({"10.0.0.1:1|0.0.0.0:2"}));
  EXPECT_TRUE(listens_everywhere({"[::]:2"}));
  EXPECT_FALSE(listens_everywhere({"10.0.0.1:1"}));
}

TEST(Advertise, WhatNobodyCouldReachIsRefusedWithTheRemedy) {
  const auto says = [](const std::string& hosts, const std::string& text) {
    const auto checked = check_advertised(hosts);
    EXPECT_FALSE(checked) << hosts;
    if (!checked) EXPECT_NE(checked.error().message.find(text), std::string::npos) << checked.error().message;
  };
  says("0.0.0.0", "nobody can be reached at 0.0.0.0");
  says("10.0.0.1,[::]", "nobody can be reached at ::");
  says("10.0.0.1:7000", "a host without a port");
  says("[fd00::1]:7000", "a host without a port");
  says("10.0.0.1,", "a host is missing");
  says("a|b", "is not the name or the address of a host");
  says("fe80::1", "a link-local address, at which nobody can be reached without an interface");
  for (const char* right :
       {"fe80::1%eth0", "10.0.0.1", "fd00::1", "[fd00::1]", "node-7.cluster.local", "10.0.0.1,10.1.0.1"})
    EXPECT_TRUE(check_advertised(right)) << right;
}

TEST(Advertise, ThisMachineKnowsItsAddressesTowardsAPeer) {
  for (const char* peer : {"127.0.0.1:7000", "0.0.0.0:7000", "[::1]:7000", "no such host:1", "192.0.2.7:1"}) {
    const OwnHosts hosts = or_loopback(own_hosts_towards(peer));
    EXPECT_EQ(hosts.v4.find(':'), std::string::npos) << hosts.v4;
    EXPECT_NE(hosts.v6.find(':'), std::string::npos) << hosts.v6;
    for (const std::string& host : {hosts.v4, "[" + hosts.v6 + "]"}) {
      EXPECT_NE(host, "0.0.0.0") << peer;
      EXPECT_NE(host, "[::]") << peer;
      auto engine = tcp::make_engine({.local = host});
      ASSERT_TRUE(engine);
      EXPECT_TRUE((*engine)->listen({"0.0.0.0:0"}) || host == "[::1]")  // there may be no IPv6
          << host << " towards " << peer << " is not this machine's";
    }
  }
}

TEST(Advertise, AConnectionsOwnEndIsTheAddressUnlessNobodyElseCanUseIt) {
  EXPECT_EQ(own_hosts("10.9.8.7:4711").v4, "10.9.8.7");
  EXPECT_FALSE(own_hosts("10.9.8.7:4711").v6_first);
  EXPECT_EQ(own_hosts("[fd00::7]:4711").v6, "fd00::7");
  EXPECT_TRUE(own_hosts("[fd00::7]:4711").v6_first);
  for (const char* useless : {"127.0.0.1:1", "[::1]:1", "[fe80::1%lo]:1", "0.0.0.0:0", "[::]:0", ""})
    EXPECT_EQ(own_hosts(useless), own_hosts()) << useless;
}

TEST(Advertise, AListenerIsToldByAnAddressOfTheFamilyThatItListensOn) {
  const OwnHosts both{.v4 = "10.0.0.1", .v6 = "fd00::1", .v6_first = true};
  EXPECT_EQ(with_own_host_for_any({"0.0.0.0:1|[::]:2|10.0.0.9:3"}, both).text, "10.0.0.1:1|[fd00::1]:2|10.0.0.9:3");
  EXPECT_EQ(with_own_host_for_any({"[::]:2"}, {.v4 = "10.0.0.1", .v6 = "fd00::1"}).text, "10.0.0.1:2");
  EXPECT_EQ(with_own_host_for_any({"[::]:2"}, {.v4 = "10.0.0.1", .v6 = "", .v6_first = true}).text, "10.0.0.1:2");
  EXPECT_EQ(with_own_host_for_any({"0.0.0.0:1"}, {.v4 = "", .v6 = "fd00::1"}).text, "0.0.0.0:1");
  EXPECT_EQ(with_own_host_for_any({"shm:@rejoin-0123"}, both).text, "shm:@rejoin-0123");
}

TEST(Advertise, TheLoopbackStandsInForAFamilyAndNeverForAnAddressOfTheOther) {
  const OwnHosts v6 = or_loopback({.v4 = "", .v6 = "fd00::1"}), v4 = or_loopback({.v4 = "10.0.0.1", .v6 = ""});
  EXPECT_EQ(with_own_host_for_any({"[::]:1"}, v6).text, "[fd00::1]:1");
  EXPECT_EQ(with_own_host_for_any({"0.0.0.0:1"}, v6).text, "127.0.0.1:1");
  EXPECT_EQ(with_own_host_for_any({"[::]:1"}, v4).text, "10.0.0.1:1");
  EXPECT_EQ(with_own_host_for_any({"[::]:1"}, or_loopback({})).text, "127.0.0.1:1");
}

TEST(Advertise, ALinkLocalAddressIsWrittenWithItsInterface) {
  const auto lo = SocketAddress::numeric("[fe80::1%lo]:7000");
  ASSERT_TRUE(lo) << lo.error().message;
  sockaddr_storage storage{};
  std::memcpy(&storage, lo->get(), lo->length());
  EXPECT_EQ(SocketAddress::format(storage), "[fe80::1%lo]:7000");
  EXPECT_TRUE(is_link_local({"[fe80::1%lo]:7000"}));
  EXPECT_FALSE(is_link_local({"[fd00::1]:7000"}));
  EXPECT_FALSE(is_link_local({"169.254.0.1:7000"}));
}

}  // namespace
}  // namespace rejoin::transport
