// A node's calls to its coordinator, where what answers does not want it, or is none.
#include "daemon/upstream.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <asio.hpp>
#include <functional>
#include <memory>
#include <set>

#include "daemon/node_listener.h"
#include "daemon/tests/meeting.h"

namespace rejoin::daemon {
namespace {

using asio::ip::tcp;
using test::kKey;

// A time less than this can't be, whatever the machine has to do.
TEST(Upstream, ANodeOfAnotherVersionIsRefusedAndComesAgainEverLessOften) {
  asio::io_context io{1};
  const JobKeys keys{kKey};
  NodeListener listener(io, keys, std::chrono::seconds(2),
                        {.message = [](auto, const auto&) { FAIL() << "it is heard"; }, .lost = [](auto) {}});
  ASSERT_TRUE(listener.listen("127.0.0.1:0"));
  Upstream* node = nullptr;
  proto::FromNode hello;
  hello.mutable_hello()->set_protocol(membership::kProtocolVersion + 1);
  Upstream upstream(io, listener.address(), keys, std::chrono::seconds(10),
                    {.up = [&] { node->send(hello); },
                     .message = [](const proto::ToNode&) {},
                     .down = [] {},
                     .over = [] { return false; },
                     .rejected = [] {}});
  node = &upstream;
  const TimePoint begun = SteadyClock().now();
  upstream.connect();
  while (listener.rejected() < 6 && SteadyClock().now() - begun < std::chrono::seconds(30))
    io.run_one_for(std::chrono::seconds(1));
  EXPECT_EQ(listener.rejected(), 6u);
  EXPECT_GE(SteadyClock().now() - begun, std::chrono::milliseconds(50 + 100 + 200 + 400 + 800));
  while (upstream.why_lost().find("it refuses this node: ") == std::string::npos &&
         SteadyClock().now() - begun < std::chrono::seconds(30))
    io.run_one_for(std::chrono::seconds(1));
  EXPECT_NE(upstream.why_lost().find("speaks protocol 17, and its coordinator or relay 15 to 16"), std::string::npos)
      << upstream.why_lost();
  EXPECT_TRUE(upstream.was_refused());
}

// A page's server says that it was not asked for a page, and closes: the caller sees now the one, now the other.
TEST(Upstream, WhatListensForSomethingElseIsCalledEverLessOftenAndTheReasonNamesTheRightAddress) {
  asio::io_context io{1};
  const JobKeys keys{kKey};
  tcp::acceptor acceptor{io, tcp::endpoint(asio::ip::address_v4::loopback(), 0)};
  std::set<std::string> reasons;
  Upstream* node = nullptr;
  Upstream upstream(io, fmt::format("127.0.0.1:{}", acceptor.local_endpoint().port()), keys, std::chrono::seconds(10),
                    {.up = [] { FAIL() << "it has shown the key"; },
                     .message = [](const proto::ToNode&) {},
                     .down = [&] { reasons.insert(node->why_lost()); },
                     .over = [] { return false; },
                     .rejected = [] {}});
  node = &upstream;
  const TimePoint begun = SteadyClock().now();
  int calls = 0;
  std::function<void()> serve = [&] {
    acceptor.async_accept([&](asio::error_code failed, tcp::socket socket) {
      if (failed) return;
      serve();
      if (calls++ % 2 == 1) return;  // it closes at once
      const auto caller =
          std::make_shared<std::pair<tcp::socket, std::array<char, 4096>>>(std::move(socket), std::array<char, 4096>());
      caller->first.async_read_some(asio::buffer(caller->second), [caller](asio::error_code ignored, std::size_t) {
        asio::write(caller->first, asio::buffer("HTTP/1.1 400 Bad Request\r\n\r\n", 28), ignored);
      });
    });
  };
  serve();
  upstream.connect();
  while (calls < 6 && SteadyClock().now() - begun < std::chrono::seconds(30)) io.run_one_for(std::chrono::seconds(1));
  EXPECT_EQ(calls, 6);
  EXPECT_GE(SteadyClock().now() - begun, std::chrono::milliseconds(50 + 100 + 200 + 400 + 800));
  EXPECT_GE(reasons.size(), 2u);
  for (const auto& why : reasons)
    EXPECT_NE(why.find("--connect takes its --listen address, not its --status"), std::string::npos) << why;
}

}  // namespace
}  // namespace rejoin::daemon
