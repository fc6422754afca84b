// Relays that are given a wrong address.
#include "daemon/relay_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "daemon/tests/meeting.h"

namespace rejoin::daemon {
namespace {

using namespace std::chrono_literals;

struct Relays {
  asio::io_context io{1};
  const JobKeys keys{test::kKey};

  Result<std::unique_ptr<RelayServer>> start(const std::string& listen, const std::string& coordinator) {
    return RelayServer::start(io, "r", listen, coordinator, 2s, keys);
  }
  bool until(const std::function<bool()>& met) {
    const TimePoint deadline = SteadyClock().now() + 20s;
    while (!met() && SteadyClock().now() < deadline) io.run_one_for(10ms);
    return met();
  }
  static bool is_refused(const RelayServer& relay) {
    const auto coordinator = relay.status().at("coordinator");
    return !coordinator.at("connected").get<bool>() &&
           coordinator.at("reason").get<std::string>().find("has come to a relay, or to itself") != std::string::npos;
  }
};

// What a rank says to one of them would go round between them.
TEST(RelayServer, TwoThatLeadToEachOtherAreConnectedWithNobodyAndSaySo) {
  Relays relays;
  std::unique_ptr<RelayServer> first, second;
  for (int tries = 0; !second && tries < 10; ++tries) {  // another process may take the port
    asio::ip::tcp::acceptor free(relays.io, {asio::ip::address_v4::loopback(), 0});
    const std::string there = "127.0.0.1:" + std::to_string(free.local_endpoint().port());
    first = relays.start("127.0.0.1:0", there).value();
    free.close();
    if (auto started = relays.start(there, first->address())) second = std::move(*started);
  }
  ASSERT_TRUE(second);
  EXPECT_TRUE(relays.until([&] { return Relays::is_refused(*first) && Relays::is_refused(*second); }))
      << first->status().dump() << second->status().dump();
}

// Such as a load balancer, of which the relay does not know that it leads back.
TEST(RelayServer, OneThatLeadsToItselfThroughAnotherAddressSaysSo) {
  Relays relays;
  asio::ip::tcp::acceptor between(relays.io, {asio::ip::address_v4::loopback(), 0});
  const auto relay =
      relays.start("127.0.0.1:0", "127.0.0.1:" + std::to_string(between.local_endpoint().port())).value();
  const auto port = static_cast<std::uint16_t>(std::stoi(relay->address().substr(relay->address().rfind(':') + 1)));
  struct Pipe {
    explicit Pipe(asio::io_context& io) : near(io), far(io) {}
    asio::ip::tcp::socket near, far;
    std::array<char, 4096> bytes[2]{};
    void pass(asio::ip::tcp::socket& from, asio::ip::tcp::socket& to, std::array<char, 4096>& held) {
      from.async_read_some(asio::buffer(held), [&](asio::error_code error, std::size_t got) {
        asio::error_code gone;
        if (!error) asio::write(to, asio::buffer(held, got), gone);
        if (!error && !gone) return pass(from, to, held);
        near.close(gone);
        far.close(gone);
      });
    }
  };
  std::vector<std::unique_ptr<Pipe>> pipes;
  std::function<void()> accept = [&] {
    auto& pipe = *pipes.emplace_back(std::make_unique<Pipe>(relays.io));
    between.async_accept(pipe.near, [&](asio::error_code error) {
      if (error) return;
      pipe.far.connect({asio::ip::address_v4::loopback(), port});
      pipe.pass(pipe.near, pipe.far, pipe.bytes[0]);
      pipe.pass(pipe.far, pipe.near, pipe.bytes[1]);
      accept();
    });
  };
  accept();
  EXPECT_TRUE(relays.until([&] { return Relays::is_refused(*relay); })) << relay->status().dump();
}

}  // namespace
}  // namespace rejoin::daemon
