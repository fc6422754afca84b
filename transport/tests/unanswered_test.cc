// A peer whose machine is gone, and one that lives and does not read.
#include "transport/tcp/unanswered.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <optional>

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
  // Nothing arrives at the client any more, as from a machine that is gone.
  static void cut_off_client() {
    int cut = 0;
    for (int fd = 0; fd < 1024; ++fd) {
      sockaddr_in own{}, there{};
      socklen_t own_length = sizeof own, there_length = sizeof there;
      if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_length) != 0 || own.sin_family != AF_INET ||
          own.sin_addr.s_addr != ::inet_addr(kLocal) ||
          ::getpeername(fd, reinterpret_cast<sockaddr*>(&there), &there_length) != 0)
        continue;
      sock_filter drop = BPF_STMT(BPF_RET | BPF_K, 0);
      const sock_fprog all{.len = 1, .filter = &drop};
      cut += ::setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &all, sizeof all) == 0;
    }
    ASSERT_EQ(cut, 1);
  }
};

TEST_F(TcpTraffic, APeerThatReadsNothingForLongGoesOnWhereItWas) {
  const TimePoint until = SteadyClock().now() + 3 * deadlines::kUnacknowledged.of(kSilence);
  while (!closed && SteadyClock().now() < until) poll_client();
  ASSERT_FALSE(closed) << closed->message;
  ASSERT_FALSE(completed) << "the kernels took all of it";
  ASSERT_TRUE(within(seconds(20), [&] { return poll_both(), completed || closed; }));
  ASSERT_FALSE(closed) << closed->message;
  EXPECT_EQ(to, from);
}

TEST_F(TcpTraffic, AMachineThatIsGoneIsNamed) {
  cut_off_client();
  ASSERT_TRUE(within(seconds(20), [&] { return poll_client(), closed.has_value(); }));
  EXPECT_EQ(closed->code, ErrorCode::unavailable);
  EXPECT_NE(closed->message.find("the peer is gone: its machine has answered nothing at 127.0.0.1:"), std::string::npos)
      << closed->message;
}

}  // namespace
}  // namespace rejoin::transport::tcp
