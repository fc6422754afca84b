// Rails of a real network prove the connection's secret, each, and again whenever one is tried anew.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <vector>

#include "base/clock.h"
#include "transport/striped/factory.h"
#include "transport/tcp/factory.h"
#include "transport/tests/within.h"

namespace rejoin::transport::striped {
namespace {

const Secret kFirstKey = Secret::of({7, 1}), kNextKey = Secret::of({7, 2});

// This process's sockets that are connected to that address.
std::vector<int> connected_to(const std::string& host) {
  std::vector<int> found;
  for (int fd = 0; fd < 1024; ++fd) {
    sockaddr_in there{};
    socklen_t length = sizeof there;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&there), &length) == 0 && there.sin_family == AF_INET &&
        there.sin_addr.s_addr == ::inet_addr(host.c_str()) && ntohs(there.sin_port) != 0)
      found.push_back(fd);
  }
  return found;
}

// A rail that breaks after the job's key was changed is tried with the new one.
TEST(Rails, ComeBackAfterTheKeyHasChanged) {
  static const SteadyClock clock;
  const auto make = [&] {
    std::vector<std::unique_ptr<Engine>> rails;
    for (const char* local : {"127.0.0.3", "127.0.0.4"}) rails.push_back(tcp::make_engine({.local = local}).value());
    auto engine = make_engine(std::move(rails), {}, clock).value();
    engine->set_silence(std::chrono::milliseconds(400));
    engine->set_secrets({kFirstKey});
    return engine;
  };
  auto server = make(), client = make();
  const auto endpoint = client->connect({server->listen({"127.0.0.3:0"})->text, kFirstKey}, {}).value();
  std::string heard;
  bool connected = false, closed = false;
  const auto poll = [&] {
    for (const auto& event : client->poll()) {
      connected = connected || event.kind == EventKind::connected;
      closed = closed || event.kind == EventKind::closed;
    }
    for (const auto& event : server->poll()) {
      if (event.kind == EventKind::message) heard = as_text(event.message);
      closed = closed || event.kind == EventKind::closed;
    }
  };
  // Both ends of both rails are here: each rail has two sockets that are connected to its address.
  const auto rail_is_up = [&](const char* host) { return connected_to(host).size() == 2; };
  ASSERT_TRUE(within(std::chrono::seconds(20), [&] {
    poll();
    return connected && rail_is_up("127.0.0.3") && rail_is_up("127.0.0.4");
  }));
  for (auto* engine : {server.get(), client.get()}) engine->set_secrets({kNextKey});
  for (const char* broken : {"127.0.0.4", "127.0.0.3"}) {
    const auto before = connected_to(broken);
    for (const int fd : before) ::shutdown(fd, SHUT_RDWR);
    ASSERT_TRUE(within(std::chrono::seconds(20), [&] {
      poll();
      return connected_to(broken).empty();
    }));
    // Its greetings are over when it is there for longer than they take.
    TimePoint last_down = clock.now();
    ASSERT_TRUE(within(std::chrono::seconds(20), [&] {
      poll();
      if (!rail_is_up(broken)) last_down = clock.now();
      return clock.now() - last_down > std::chrono::milliseconds(200);
    })) << broken;
  }
  ASSERT_TRUE(client->send(endpoint, as_bytes("still here")));
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    poll();
    return heard == "still here";
  }));
  EXPECT_FALSE(closed);
}

TEST(Rails, PassTheSecretOn) {
  const SteadyClock clock;
  const auto over_two = [&] {
    std::vector<std::unique_ptr<Engine>> rails;
    for (int i = 0; i < 2; ++i) rails.push_back(tcp::make_engine({}).value());
    return make_engine(std::move(rails), {}, clock).value();
  };
  auto server = over_two();
  server->set_secrets({kFirstKey});
  const auto address = server->listen({"127.0.0.1:0"}).value();
  for (const auto& [secret, comes_in] : {std::pair{kFirstKey, true}, {kNextKey, false}}) {
    auto client = over_two();
    const auto endpoint = client->connect({address.text, secret}, as_bytes("hello")).value();
    bool connected = false, closed = false;
    EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
      (void)server->poll();
      for (const auto& event : client->poll()) {
        connected = connected || event.kind == EventKind::connected;
        closed = closed || event.kind == EventKind::closed;
      }
      return connected || closed;
    }));
    EXPECT_EQ(connected, comes_in);
    client->close(endpoint);
  }
}

}  // namespace
}  // namespace rejoin::transport::striped
