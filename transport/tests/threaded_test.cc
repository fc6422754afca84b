// Names of TCP with threads, and an owner that stands still.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <map>
#include <string>

#include "base/fd.h"
#include "transport/factory.h"
#include "transport/tcp/factory.h"
#include "transport/tests/any_access.h"
#include "transport/tests/within.h"
#include "transport/threaded/factory.h"

namespace rejoin::transport::threaded {
namespace {

TEST(Threaded, TheNameSaysHowManyThreads) {
  const std::map<std::string, std::string> families = {
      {"tcp", "tcp"},
      {"tcp;threads=0", "tcp"},
      {"tcp;threads=1", "tcp over 2 rails"},
      {"tcp+aes;threads=3;ktls=1", "tcp+aes over 4 rails"},
      {"tcp:127.0.0.1,127.0.0.2;threads=1", "tcp over 4 rails"},
      {"tcp:127.0.0.1,127.0.0.2;threads=7", "tcp over 16 rails"},
  };
  for (const auto& [name, family] : families) {
    EXPECT_TRUE(check_name(name)) << name;
    EXPECT_EQ(family_of(name), family);
    auto engine = transport::make_engine(name);
    ASSERT_TRUE(engine) << name << ": " << engine.error().message;
    EXPECT_TRUE((*engine)->listen({"127.0.0.1:0"})) << name;
  }
  for (const char* name : {"tcp;threads=", "tcp;threads=-1", "tcp;threads=two", "tcp;threads=16", "tcp;thread=1",
                           "tcp:127.0.0.1,127.0.0.2;threads=8", "tcp;threads=18446744073709551615", "tcp;ktls=1",
                           "tcp;", "tcp:;threads=1", "tcp;threads=1;threads=2"}) {
    const auto checked = check_name(name);
    ASSERT_FALSE(checked) << name;
    EXPECT_EQ(checked.error().code, ErrorCode::invalid_argument);
    EXPECT_NE(checked.error().message.find(name), std::string::npos) << checked.error().message;
    EXPECT_FALSE(transport::make_engine(name)) << name;
  }
}

// Another program may have one of the ports: then others are tried.
TEST(Threaded, ConnectionsForBulkListenBehindThePortThatIsNamed) {
  for (int left = 20;; --left) {
    ASSERT_GT(left, 0);
    const std::string free = (*tcp::make_engine({}))->listen({"127.0.0.1:0"})->text;
    const auto engine = *transport::make_engine("tcp;threads=2");
    const auto where = engine->listen({free});
    if (!where) continue;
    const int port = std::stoi(free.substr(free.rfind(':') + 1));
    EXPECT_EQ(where->text, fmt::format("127.0.0.1:{}|127.0.0.1:{}|127.0.0.1:{}", port, port + 1, port + 2));
    return;
  }
}

// A peer that says nothing is let go though nothing else wakes the thread.
TEST(Threaded, StrangersAreLetGoOfInTime) {
  auto engine = *make_engine(*tcp::make_engine({}));
  engine->set_silence(std::chrono::milliseconds(100));
  const std::string where = engine->listen({"127.0.0.1:0"})->text;
  sockaddr_in address{.sin_family = AF_INET,
                      .sin_port = htons(static_cast<std::uint16_t>(std::stoi(where.substr(where.rfind(':') + 1)))),
                      .sin_addr = {htonl(INADDR_LOOPBACK)},
                      .sin_zero = {}};
  const Fd stranger(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::connect(stranger.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  pollfd closed{.fd = stranger.get(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(::poll(&closed, 1, 30000), 1) << "it is kept";
}

// Its thread goes on, but not without a bound: who sends to it is held up, and hears at a bound that nothing is taken.
TEST(Threaded, MessagesToAnOwnerWhoTakesNoneAreHeldUp) {
  auto a = *tcp::make_engine({}), b = *make_engine(*tcp::make_engine({}));
  const EndpointId to_b = *a->connect(*b->listen({"127.0.0.1:0"}), {});
  ASSERT_TRUE(within(std::chrono::seconds(30), [&] {
    (void)b->poll();
    for (const auto& event : a->poll())
      if (event.kind == EventKind::connected) return true;
    return false;
  }));
  const Bytes message(Engine::kMaxMessage);
  std::size_t sent = 0, heard = 0;
  bool closed = false;
  ASSERT_TRUE(within(std::chrono::seconds(60), [&] {
    if (!closed && a->send(to_b, message)) ++sent;
    for (const auto& event : a->poll()) closed |= event.kind == EventKind::closed;
    return closed;
  }));
  EXPECT_LT(sent * message.size(), 100 * MiB);
  // Those that have left there are heard all the same, in order, and then the end.
  bool ended = false;
  ASSERT_TRUE(within(std::chrono::seconds(30), [&] {
    for (const auto& event : b->poll()) {
      heard += event.kind == EventKind::message;
      EXPECT_FALSE(ended) << "something is heard behind the end";
      ended |= event.kind == EventKind::closed;
    }
    if (!ended) a->close(to_b);
    return ended;
  }));
  EXPECT_GT(heard * message.size(), 4 * MiB);
  EXPECT_LT(heard, sent);
}

// Nothing is posted for good on an endpoint that has failed while its owner did not look.
TEST(Threaded, WhatIsPostedOnAnEndpointThatHasJustFailedEndsWithAnError) {
  auto a = *make_engine(*tcp::make_engine({})), b = *tcp::make_engine({});
  const EndpointId to_b = *a->connect(*b->listen({"127.0.0.1:0"}), {});
  std::vector<std::byte> memory(1 * MiB);
  const RegionId source = *a->register_region(memory, MemoryKind::host, kAnyAccess);
  const RegionId target = *b->register_region(memory, MemoryKind::host, kAnyAccess);
  ASSERT_TRUE(within(std::chrono::seconds(30), [&] {
    (void)b->poll();
    for (const auto& event : a->poll())
      if (event.kind == EventKind::connected) return true;
    return false;
  }));
  const RemoteRegion remote = b->remote(target);
  b.reset();
  ASSERT_TRUE(within(std::chrono::seconds(30), [&] { return !a->round_trip(to_b); }));  // its thread has seen it
  constexpr int kPosted = 10;
  int ended = 0;
  bool closed = false;
  for (std::uint64_t i = 0; i < kPosted; ++i) {
    const Write write{.context = i, .local = {source, 0}, .remote = {remote, 0}, .length = memory.size()};
    ASSERT_TRUE(a->write(to_b, {&write, 1})) << "the owner has not heard of it";
  }
  ASSERT_TRUE(within(std::chrono::seconds(30), [&] {
    for (const auto& event : a->poll()) {
      ended += event.kind == EventKind::completed && event.error;
      closed |= event.kind == EventKind::closed;
    }
    return closed && ended >= kPosted;
  }));
  EXPECT_EQ(ended, kPosted);
  EXPECT_FALSE(a->send(to_b, as_bytes("too late")));
}

}  // namespace
}  // namespace rejoin::transport::threaded
