// A store in etcd whose members die, stop and come back, or which are none at all.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <array>
#include <asio/ip/tcp.hpp>
#include <asio/steady_timer.hpp>
#include <asio/write.hpp>
#include <thread>

#include "daemon/tests/etcd_support.h"
#include "daemon/tests/wall_clock.h"

namespace rejoin::daemon {
namespace {

using testing::HasSubstr;
using namespace std::chrono_literals;

constexpr auto kDeadline = 250ms;

// Passes on what it is sent, and what is answered later.
class LateAnswers {
 public:
  LateAnswers(const std::string& to, std::chrono::milliseconds delay) : delay_(delay) {
    const auto colon = to.rfind(':');
    to_ = {asio::ip::make_address(to.substr(0, colon)), static_cast<std::uint16_t>(std::stoi(to.substr(colon + 1)))};
    accept();
    thread_ = std::jthread([this] { io_.run(); });
  }
  ~LateAnswers() { io_.stop(); }
  std::string address() const { return fmt::format("127.0.0.1:{}", acceptor_.local_endpoint().port()); }

 private:
  using Socket = std::shared_ptr<asio::ip::tcp::socket>;
  void accept() {
    auto caller = std::make_shared<asio::ip::tcp::socket>(io_), etcd = std::make_shared<asio::ip::tcp::socket>(io_);
    acceptor_.async_accept(*caller, [this, caller, etcd](asio::error_code error) {
      if (error) return;
      etcd->connect(to_, error);
      pass(caller, etcd, 0ms);
      pass(etcd, caller, delay_);
      accept();
    });
  }
  void pass(const Socket& from, const Socket& to, std::chrono::milliseconds delay) {
    auto bytes = std::make_shared<std::array<char, 65536>>();
    from->async_read_some(asio::buffer(*bytes), [=, this](asio::error_code error, std::size_t got) {
      auto timer = std::make_shared<asio::steady_timer>(io_, delay);
      timer->async_wait([=, kept = timer](asio::error_code) {
        asio::error_code gone;
        if (error) to->close(gone);
        else asio::write(*to, asio::buffer(*bytes, got), gone);
      });
      if (!error) pass(from, to, delay);
    });
  }

  const std::chrono::milliseconds delay_;
  asio::io_context io_{1};
  asio::ip::tcp::endpoint to_;
  asio::ip::tcp::acceptor acceptor_{io_, {asio::ip::address_v4::loopback(), 0}};
  std::jthread thread_;
};

class EtcdStoreFailures : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (!test::EtcdCluster::program().empty())
      etcd = std::make_unique<test::EtcdCluster>(test::EtcdCluster::Options{.members = 3});
  }
  static void TearDownTestSuite() { etcd.reset(); }
  void SetUp() override { SKIP_WITHOUT_ETCD(); }

  // Its endpoints begin with this member's.
  EtcdOptions options(std::size_t first) const {
    EtcdOptions made{.prefix = prefix, .deadline = kDeadline};
    for (std::size_t i = 0; i < 3; ++i) made.endpoints.push_back(etcd->endpoint((first + i) % 3));
    return made;
  }
  static std::size_t follower() { return (etcd->leader() + 1) % 3; }
  static std::uint64_t leads(Client& client) {
    return client.insist({.kind = Kind::claim, .value = "a"}).leader_revision;
  }

  static inline std::unique_ptr<test::EtcdCluster> etcd;
  const std::string prefix = own_prefix();
};

TEST_F(EtcdStoreFailures, AMemberThatIsKilledCostsNoDeadlineAndIsUsedAgain) {
  const std::size_t first = follower();
  Client a(options(first));
  const auto token = leads(a);
  etcd->kill(first);
  EXPECT_EQ(a.insist({.kind = Kind::append, .token = token, .value = "x"}).outcome, Outcome::done);
  std::printf("a member killed: an append took %.1f ms\n", milliseconds(a.took));
  EXPECT_LT(a.took, kDeadline);

  etcd->restart(first);
  etcd->wait_until_healthy();
  for (std::size_t other : {first + 1, first + 2}) etcd->kill(other % 3);
  const auto alone = a.insist({.kind = Kind::read, .recent = false});
  EXPECT_EQ(alone.entries, (Entries{{0, "x"}})) << "one member alone may say what it has";
  EXPECT_EQ(a.read().outcome, Outcome::unknown) << "as of now, it can't know";
  for (std::size_t other : {first + 1, first + 2}) etcd->restart(other % 3);
  etcd->wait_until_healthy();
}

TEST_F(EtcdStoreFailures, AMemberThatIsStoppedCostsOneDeadline) {
  const std::size_t first = follower();
  Client a(options(first));
  const auto token = leads(a);
  etcd->stop(first);
  EXPECT_EQ(a.append(token, 0, "x").outcome, Outcome::done);
  std::printf("a member stopped: an append took %.1f ms, ", milliseconds(a.took));
  EXPECT_GE(a.took, kDeadline);
  EXPECT_LT(a.took, 2 * kDeadline);
  EXPECT_EQ(a.append(token, 1, "y").outcome, Outcome::done);
  std::printf("the next one %.1f ms\n", milliseconds(a.took));
  EXPECT_LT(a.took, kDeadline) << "the one that answered is asked first";
  etcd->resume(first);
  // What it was asked first is done now, or not at all; once it is.
  EXPECT_EQ(a.read().entries, (Entries{{0, "x"}, {1, "y"}}));
}

// All of gRPC's timers stand still then: what ends a call, and what connects again.
TEST_F(EtcdStoreFailures, AClockThatIsSetBackDelaysNothing) {
  const std::size_t first = follower();
  Client a(options(first)), alone({.endpoints = {etcd->endpoint(first)}, .prefix = prefix, .deadline = kDeadline});
  const auto token = leads(a);
  EXPECT_EQ(alone.read().outcome, Outcome::done);
  const test::ClockSetBack back(std::chrono::hours(1));
  etcd->stop(first);
  const auto answer = a.insist({.kind = Kind::append, .token = token, .value = "x"});
  EXPECT_TRUE(answer.outcome == Outcome::done || answer.existing == "x") << answer.error;
  EXPECT_LT(a.took, 4 * kDeadline) << "another member is there";
  EXPECT_THAT(alone.read().error, HasSubstr("no answer within 250 ms"));
  etcd->resume(first);
  etcd->kill(first);
  EXPECT_EQ(alone.read().outcome, Outcome::unknown);
  EXPECT_EQ(alone.read().outcome, Outcome::unknown);
  etcd->restart(first);
  EXPECT_EQ(alone.insist({.kind = Kind::read}).entries, (Entries{{0, "x"}}));
  etcd->wait_until_healthy();
}

TEST_F(EtcdStoreFailures, WhenTheLeaderOfEtcdDiesOrStopsItGoesOnWithAnother) {
  Client a(options(0));
  const auto token = leads(a);
  std::uint64_t position = 0;
  for (bool dies : {true, false}) {
    const std::size_t leader = etcd->leader();
    if (dies) etcd->kill(leader);
    else etcd->stop(leader);
    const TimePoint begun = SteadyClock().now();
    const std::string entry = fmt::format("{}", position);
    const auto answer = a.insist({.kind = Kind::append, .token = token, .position = position, .value = entry});
    std::printf("the leader of etcd %s: an append took %.0f ms\n", dies ? "killed" : "stopped",
                milliseconds(SteadyClock().now() - begun));
    EXPECT_TRUE(answer.outcome == Outcome::done || answer.existing == entry);
    ++position;
    if (dies) etcd->restart(leader);
    else etcd->resume(leader);
    etcd->wait_until_healthy();
  }
  EXPECT_EQ(a.read().entries, (Entries{{0, "0"}, {1, "1"}}));
}

TEST_F(EtcdStoreFailures, WhenAllAreDownItSaysSoInTimeAndWorksWhenTheyAreBack) {
  Client a(options(0));
  const auto token = leads(a);
  for (bool dies : {true, false}) {
    for (std::size_t i = 0; i < 3; ++i)
      if (dies) etcd->kill(i);
      else etcd->stop(i);
    const auto answer = a.append(token, 0, "x");
    EXPECT_EQ(answer.outcome, Outcome::unknown);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_THAT(answer.error, HasSubstr("etcd at " + etcd->endpoint(i) + ": "));
    if (!dies) EXPECT_THAT(answer.error, HasSubstr("no answer within 250 ms"));
    std::printf("all %s: after %.0f ms: %s\n", dies ? "killed" : "stopped", milliseconds(a.took), answer.error.c_str());
    EXPECT_LT(a.took, 4 * kDeadline);
    if (!dies) EXPECT_THAT(a.append(token, 0, "x").error, HasSubstr("no answer within 500 ms")) << "it may be slow";
    for (std::size_t i = 0; i < 3; ++i)
      if (dies) etcd->restart(i);
      else etcd->resume(i);
    EXPECT_EQ(a.insist({.kind = Kind::read}).leader_revision, token);
    etcd->wait_until_healthy();
  }
}

// As behind a slow disk or network. What was given up has been done, and each try takes longer than the first.
TEST_F(EtcdStoreFailures, AStoreThatIsAlwaysSlowIsGivenTheTime) {
  constexpr auto delay = 500ms, first = 25ms;
  const LateAnswers late(etcd->endpoint(0), delay);
  Client a({.endpoints = {late.address()}, .prefix = prefix, .deadline = first});
  const auto hurried = a.read();
  EXPECT_EQ(hurried.outcome, Outcome::unknown);
  EXPECT_THAT(hurried.error, HasSubstr("no answer within 25 ms"));
  EXPECT_THAT(hurried.error, HasSubstr("--silence-ms"));
  const auto claimed = a.insist({.kind = Kind::claim, .value = "a"});
  EXPECT_EQ(claimed.leader, "a") << "by this try, or by one before";
  const auto token = claimed.leader_revision;
  for (const auto position : {0u, 1u, 2u}) {
    EXPECT_EQ(a.append(token, position, "x").outcome, Outcome::done) << "the first try has the time";
    EXPECT_GE(a.took, delay);
  }
  Client b({.endpoints = {late.address()}, .prefix = prefix, .deadline = first, .longest = 2 * first});
  for (int i = 0; i < 4; ++i) EXPECT_EQ(b.read().outcome, Outcome::unknown);
  EXPECT_THAT(b.read().error, HasSubstr("no answer within 50 ms"));
}

TEST_F(EtcdStoreFailures, AStoreThatIsDestroyedSaysNothingMore) {
  const std::size_t first = follower();
  etcd->stop(first);
  Client a(options(first));
  bool called = false;
  a.store->submit({.kind = Kind::read}, [&](const StoreAnswer&) { called = true; });
  a.io.run_for(20ms);
  const TimePoint begun = SteadyClock().now();
  a.store.reset();
  EXPECT_LT(SteadyClock().now() - begun, kDeadline);
  a.io.restart();
  a.io.run_for(kDeadline);
  EXPECT_FALSE(called);
  etcd->resume(first);

  Client b(options((first + 1) % 3));  // in the answer itself
  b.store->submit({.kind = Kind::read}, [&](const StoreAnswer&) { b.store.reset(); });
  EXPECT_TRUE(until(b.io, [&] { return b.store == nullptr; }));
}

TEST_F(EtcdStoreFailures, EndpointsThatAreNotEtcdAreFollowedByThoseThatAre) {
  // Nobody listens there; nobody has that name; who listens says what it likes, or what HTTP says.
  asio::io_context io(1);
  using asio::ip::tcp;
  tcp::acceptor babbling(io, {asio::ip::address_v4::loopback(), 0}), closed(io, {asio::ip::address_v4::loopback(), 0});
  const auto address = [](const tcp::acceptor& of) { return fmt::format("127.0.0.1:{}", of.local_endpoint().port()); };
  const std::string nobody = address(closed);
  closed.close();
  std::jthread babble([&](const std::stop_token& stop) {
    std::vector<tcp::socket> all;
    for (asio::error_code error; !stop.stop_requested();) {
      tcp::socket socket(io);
      babbling.accept(socket, error);
      asio::write(socket, asio::buffer("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nOK"), error);
      all.push_back(std::move(socket));
    }
  });
  for (const std::string& wrong : {nobody, std::string("no-such-host.invalid:2379"), address(babbling)}) {
    Client a({.endpoints = {wrong}, .prefix = prefix, .deadline = kDeadline});
    const auto answer = a.read();
    EXPECT_EQ(answer.outcome, Outcome::unknown);
    EXPECT_THAT(answer.error, HasSubstr("etcd at " + wrong + ": "));
    EXPECT_LT(a.took, 2 * kDeadline);
    std::printf("after %.0f ms: %s\n", milliseconds(a.took), answer.error.c_str());
    Client b({.endpoints = {wrong, etcd->endpoint(0)}, .prefix = prefix, .deadline = kDeadline});
    EXPECT_EQ(b.read().outcome, Outcome::done);
    EXPECT_EQ(b.read().outcome, Outcome::done);
    EXPECT_LT(b.took, kDeadline);
  }
  babble.request_stop();
  tcp::socket(io).connect(babbling.local_endpoint());
}

}  // namespace
}  // namespace rejoin::daemon
