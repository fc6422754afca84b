// Which GID a rail takes, and rails that are down when their process starts, over devices made of software.
#include <gtest/gtest.h>

#include <functional>

#include "base/log.h"
#include "base/refusals.h"
#include "transport/factory.h"
#include "transport/ibverbs/device.h"
#include "transport/ibverbs/factory.h"
#include "transport/tests/any_access.h"
#include "transport/tests/calling_pair.h"
#include "transport/tests/fake_verbs.h"
#include "transport/tests/same_bytes.h"

namespace rejoin::transport {
namespace {

// The interface of a RoCE port has a link-local address before all others, as a rule.
TEST(Gid, OneThatRoutersPassOnIsPreferred) {
  constexpr FakeVerbsGid link_local{0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7};
  constexpr FakeVerbsGid link_local_4{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 169, 254, 0, 7};
  constexpr FakeVerbsGid global{0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7};
  constexpr FakeVerbsGid ipv4{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 7};
  const auto chosen = [](const std::vector<FakeVerbsGid>& gids, const std::string& settings = "") {
    fake_verbs_gids("fake0", gids);
    const auto device = ibverbs::Device::open(*ibverbs::parse_options("fake0" + settings));
    fake_verbs_gids("fake0", {});
    return device ? int{device->gid_index()} : -1;
  };
  EXPECT_EQ(chosen({link_local, global}), 2);
  EXPECT_EQ(chosen({global, link_local}), 1);
  EXPECT_EQ(chosen({link_local, global, ipv4}), 3);
  EXPECT_EQ(chosen({link_local_4, global}), 2);
  EXPECT_EQ(chosen({link_local, link_local_4}), 1) << "better than none";
  EXPECT_EQ(chosen({link_local, global}, ";gid=1"), 1) << "whoever names one gets it";
}

TEST(Gid, ABetterOneThatComesLaterIsTakenAndTheSameOneAmongItsLike) {
  constexpr FakeVerbsGid link_local{0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7};
  constexpr FakeVerbsGid ipv4{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 7};
  constexpr FakeVerbsGid other_ipv4{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 8};
  fake_verbs_gids("fake0", {link_local});
  auto device = *ibverbs::Device::open(*ibverbs::parse_options("fake0"));
  const auto chosen = [&](const std::vector<FakeVerbsGid>& gids) {
    fake_verbs_gids("fake0", gids);
    const auto refreshed = device.refresh();
    fake_verbs_gids("fake0", {});
    return refreshed ? int{device.gid_index()} : -1;
  };
  EXPECT_EQ(chosen({link_local}), 1);
  EXPECT_EQ(chosen({link_local, ipv4}), 2) << "its interface has been given an address";
  EXPECT_EQ(chosen({link_local, other_ipv4, ipv4}), 3) << "it has moved to another index";
  EXPECT_EQ(chosen({link_local, other_ipv4}), 2) << "its address was changed";
}

struct VerbsAtTheStart : testing::Test, CallingPair {
  std::vector<std::byte> from = std::vector<std::byte>(4 * MiB, std::byte{1}), to = std::vector<std::byte>(4 * MiB);
  RegionId source, target;

  ~VerbsAtTheStart() override {
    for (const char* device : {"fake0", "fake1"}) {
      fake_verbs_plug(device, true);
      fake_verbs_port(device, true);
      fake_verbs_gids(device, {});
    }
  }
  [[nodiscard]] std::string make(const std::string& calls, const std::string& listens) {
    return logged_by([&] {
      a = *make_engine(calls);
      b = *make_engine(listens);
    });
  }
  [[nodiscard]] Result<> connect() {
    auto address = b->listen({"127.0.0.1:0"});
    if (!address) return tl::unexpected(address.error());
    return a->connect(*address, {}).map([&](EndpointId id) { of_a = id; });
  }
  [[nodiscard]] bool until_up(const std::vector<std::uint32_t>& rails) {
    return until([&] {
      for (auto* engine : {a.get(), b.get()})
        for (std::size_t rail = 0; rail < rails.size(); ++rail)
          if (engine->rails().at(rail).up != rails[rail]) return false;
      return true;
    });
  }
  void register_memory() {
    source = *a->register_region(from, MemoryKind::host, kAnyAccess);
    target = *b->register_region(to, MemoryKind::host, kAnyAccess);
  }
  void write() {
    std::fill(to.begin(), to.end(), std::byte{0});
    const Write one{.context = 1,
                    .local = {source, 0},
                    .remote = {b->remote(target), 0},
                    .length = from.size(),
                    .notify = std::nullopt};
    const std::uint64_t before = completed;
    ASSERT_TRUE(a->write(of_a, {&one, 1}));
    ASSERT_TRUE(until([&] { return completed == before + 1; }));
    EXPECT_TRUE(same_bytes(from, to));
  }
};

TEST_F(VerbsAtTheStart, APortThatIsDownIsARailThatIsDownAndComesUpWithIt) {
  fake_verbs_port("fake1", false);
  const std::string logged = make("ibverbs:fake0,fake1", "ibverbs:fake0,fake1");
  const auto line = logged.find("rail 1 of this process is down: rail fake1:1: the port is down; is its link up?");
  ASSERT_NE(line, std::string::npos) << logged;
  register_memory();
  ASSERT_TRUE(connect());
  ASSERT_TRUE(until([&] { return up_a && up_b; }));
  ASSERT_TRUE(until_up({1, 0}));
  write();
  fake_verbs_port("fake1", true);
  ASSERT_TRUE(until_up({1, 1}));
  fake_verbs_port("fake0", false);  // so the other must carry everything
  write();
}

TEST_F(VerbsAtTheStart, ADeviceThatIsNotThereIsARailThatIsDownAndComesUpWithIt) {
  fake_verbs_plug("fake1", false);
  const std::string logged = make("ibverbs:fake0,fake1", "ibverbs:fake0,fake1");
  EXPECT_NE(logged.find("rail 1 of this process is down: "), std::string::npos) << logged;
  register_memory();
  ASSERT_TRUE(connect());
  ASSERT_TRUE(until([&] { return up_a && up_b; }));
  write();
  fake_verbs_plug("fake1", true);
  ASSERT_TRUE(until_up({1, 1}));
  fake_verbs_port("fake0", false);
  write();
}

TEST_F(VerbsAtTheStart, WithoutAnyPortThatIsUpNothingStarts) {
  for (const char* device : {"fake0", "fake1"}) fake_verbs_port(device, false);
  const auto none = make_engine("ibverbs:fake0,fake1"), unnamed = make_engine("ibverbs");
  ASSERT_FALSE(none || unnamed);
  EXPECT_EQ(none.error().message, "rail fake0:1: the port is down; is its link up?");
  EXPECT_TRUE(unnamed.error().message.starts_with("no RDMA port is active here, but fake0:1, which is not active; "))
      << unnamed.error().message;
  fake_verbs_port("fake1", true);
  const auto lone = make_engine("ibverbs:fake0");
  ASSERT_FALSE(lone) << "a lone one has no others";
  EXPECT_EQ(lone.error().message, "rail fake0:1: the port is down; is its link up?");
}

TEST_F(VerbsAtTheStart, ALoneRailAndSeveralAreRefusedAndNamedOnBothSides) {
  const std::string one = "ibverbs:fake0", two = "ibverbs:fake0,fake1";
  for (const bool lone_calls : {true, false}) {
    SCOPED_TRACE(lone_calls);
    end.reset();
    (void)make(lone_calls ? one : two, lone_calls ? two : one);
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    const auto refused = [] { return refusals::counted()[static_cast<std::size_t>(refusals::Why::protocol)]; };
    const std::uint64_t before = refused();
    EXPECT_TRUE(connect());
    EXPECT_TRUE(until([&] { return end.has_value() && refused() > before; }));
    const std::string logged = testing::internal::GetCapturedStdout() + testing::internal::GetCapturedStderr();
    const std::string here = lone_calls ? "the peer has 2 rails, and this process 1:"
                                        : "the peer has 1 rail, and this process 2:",
                      there = lone_calls ? "the peer has 1 rail, and this process 2:"
                                         : "the peer has 2 rails, and this process 1:";
    EXPECT_FALSE(up_a || up_b);
    ASSERT_TRUE(end);
    EXPECT_TRUE(end->message.starts_with(here)) << end->message;
    EXPECT_NE(logged.find("refused: " + there), std::string::npos) << logged;
  }
}

// As where DHCP has given the interface another one.
TEST_F(VerbsAtTheStart, ControlConnectionsComeFromTheAddressThatTheRailHasNow) {
  constexpr FakeVerbsGid of_no_machine{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 198, 51, 100, 1};
  fake_verbs_gids("fake0", {of_no_machine});
  (void)make("ibverbs:fake0", "ibverbs:fake1");
  fake_verbs_gids("fake0", {});
  const auto connecting = connect();
  ASSERT_TRUE(connecting) << connecting.error().message;
  EXPECT_TRUE(until([&] { return up_a && up_b; }));
}

}  // namespace
}  // namespace rejoin::transport
