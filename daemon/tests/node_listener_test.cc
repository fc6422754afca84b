// Those that a listener for control connections refuses.
#include "daemon/node_listener.h"

#include <gtest/gtest.h>

#include <optional>

#include "base/clock.h"
#include "daemon/tests/meeting.h"

namespace rejoin::daemon {
namespace {

using asio::ip::tcp;

TEST(NodeListener, ARefusalIsLoggedOnceForEachHostAndOnceForAllThatAreTooMany) {
  asio::io_context io{1};
  const JobKeys keys{test::kKey};
  NodeListener listener(io, keys, std::chrono::seconds(2), {.message = [](auto, const auto&) {}, .lost = [](auto) {}});
  ASSERT_TRUE(listener.listen("127.0.0.1:0"));
  const auto port = std::stoi(listener.address().substr(listener.address().rfind(':') + 1));
  testing::internal::CaptureStdout();
  constexpr std::uint32_t kHosts = 300, kKnown = 256;
  for (std::uint32_t round = 1; round <= 2; ++round)
    for (std::uint32_t host = 0; host < kHosts; ++host) {
      tcp::socket stranger(io, tcp::endpoint(asio::ip::address_v4(0x7f010000 + host), 0));
      stranger.connect({asio::ip::address_v4::loopback(), static_cast<std::uint16_t>(port)});
      asio::write(stranger, asio::buffer("GET / HTTP/1.1\r\n\r\n", 18));
      const TimePoint deadline = SteadyClock().now() + std::chrono::seconds(10);
      const auto refused = (round - 1) * kHosts + host + 1;
      while (listener.rejected() < refused && SteadyClock().now() < deadline) io.run_one_for(std::chrono::seconds(1));
      ASSERT_EQ(listener.rejected(), refused);
    }
  const std::string lines = testing::internal::GetCapturedStdout();
  std::size_t count = 0;
  for (auto at = lines.find("was refused"); at != lines.npos; at = lines.find("was refused", at + 1)) ++count;
  EXPECT_EQ(count, kKnown + 1) << "the last one for all hosts that are not known";
}

TEST(NodeListener, AnIPv6AddressIsNamedInBrackets) {
  asio::io_context io{1};
  const JobKeys keys{test::kKey};
  NodeListener listener(io, keys, std::chrono::seconds(2), {.message = [](auto, const auto&) {}, .lost = [](auto) {}});
  if (auto here = listener.listen("[::1]:0"); !here) GTEST_SKIP() << "no IPv6 here: " << here.error().message;
  const auto port = std::stoi(listener.address().substr(listener.address().rfind(':') + 1));
  testing::internal::CaptureStdout();
  tcp::socket stranger(io);
  stranger.connect({asio::ip::address_v6::loopback(), static_cast<std::uint16_t>(port)});
  const auto from = stranger.local_endpoint().port();
  asio::write(stranger, asio::buffer("GET / HTTP/1.1\r\n\r\n", 18));
  const TimePoint deadline = SteadyClock().now() + std::chrono::seconds(10);
  while (listener.rejected() < 1 && SteadyClock().now() < deadline) io.run_one_for(std::chrono::seconds(1));
  const std::string lines = testing::internal::GetCapturedStdout();
  EXPECT_NE(lines.find("a connection from [::1]:" + std::to_string(from) + " was refused"), lines.npos) << lines;
}

// The rest of a decision is still to be sent when one message of it ends a connection.
void is_lost_by_what_it_is_sent(bool closes) {
  asio::io_context io{1};
  const JobKeys keys{test::kKey};
  std::optional<membership::NodeId> heard;
  int lost = 0;
  NodeListener listener(io, keys, std::chrono::seconds(2),
                        {.message = [&](auto node, const auto&) { heard = node; }, .lost = [&](auto) { ++lost; }});
  ASSERT_TRUE(listener.listen("127.0.0.1:0"));
  tcp::socket socket(io);
  const auto port = std::stoi(listener.address().substr(listener.address().rfind(':') + 1));
  socket.connect({asio::ip::address_v4::loopback(), static_cast<std::uint16_t>(port)});
  const auto node = std::make_shared<Framed>(std::move(socket), keys, false);
  proto::FromNode message;
  message.mutable_rank_down();
  node->start(
      {.ready = [&] { node->send(message.SerializeAsString()); }, .message = [](auto) {}, .closed = [](auto) {}},
      std::chrono::seconds(10));
  const TimePoint deadline = SteadyClock().now() + std::chrono::seconds(10);
  while (!heard && SteadyClock().now() < deadline) io.run_one_for(std::chrono::seconds(1));
  ASSERT_TRUE(heard);
  listener.send(*heard, std::string(Framed::kMaxFrame + 1, 'x'));
  EXPECT_EQ(lost, 0);
  EXPECT_EQ(listener.nodes(), 0u);
  if (closes) listener.close(*heard);  // as the same decision may say
  bool over = false;
  asio::post(io, [&] { over = true; });
  while (!over && SteadyClock().now() < deadline) io.run_one_for(std::chrono::seconds(1));
  EXPECT_EQ(lost, closes ? 0 : 1);
  node->close();
}

TEST(NodeListener, WhoIsLostByWhatItIsSentIsToldOfWhenThatIsOver) { is_lost_by_what_it_is_sent(false); }

TEST(NodeListener, WhoIsLostByWhatItIsSentAndClosedThenIsNotToldOf) { is_lost_by_what_it_is_sent(true); }

}  // namespace
}  // namespace rejoin::daemon
