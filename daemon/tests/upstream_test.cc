// A node's calls to its coordinator, where what answers does not want it, or is none.
#include "daemon/upstream.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <asio.hpp>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "base/deadlines.h"
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

// What lies between a node and its coordinator. It forgets connections: nothing passes any more, and neither end hears
// of that.
class Forgetful {
 public:
  Forgetful(asio::io_context& io, std::uint16_t to) : acceptor_(io, {loopback(), 0}), to_{loopback(), to} { accept(); }
  std::string address() const { return fmt::format("127.0.0.1:{}", acceptor_.local_endpoint().port()); }
  std::size_t calls() const { return ways_.size(); }
  bool takes_no_more = false;  // nothing passes of those that come
  void forget(std::size_t way) { ways_.at(way)->forgotten = true; }
  void remember(std::size_t way) {  // what was sent meanwhile comes
    ways_.at(way)->forgotten = false;
    for (auto& held : std::exchange(ways_.at(way)->held, {})) held();
  }

 private:
  struct Way {
    explicit Way(tcp::socket socket) : near(std::move(socket)), far(near.get_executor()) {}
    tcp::socket near, far;
    std::array<char, 4096> up{}, down{};
    bool forgotten = false;
    std::vector<std::function<void()>> held;
  };
  static asio::ip::address loopback() { return asio::ip::address_v4::loopback(); }
  void accept() {
    acceptor_.async_accept([this](asio::error_code failed, tcp::socket socket) {
      if (failed) return;
      auto& way = *ways_.emplace_back(std::make_unique<Way>(std::move(socket)));
      way.forgotten = takes_no_more;
      way.far.connect(to_);
      pass(way, way.near, way.far, way.up);
      pass(way, way.far, way.near, way.down);
      accept();
    });
  }
  void pass(Way& way, tcp::socket& from, tcp::socket& to, std::array<char, 4096>& bytes) {
    from.async_read_some(asio::buffer(bytes), [&](asio::error_code error, std::size_t count) {
      if (error == asio::error::operation_aborted) return;
      const auto go_on = [&, error, count] {
        asio::error_code ignored;
        if (error) return void(to.close(ignored));
        asio::write(to, asio::buffer(bytes, count), ignored);
        pass(way, from, to, bytes);
      };
      if (way.forgotten) way.held.emplace_back(go_on);
      else go_on();
    });
  }

  tcp::acceptor acceptor_;
  const tcp::endpoint to_;
  std::vector<std::unique_ptr<Way>> ways_;
};

// A node that says something now and then, and a coordinator that answers it.
struct Conversation {
  static constexpr std::chrono::milliseconds kSilence{600};
  asio::io_context io{1};
  JobKeys keys{kKey};
  NodeListener listener{io,
                        keys,
                        kSilence,
                        {.message =
                             [this](membership::NodeId from, const proto::FromNode&) {
                               ++heard[from];
                               proto::ToNode answer;
                               answer.mutable_heartbeat();
                               listener.send(from, answer.SerializeAsString());
                             },
                         .lost = [this](membership::NodeId one) { lost.insert(one); }}};
  std::map<membership::NodeId, int> heard;
  std::set<membership::NodeId> lost;
  std::unique_ptr<Forgetful> between;
  std::unique_ptr<Upstream> node;
  asio::steady_timer timer{io};
  std::string turns;  // of `up` and `down`
  int answered = 0;

  Conversation() {
    EXPECT_TRUE(listener.listen("127.0.0.1:0"));
    const auto port = std::stoi(listener.address().substr(listener.address().rfind(':') + 1));
    between = std::make_unique<Forgetful>(io, static_cast<std::uint16_t>(port));
    node = std::make_unique<Upstream>(io, between->address(), keys, kSilence,
                                      Upstream::Handlers{.up = [this] { turns += "up "; },
                                                         .message = [this](const proto::ToNode&) { ++answered; },
                                                         .down = [this] { turns += "down "; },
                                                         .over = [] { return false; },
                                                         .rejected = [] {}});
    node->connect();
    tick();
  }
  void tick() {
    timer.expires_after(deadlines::tick_of(kSilence));
    timer.async_wait([this](asio::error_code error) {
      if (error) return;
      node->tick(SteadyClock().now());
      proto::FromNode heartbeat;
      heartbeat.mutable_heartbeat();
      node->send(heartbeat);
      tick();
    });
  }
  bool reach(const std::function<bool()>& there) {
    const TimePoint until = SteadyClock().now() + std::chrono::seconds(30);
    while (!there() && SteadyClock().now() < until) io.run_one_for(std::chrono::seconds(1));
    return there();
  }
};

// Nobody says that the silence is over: what closes a silent connection is not there.
TEST(Upstream, AConnectionThatIsForgottenHasASuccessorAndIsHeardUntilThatIsUp) {
  Conversation talk;
  ASSERT_TRUE(talk.reach([&] { return talk.answered > 0; }));
  talk.between->forget(0);
  ASSERT_TRUE(talk.reach([&] { return talk.turns == "up down up "; })) << talk.turns;
  const int before = talk.answered;
  ASSERT_TRUE(talk.reach([&] { return talk.answered > before; }));
  EXPECT_EQ(talk.turns, "up down up ");
  EXPECT_TRUE(talk.node->up());
  EXPECT_TRUE(talk.node->why_lost().empty());
  EXPECT_EQ(talk.heard.size(), 2u) << "each over its own connection";
  // What was on its way over the old one arrives now, and its end behind that.
  talk.between->remember(0);
  ASSERT_TRUE(talk.reach([&] { return !talk.lost.empty(); }));
  EXPECT_EQ(talk.lost, std::set{talk.heard.begin()->first});
  const int later = talk.answered;
  ASSERT_TRUE(talk.reach([&] { return talk.answered > later; }));
  EXPECT_EQ(talk.turns, "up down up ");
}

// As one that is stopped, or has too much to do: it is called beside that, and stays where it is when it answers.
TEST(Upstream, WhoeverAnswersAfterAllKeepsTheConnectionThatItHas) {
  Conversation talk;
  ASSERT_TRUE(talk.reach([&] { return talk.answered > 0; }));
  talk.between->forget(0);
  talk.between->takes_no_more = true;
  ASSERT_TRUE(talk.reach([&] { return talk.between->calls() == 2; })) << "it is called";
  talk.between->remember(0);
  const int before = talk.answered;
  ASSERT_TRUE(talk.reach([&] { return talk.answered > before; }));
  talk.between->remember(1);  // too late
  ASSERT_TRUE(talk.reach([&] { return talk.answered > before + 8; }));
  EXPECT_EQ(talk.turns, "up ");
  EXPECT_EQ(talk.heard.size(), 1u);
  EXPECT_EQ(talk.listener.rejected(), 0u);
}

// Calls to this port that are under way. One that is lost the system repeats after a second.
std::size_t calls_to(std::uint16_t port) {
  std::ifstream table("/proc/net/tcp");
  const std::string to = fmt::format("0100007F:{:04X} 02 ", port);  // 127.0.0.1, SYN_SENT
  std::size_t count = 0;
  for (std::string line; std::getline(table, line);) count += line.find(to) != std::string::npos ? 1 : 0;
  return count;
}

TEST(Upstream, ACallThatNobodyAnswersIsMadeOnceMoreBesideIt) {
  asio::io_context io{1};
  const JobKeys keys{kKey};
  tcp::acceptor acceptor{io};
  acceptor.open(tcp::v4());
  acceptor.bind({asio::ip::address_v4::loopback(), 0});
  acceptor.listen(0);
  const auto port = acceptor.local_endpoint().port();
  // Others fill its queue, and then the system answers nobody.
  std::vector<tcp::socket> others;
  const auto fill = [&] {
    others.emplace_back(io).async_connect(acceptor.local_endpoint(), [](asio::error_code) {});
    io.run_one_for(std::chrono::milliseconds(100));
    return calls_to(port) > 0;
  };
  others.reserve(16);
  while (others.size() < 16 && !fill()) {
  }
  const std::size_t of_others = calls_to(port);
  ASSERT_GT(of_others, 0u);
  Upstream upstream(io, fmt::format("127.0.0.1:{}", port), keys, std::chrono::seconds(2),
                    {.up = [] {},
                     .message = [](const proto::ToNode&) {},
                     .down = [] { FAIL() << "before it was called once more"; },
                     .over = [] { return false; },
                     .rejected = [] {}});
  upstream.connect();
  const TimePoint until = SteadyClock().now() + std::chrono::seconds(30);
  while (calls_to(port) < of_others + 2 && SteadyClock().now() < until && !HasFatalFailure())
    io.run_one_for(std::chrono::milliseconds(20));
  EXPECT_GE(calls_to(port), of_others + 2);
}

}  // namespace
}  // namespace rejoin::daemon
