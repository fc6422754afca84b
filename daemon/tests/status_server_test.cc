// Whoever calls the status port, however slow or strange, costs little and disturbs nobody.
#include "daemon/status_server.h"

#include <gtest/gtest.h>

#include "base/bytes.h"
#include "daemon/tests/watches.h"

namespace rejoin::daemon {
namespace {

using asio::ip::tcp;
using namespace std::chrono_literals;

struct Served {
  asio::io_context io{1};
  std::string body = "the status\n";
  std::vector<std::string> asked;
  std::unique_ptr<StatusServer> server;
  tcp::endpoint where;

  explicit Served(Duration patience = StatusServer::kPatience) {
    auto started = StatusServer::start(
        io, "127.0.0.1:0",
        [this](const std::string& path) {
          asked.push_back(path);
          return StatusServer::Answer{.body = std::make_shared<std::string>(body)};
        },
        patience);
    EXPECT_TRUE(started);
    server = std::move(*started);
    const std::string address = server->address();
    where = {asio::ip::address_v4::loopback(),
             static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)))};
  }
  bool runs_until(const std::function<bool()>& met, Duration deadline = 10s) {
    const TimePoint end = SteadyClock().now() + deadline;
    while (!met() && SteadyClock().now() < end) io.run_one_for(10ms);
    return met();
  }
  tcp::socket caller() {
    tcp::socket socket(io);
    socket.connect(where);
    return socket;
  }
  // Everything until the connection ends.
  std::string answer_to(const std::string& request) {
    tcp::socket socket = caller();
    asio::write(socket, asio::buffer(request));
    std::string answer;
    bool ended = false;
    asio::async_read(socket, asio::dynamic_buffer(answer), [&](asio::error_code, std::size_t) { ended = true; });
    EXPECT_TRUE(runs_until([&] { return ended; })) << request.substr(0, 100);
    return answer;
  }
};

TEST(StatusServer, AnswersARequestAndClosesTheConnection) {
  Served served;
  const std::string answer = served.answer_to("GET /status?x=1 HTTP/1.1\r\nHost: a\r\n\r\n");
  EXPECT_TRUE(answer.starts_with("HTTP/1.1 200 OK\r\n")) << answer;
  EXPECT_TRUE(answer.ends_with("\r\n\r\nthe status\n")) << answer;
  EXPECT_EQ(served.asked, std::vector<std::string>{"/status"});
  EXPECT_TRUE(served.runs_until([&] { return served.server->callers() == 0; }));
}

TEST(StatusServer, WhatIsNoQuestionGetsARefusalOrNothingAndTheNextCallerAnAnswer) {
  Served served;
  EXPECT_TRUE(served.answer_to("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n").starts_with("HTTP/1.1 405 "));
  EXPECT_TRUE(served.asked.empty());
  // More than a caller may say.
  const std::string endless = served.answer_to("GET /" + std::string(2 * StatusServer::kMostMemory, 'a'));
  EXPECT_TRUE(endless.empty() || endless.starts_with("HTTP/1.1 4")) << endless;
  for (const std::string& garbage :
       {std::string("\r\n\r\n\r\n\r\n"), std::string(40, '\0'), std::string("\x16\x03\x01"), std::string("GET\r\n\r\n"),
        std::string("GET / HTTP/9.9\r\n\r\n")}) {
    tcp::socket socket = served.caller();
    asio::write(socket, asio::buffer(garbage));
    socket.close();
  }
  EXPECT_TRUE(served.runs_until([&] { return served.server->callers() == 0; }));
  EXPECT_TRUE(served.answer_to("HEAD / HTTP/1.0\r\n\r\n").find("Content-Length: 11") != std::string::npos);
}

TEST(StatusServer, HasSoManyCallersAtATimeAndForMoreTheOldestGoThatHaveNotAsked) {
  Served served(1h);
  std::vector<tcp::socket> silent;
  for (std::size_t i = 0; i < 5 * StatusServer::kMostRequests; ++i) silent.push_back(served.caller());
  EXPECT_TRUE(served.answer_to("GET /status HTTP/1.1\r\nHost: a\r\n\r\n").starts_with("HTTP/1.1 200 OK\r\n"));
  EXPECT_LE(served.server->callers(), StatusServer::kMostRequests);
  std::size_t ended = 0;
  EXPECT_TRUE(served.runs_until([&] {
    ended = 0;
    for (auto& one : silent) {
      char byte;
      ended += ::recv(one.native_handle(), &byte, 1, MSG_DONTWAIT) == 0;
    }
    return ended > 4 * StatusServer::kMostRequests;
  })) << ended;
}

// Such as one behind a slow link that reads its answer.
TEST(StatusServer, WhoHasAskedIsNotDisplacedByThoseWhoHaveNot) {
  Served served(1h);
  served.body.assign(64 << 20, 'x');  // more than the kernel takes
  tcp::socket slow = served.caller();
  asio::write(slow, asio::buffer(std::string("GET /status HTTP/1.1\r\nHost: a\r\n\r\n")));
  ASSERT_TRUE(served.runs_until([&] { return !served.asked.empty(); }));
  std::vector<tcp::socket> silent;
  for (std::size_t i = 0; i < 3 * StatusServer::kMostRequests; ++i) silent.push_back(served.caller());
  std::string answer;
  bool ended = false;
  asio::async_read(slow, asio::dynamic_buffer(answer), [&](asio::error_code, std::size_t) { ended = true; });
  EXPECT_TRUE(served.runs_until([&] { return ended; }));
  EXPECT_GT(answer.size(), served.body.size());
}

TEST(StatusServer, WhoHangsUpBeforeItHasAskedIsGoneAtOnceAndWhoHasAskedIsAnswered) {
  Served served(1h);
  {
    std::vector<tcp::socket> halves;
    for (std::size_t i = 0; i < 2 * StatusServer::kMostRequests; ++i) {
      halves.push_back(served.caller());
      asio::write(halves.back(), asio::buffer(std::string(i % 3 == 0 ? "" : "GET /sta")));
      if (i % 2 == 0) halves.back().shutdown(tcp::socket::shutdown_send);
    }
    halves.push_back(served.caller());  // all of a request, and then the end of what it says
    tcp::socket& asks = halves.back();
    asio::write(asks, asio::buffer("GET /status?" + std::string(8000, 'x') + " HTTP/1.1\r\nHost: a\r\n\r\n"));
    asks.shutdown(tcp::socket::shutdown_send);
    std::string answer;
    bool ended = false;
    asio::async_read(asks, asio::dynamic_buffer(answer), [&](asio::error_code, std::size_t) { ended = true; });
    EXPECT_TRUE(served.runs_until([&] { return served.server->callers() == StatusServer::kMostRequests; }));
    for (std::size_t i = 1; i < 9; i += 2) halves[i].close();
    EXPECT_TRUE(served.runs_until([&] { return ended; })) << "those who are gone keep their places";
    EXPECT_TRUE(answer.ends_with("the status\n")) << answer;
  }
  EXPECT_TRUE(served.runs_until([&] { return served.server->callers() == 0; }));
}

// One that sends a byte now and then, and one that reads none of a long answer.
TEST(StatusServer, ASlowCallerHasItsTimeAndNoMoreHoweverBusyItIs) {
  Served served(1s);
  served.body = std::string(16 * MiB, 'x');
  tcp::socket trickles = served.caller(), reads_nothing = served.caller();
  asio::write(reads_nothing, asio::buffer(std::string("GET / HTTP/1.1\r\nHost: a\r\n\r\n")));
  asio::steady_timer again(served.io);
  std::size_t sent = 0;
  std::function<void()> trickle = [&] {
    again.expires_after(20ms);
    again.async_wait([&](asio::error_code cancelled) {
      asio::error_code gone;
      if (!cancelled) sent += asio::write(trickles, asio::buffer("G", 1), gone);
      if (!cancelled && !gone) trickle();
    });
  };
  trickle();
  EXPECT_TRUE(served.runs_until([&] { return served.server->callers() == 2; }));
  EXPECT_TRUE(served.runs_until([&] { return served.server->callers() == 0; }));
  EXPECT_GT(sent, 1u);
  again.cancel();
  served.body = "short";
  EXPECT_TRUE(served.answer_to("GET / HTTP/1.1\r\nHost: a\r\n\r\n").ends_with("short"));
}

TEST(StatusServer, ACallerForWhomTheSystemHasNoWatchLeftKeepsNoOtherFromItsAnswer) {
  for (const int which : {1, 2, 3}) {  // Asio's, the one for the end, the library's
    Served served;
    const Fd caller(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    {
      const test::NoWatch none(which);
      ASSERT_EQ(::connect(caller.get(), served.where.data(), static_cast<socklen_t>(served.where.size())), 0);
      ASSERT_TRUE(served.runs_until([&] { return none.has_come(); })) << which;
      served.io.poll();
    }
    EXPECT_LE(served.server->callers(), 1u) << which;
    EXPECT_TRUE(served.answer_to("GET / HTTP/1.1\r\nHost: a\r\n\r\n").starts_with("HTTP/1.1 200 OK")) << which;
  }
}

}  // namespace
}  // namespace rejoin::daemon
