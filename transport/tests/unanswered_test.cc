// A peer whose machine is gone, and one that lives and does not read.
#include "transport/tcp/unanswered.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <optional>

#include "base/fd.h"
#include "transport/tcp/factory.h"
#include "transport/tests/within.h"

namespace rejoin::transport::tcp {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr Duration kTwoSeconds = seconds(2);  // so that ten seconds are too long

TEST(Looks, OfTheTimeInWhichNobodyLookedLittleCounts) {
  Looks looks;
  TimePoint now(std::chrono::hours(1));
  (void)looks.due(now, kTwoSeconds);
  EXPECT_EQ(looks.due(now += milliseconds(999), kTwoSeconds), std::nullopt);
  EXPECT_EQ(looks.due(now += milliseconds(1), kTwoSeconds), seconds(1));
  EXPECT_EQ(looks.due(now += milliseconds(1500), kTwoSeconds), milliseconds(1500));
  EXPECT_EQ(looks.due(now += std::chrono::hours(1), kTwoSeconds), seconds(2));
}

// Looks at a connection each second, and tells after how many of them the peer was taken for gone; 0: never.
template <typename Traffics>
int gone_after(int looks, Traffics traffic_at, Duration silence = kTwoSeconds) {
  Unanswered unanswered;
  for (int second = 0; second < looks; ++second)
    if (unanswered.too_long(traffic_at(second), seconds(1), silence)) return second;
  return 0;
}

TEST(Unanswered, WhatIsNeverAcknowledgedIsFoundAfterFiveSilences) {
  EXPECT_EQ(gone_after(100, [](int) { return Traffic{.under_way = true}; }), 11);
  EXPECT_EQ(gone_after(100, [](int second) { return Traffic{.under_way = second >= 40}; }), 51) << "it was idle before";
}

// As where long packets are lost: what comes from there, and what else goes there, arrives.
TEST(Unanswered, AMachineThatOnlySaysSomethingAcknowledgesNothing) {
  EXPECT_EQ(
      gone_after(100,
                 [](int second) { return Traffic{.under_way = true, .segments = static_cast<std::uint32_t>(second)}; }),
      11);
}

TEST(Unanswered, APeerThatAcknowledgesALittleNowAndThenIsThere) {
  const auto acknowledges_each = [](int each) {
    return [each](int second) {
      return Traffic{.under_way = true, .acknowledged = static_cast<std::uint64_t>(second / each)};
    };
  };
  EXPECT_EQ(gone_after(1000, acknowledges_each(10)), 0);
  EXPECT_EQ(gone_after(1000, acknowledges_each(20)), 11);
}

// Its kernel asks each two seconds whether this end is there.
TEST(Unanswered, APeerThatReadsNothingIsThereForAsLongAsItsKernelIsHeard) {
  const auto heard_for = [](int heard) {
    return [heard](int second) {
      return Traffic{
          .under_way = true, .held_back = true, .segments = static_cast<std::uint32_t>(std::min(second, heard) / 2)};
    };
  };
  EXPECT_EQ(gone_after(10'000, heard_for(10'000)), 0);
  EXPECT_EQ(gone_after(10'000, heard_for(1000)), 1011);
}

TEST(Unanswered, NoKernelAsksMoreThanOnceInASecondSoThatAPeerThatReadsNothingHasTimeForThat) {
  const auto silent = [](bool held_back) {
    return [held_back](int) { return Traffic{.under_way = true, .held_back = held_back}; };
  };
  EXPECT_EQ(gone_after(100, silent(true), milliseconds(100)), 6);
  EXPECT_EQ(gone_after(100, silent(false), milliseconds(100)), 1);
  EXPECT_EQ(probe_after(milliseconds(100)), seconds(1));
  EXPECT_EQ(probe_after(milliseconds(3900)), seconds(3));
  EXPECT_EQ(probe_after(std::chrono::hours(1)), seconds(60));
}

// A client that writes more than kernels take by themselves to a server that is polled only where it is said.
struct TcpTraffic : testing::Test {
  static constexpr const char* kLocal = "127.0.0.77";
  static constexpr Duration kSilence = milliseconds(50);
  std::unique_ptr<Engine> server = make_engine({}).value(), client = make_engine({.local = kLocal}).value();
  Bytes from = Bytes(64 * MiB, std::byte{7}), to = Bytes(64 * MiB);
  std::optional<Error> closed;
  bool connected = false, accepted = false, completed = false;

  void SetUp() override {
    for (auto* engine : {server.get(), client.get()}) engine->set_silence(kSilence);
    const auto source = client->register_region(from, MemoryKind::host, Access::local).value();
    const auto target = server->register_region(to, MemoryKind::host, Access::remote_write).value();
    const auto there = client->connect(server->listen({"127.0.0.1:0"}).value(), {}).value();
    ASSERT_TRUE(within(seconds(20), [&] { return poll_both(), connected && accepted; }));
    const Write write{.local = {source, 0}, .remote = {server->remote(target), 0}, .length = from.size()};
    ASSERT_TRUE(client->write(there, {&write, 1}));
  }
  void poll_client() {
    for (const auto& event : client->poll()) {
      connected |= event.kind == EventKind::connected;
      completed |= event.kind == EventKind::completed && !event.error;
      if (event.kind == EventKind::closed) closed = event.error;
    }
  }
  void poll_both() {
    poll_client();
    for (const auto& event : server->poll()) accepted |= event.kind == EventKind::accepted;
  }
  // Another descriptor of the connection's socket at the end whose address, or peer's address, is the client's.
  static Fd socket_where(int (*address_of)(int, sockaddr*, socklen_t*)) {
    for (int fd = 0; fd < 1024; ++fd) {
      sockaddr_in client{}, peer{};
      socklen_t length = sizeof client, peer_length = sizeof peer;
      if (address_of(fd, reinterpret_cast<sockaddr*>(&client), &length) == 0 && client.sin_family == AF_INET &&
          client.sin_addr.s_addr == ::inet_addr(kLocal) &&
          ::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_length) == 0)
        return duplicate(fd).value();
    }
    return {};
  }
  // Nothing arrives there any more, as from a machine that is gone.
  static void cut_off(const Fd& socket) {
    sock_filter drop = BPF_STMT(BPF_RET | BPF_K, 0);
    const sock_fprog all{.len = 1, .filter = &drop};
    ASSERT_EQ(::setsockopt(socket.get(), SOL_SOCKET, SO_ATTACH_FILTER, &all, sizeof all), 0);
  }
};

// Its kernel is heard without an answer to what ours asks, which it does ever less often.
TEST_F(TcpTraffic, APeerThatReadsNothingForLongIsHeardAndGoesOnWhereItWas) {
  const Fd here = socket_where(::getsockname), there = socket_where(::getpeername);
  ASSERT_TRUE(within(seconds(20), [&] {
    poll_client();
    const Traffic now = traffic_of(here).value();
    return now.under_way && now.held_back;
  }));
  cut_off(there);
  const auto segments = traffic_of(here)->segments;
  ASSERT_TRUE(within(seconds(5), [&] { return poll_client(), traffic_of(here)->segments != segments || closed; }));
  ASSERT_FALSE(closed) << closed->message;
  ASSERT_FALSE(completed);
  const int none = 0;
  ASSERT_EQ(::setsockopt(there.get(), SOL_SOCKET, SO_DETACH_FILTER, &none, sizeof none), 0);
  ASSERT_TRUE(within(seconds(20), [&] { return poll_both(), completed || closed; }));
  ASSERT_FALSE(closed) << closed->message;
  EXPECT_EQ(to, from);
}

TEST_F(TcpTraffic, AMachineThatIsGoneIsNamed) {
  cut_off(socket_where(::getsockname));
  ASSERT_TRUE(within(seconds(20), [&] { return poll_client(), closed.has_value(); }));
  EXPECT_EQ(closed->code, ErrorCode::timeout) << "this end has found it out itself";
  EXPECT_NE(closed->message.find("the peer is gone: its machine has answered nothing at 127.0.0.1:"), std::string::npos)
      << closed->message;
}

}  // namespace
}  // namespace rejoin::transport::tcp
