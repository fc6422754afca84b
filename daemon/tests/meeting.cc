#include "daemon/tests/meeting.h"

#include <gtest/gtest.h>

#include <asio.hpp>
#include <memory>

#include "daemon/framed.h"

namespace rejoin::test {

Met meet(const daemon::JobKeys& caller, const daemon::JobKeys& listener, const std::string& host) {
  asio::io_context io{1};
  asio::ip::tcp::acceptor acceptor{io, asio::ip::tcp::endpoint(asio::ip::address_v4::loopback(), 0)};
  asio::ip::tcp::socket socket(io);
  socket.connect(acceptor.local_endpoint());
  struct Side {
    std::shared_ptr<daemon::Framed> framed;
    bool ready = false;
    std::string heard, why;
  };
  Side client{std::make_shared<daemon::Framed>(std::move(socket), caller, false, host)};
  Side server{std::make_shared<daemon::Framed>(acceptor.accept(), listener, true)};
  for (Side* side : {&client, &server})
    side->framed->start({.ready =
                             [side] {
                               side->ready = true;
                               side->framed->send("hello");
                             },
                         .message = [side](std::string_view message) { side->heard = message; },
                         .closed = [side](const std::string& why) { side->why = why; }},
                        std::chrono::seconds(5));
  const auto over = [](const Side& side) { return !side.heard.empty() || !side.why.empty(); };
  while (!over(client) || !over(server)) io.run_one();
  EXPECT_EQ(client.heard, server.heard);
  EXPECT_EQ(server.ready, server.why.empty()) << "who is refused was never taken in";
  const Met met{client.heard == "hello" && server.heard == "hello",
                client.framed->refused() && server.framed->refused(),
                client.why,
                server.why,
                client.ready,
                server.ready};
  client.framed->close();
  server.framed->close();
  io.poll();
  return met;
}

}  // namespace rejoin::test
