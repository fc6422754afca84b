// Control connections over a wire that somebody has a hand in.
#include "daemon/framed.h"

#include <gtest/gtest.h>
#include <netinet/tcp.h>
#include <openssl/ec.h>
#include <openssl/x509.h>
#include <sys/socket.h>

#include <asio.hpp>
#include <asio/ssl/stream.hpp>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "daemon/node_listener.h"
#include "daemon/tests/meeting.h"
#include "membership/node.h"

namespace rejoin::daemon {
namespace {

using asio::ip::tcp;
using test::kKey;
using test::kOther;

const JobKey kThird("0123456789ABCDEF");

// A client and a server with the same key, and between them whoever passes on what the client says.
struct Between {
  asio::io_context io{1};
  JobKeys keys{kKey};
  tcp::acceptor acceptor{io, tcp::endpoint(asio::ip::address_v4::loopback(), 0)};
  tcp::socket near{io}, far{io};  // towards the client, towards the server
  std::shared_ptr<Framed> client, server;
  bool client_ready = false, server_ready = false, server_closed = false;
  std::vector<std::string> heard;
  std::function<std::string(std::string)> passing = [](std::string bytes) { return bytes; };

  Between() {
    tcp::socket client_end(io);
    client_end.connect(acceptor.local_endpoint());
    near = acceptor.accept();
    far.connect(acceptor.local_endpoint());
    server = std::make_shared<Framed>(acceptor.accept(), keys, true);
    client = std::make_shared<Framed>(std::move(client_end), keys, false);
    for (tcp::socket* side : {&near, &far}) {
      side->non_blocking(true);
      side->set_option(tcp::no_delay(true));
    }
    server->start({.ready = [this] { server_ready = true; },
                   .message = [this](std::string_view message) { heard.emplace_back(message); },
                   .closed = [this](const std::string&) { server_closed = true; }},
                  std::chrono::seconds(5));
    client->start({.ready = [this] { client_ready = true; },
                   .message = [](std::string_view) {},
                   .closed = [](const std::string&) {}},
                  std::chrono::seconds(5));
    EXPECT_TRUE(until([this] { return client_ready && server_ready; }));
  }
  ~Between() {
    client->close();
    server->close();
    io.poll();
  }

  bool until(const std::function<bool()>& condition) {
    const TimePoint deadline = SteadyClock().now() + std::chrono::seconds(5);
    while (!condition()) {
      if (SteadyClock().now() > deadline) return false;
      io.poll();
      io.restart();
      pass(near, far, passing);
      pass(far, near, [](std::string bytes) { return bytes; });
    }
    return true;
  }
  static void pass(tcp::socket& from, tcp::socket& to, const std::function<std::string(std::string)>& change) {
    char bytes[4096];
    asio::error_code error;
    const std::size_t got = from.read_some(asio::buffer(bytes), error);
    if (!error) asio::write(to, asio::buffer(change(std::string(bytes, got))), error);
  }
};

TEST(Framed, WhatIsSaidIsHeardInOrder) {
  Between between;
  for (const char* message : {"one", "", "three"}) between.client->send(message);
  ASSERT_TRUE(between.until([&] { return between.heard.size() == 3; }));
  EXPECT_EQ(between.heard, (std::vector<std::string>{"one", "", "three"}));
}

TEST(Framed, AFlippedBitEndsTheConnectionAndIsNotHeard) {
  const std::string message = "step 41 is done";
  const std::size_t bits = 8 * (5 + 4 + message.size() + 1 + 16);  // a record's header, and its type and tag
  for (std::size_t bit = 0; bit < bits; ++bit) {
    Between between;
    std::size_t passed = 0;
    between.passing = [&](std::string bytes) {
      if (bit / 8 >= passed && bit / 8 < passed + bytes.size())
        bytes[bit / 8 - passed] = static_cast<char>(bytes[bit / 8 - passed] ^ 1 << bit % 8);
      passed += bytes.size();
      return bytes;
    };
    between.client->send(message);
    between.client->send(std::string(64 * KiB, 'x'));  // of a damaged length the rest is waited for
    ASSERT_TRUE(between.until([&] { return between.server_closed; })) << "bit " << bit;
    ASSERT_TRUE(between.heard.empty()) << "bit " << bit;
  }
}

TEST(Framed, ARepeatedMessageIsHeardOnceAndEndsTheConnection) {
  Between between;
  between.passing = [](std::string bytes) { return bytes + bytes; };
  between.client->send("step 41 is done");
  ASSERT_TRUE(between.until([&] { return between.server_closed; }));
  EXPECT_EQ(between.heard, std::vector<std::string>{"step 41 is done"});
}

TEST(Framed, AMessageFromAnotherConnectionOfTheJobEndsTheConnection) {
  Between one, other;
  std::string taken;
  one.passing = [&](std::string bytes) {
    taken += bytes;
    return bytes;
  };
  one.client->send("step 41 is done");
  ASSERT_TRUE(one.until([&] { return one.heard.size() == 1; }));
  asio::write(other.far, asio::buffer(taken));
  ASSERT_TRUE(other.until([&] { return other.server_closed; }));
  EXPECT_TRUE(other.heard.empty());
}

// How a side with this key ends with another that does this.
struct End {
  bool refused = false;
  std::string why;
};
End end_of(bool server, const std::function<void(tcp::socket&)>& other_side, std::chrono::milliseconds deadline) {
  asio::io_context io{1};
  const JobKeys keys{kKey};
  tcp::acceptor acceptor{io, tcp::endpoint(asio::ip::address_v4::loopback(), 0)};
  tcp::socket other(io);
  other.connect(acceptor.local_endpoint());
  const auto side = std::make_shared<Framed>(acceptor.accept(), keys, server);
  End end;
  side->start({.ready = [] {},
               .message = [](std::string_view) {},
               .closed =
                   [&](const std::string& why) {
                     end = {side->refused(), why};
                   }},
              deadline);
  other_side(other);
  io.run_for(std::chrono::seconds(10));
  return end;
}

// Whoever went by itself, or is a coordinator that was stopped for a while, was not turned away.
TEST(Framed, OnlyWhatWasNotProvenIsARefusal) {
  using namespace std::chrono_literals;
  const auto silent = [](tcp::socket&) {};
  const auto gone = [](tcp::socket& socket) { socket.close(); };
  const auto stranger = [](tcp::socket& socket) { asio::write(socket, asio::buffer("GET / HTTP/1.1\r\n\r\n", 18)); };
  // A fatal alert of a number that nobody has given out: OpenSSL has no text for it.
  const auto alerting = [](tcp::socket& socket) {
    asio::write(socket, asio::buffer("\x15\x03\x03\x00\x02\x02\xc8", 7));
  };
  for (const bool server : {true, false}) {
    const End alerted = end_of(server, alerting, 10s);
    EXPECT_TRUE(alerted.refused) << alerted.why;
    EXPECT_FALSE(alerted.why.empty());
    const End left = end_of(server, gone, 10s), scanned = end_of(server, stranger, 10s);
    EXPECT_FALSE(left.why.empty());
    EXPECT_FALSE(left.refused) << left.why;
    EXPECT_TRUE(scanned.refused) << scanned.why;
    const End late = end_of(server, silent, 10ms);
    EXPECT_EQ(late.why, server
                            ? "it did not prove the job key in time"
                            : "it takes the call and does not answer (it is stopped or too busy, or this process was)");
    EXPECT_EQ(late.refused, server);
  }
}

// A server of TLS 1.3 by the book that knows no key, and signs with a certificate of its own making.
TEST(Framed, ACertificateIsNotTakenForTheKey) {
  const std::unique_ptr<EVP_PKEY, decltype(&::EVP_PKEY_free)> key(EVP_EC_gen("P-256"), &::EVP_PKEY_free);
  const std::unique_ptr<X509, decltype(&::X509_free)> certificate(::X509_new(), &::X509_free);
  ASSERT_TRUE(key && certificate);
  ::X509_gmtime_adj(X509_getm_notBefore(certificate.get()), 0);
  ::X509_gmtime_adj(X509_getm_notAfter(certificate.get()), 3600);
  ::X509_set_pubkey(certificate.get(), key.get());
  ASSERT_GT(::X509_sign(certificate.get(), key.get(), ::EVP_sha256()), 0);
  asio::ssl::context context(asio::ssl::context::tlsv13);
  ASSERT_EQ(::SSL_CTX_use_certificate(context.native_handle(), certificate.get()), 1);
  ASSERT_EQ(::SSL_CTX_use_PrivateKey(context.native_handle(), key.get()), 1);
  bool accepted = false;
  const End end = end_of(
      false,
      [&](tcp::socket& socket) {
        const auto impostor = std::make_shared<asio::ssl::stream<tcp::socket&>>(socket, context);
        impostor->async_handshake(asio::ssl::stream_base::server,
                                  [&, impostor](asio::error_code error) { accepted = !error; });
      },
      std::chrono::seconds(5));
  EXPECT_TRUE(end.refused);
  EXPECT_EQ(end.why, "its job key differs from ours; give both the same --job-key-file");
  EXPECT_FALSE(accepted);
}

// While a job's key is changed: who has which as its own, and as its other.
TEST(Framed, OneOfTwoKeysIsEnoughForWhoListensAndACallerProvesItsOwn) {
  const JobKeys old(kKey), old_and_new(kKey, kOther), new_and_old(kOther, kKey), renewed(kOther), third(kThird);
  const auto gets_in = [](const JobKeys& caller, const JobKeys& listener) {
    const test::Met met = test::meet(caller, listener);
    EXPECT_EQ(met.client_ready, met.server_ready) << met.client << "; " << met.server;
    if (!met.in) {
      EXPECT_TRUE(met.refused);
      for (const auto& why : {met.client, met.server})
        EXPECT_EQ(why, "its job key differs from ours; give both the same --job-key-file");
    }
    return met.in;
  };
  for (const auto* caller : {&old, &old_and_new})
    for (const auto* listener : {&old, &old_and_new, &new_and_old}) EXPECT_TRUE(gets_in(*caller, *listener));
  for (const auto* caller : {&renewed, &new_and_old})
    for (const auto* listener : {&renewed, &old_and_new, &new_and_old}) EXPECT_TRUE(gets_in(*caller, *listener));
  EXPECT_FALSE(gets_in(old, renewed));
  EXPECT_FALSE(gets_in(renewed, old));
  EXPECT_FALSE(gets_in(old_and_new, renewed));
  EXPECT_FALSE(gets_in(new_and_old, old));
  for (const auto* listener : {&old, &old_and_new, &new_and_old, &renewed}) EXPECT_FALSE(gets_in(third, *listener));
}

// A node that says these bytes first, to a listener of this release.
struct Caller {
  asio::io_context io{1};
  JobKeys keys{kKey};
  std::vector<std::string> taken;  // the names of nodes
  std::vector<proto::ToNode> answers;
  bool closed = false;
  NodeListener listener{
      io,
      keys,
      std::chrono::seconds(2),
      {.message = [this](auto, const auto& message) { taken.push_back(message.hello().node()); }, .lost = [](auto) {}}};
  std::shared_ptr<Framed> framed;
  int descriptor = -1;  // of the caller's end

  explicit Caller(const std::string& bytes) {
    EXPECT_TRUE(listener.listen("127.0.0.1:0"));
    tcp::socket socket(io);
    const auto port = std::stoi(listener.address().substr(listener.address().rfind(':') + 1));
    socket.connect({asio::ip::address_v4::loopback(), static_cast<std::uint16_t>(port)});
    descriptor = socket.native_handle();
    framed = std::make_shared<Framed>(std::move(socket), keys, false);
    framed->start({.ready = [this, bytes] { framed->send(bytes); },
                   .message =
                       [this](std::string_view message) {
                         EXPECT_TRUE(answers.emplace_back().ParseFromString(std::string(message)));
                       },
                   .closed = [this](const std::string&) { closed = true; }},
                  std::chrono::seconds(10));
  }
  ~Caller() {
    framed->close();
    listener.close_all();
    io.poll();
  }
  bool until(const std::function<bool()>& condition) {
    const TimePoint deadline = SteadyClock().now() + std::chrono::seconds(10);
    while (!condition() && SteadyClock().now() < deadline) io.run_one_for(std::chrono::seconds(1));
    return condition();
  }
};

// FromNode { hello { protocol: 15, node: "n1" } }, as a node of protocol 15 says it; and with other numbers.
std::string old_hello(char protocol) { return std::string("\x0a\x06\x08") + protocol + "\x12\x02n1"; }

TEST(NodeListener, ANodeOfTheProtocolBeforeIsTakenAndHearsNothingThatItDoesNotKnow) {
  Caller caller(old_hello(15));
  ASSERT_TRUE(caller.until([&] { return !caller.taken.empty(); }));
  EXPECT_EQ(caller.taken, std::vector<std::string>{"n1"});
  EXPECT_EQ(caller.listener.rejected(), 0u);
  EXPECT_TRUE(caller.answers.empty());
}

TEST(NodeListener, ANodeOfAnOlderProtocolIsPutOffWithoutAWord) {
  Caller caller(old_hello(14));
  ASSERT_TRUE(caller.until([&] { return caller.closed; }));
  EXPECT_EQ(caller.listener.rejected(), 1u);
  EXPECT_TRUE(caller.taken.empty() && caller.answers.empty());
}

TEST(NodeListener, ANodeOfALaterProtocolIsToldWhy) {
  Caller caller(old_hello(17));
  ASSERT_TRUE(caller.until([&] { return !caller.answers.empty(); }));
  EXPECT_EQ(caller.listener.rejected(), 1u);
  EXPECT_TRUE(caller.taken.empty());
  EXPECT_EQ(caller.listener.nodes(), 0u);
  const std::string why = caller.answers.front().welcome().refusal();
  EXPECT_NE(why.find("speaks protocol 17, and its coordinator or relay 15 to 16: upgrade its"), std::string::npos)
      << why;
}

// It would clear the terminal of who looks at the status, and write lines into the log.
TEST(NodeListener, ANameIsPrintable) {
  proto::FromNode hello;
  membership::Versions().put_into(*hello.mutable_hello());
  hello.mutable_hello()->set_node("n\x1b[2J\nerror: n\u00e9" + std::string(1000, 'x'));
  Caller caller(hello.SerializeAsString());
  ASSERT_TRUE(caller.until([&] { return !caller.taken.empty(); }));
  EXPECT_TRUE(caller.taken[0].starts_with("n?[2J?error: n\u00e9xxx")) << caller.taken[0];
  EXPECT_LE(caller.taken[0].size(), 255u);
}

// As where a machine loses its power: neither side would say anything more.
TEST(NodeListener, ANodeThatIsGoneWithoutAWordIsFoundOut) {
  proto::FromNode hello;
  membership::Versions().put_into(*hello.mutable_hello());
  hello.mutable_hello()->set_node("n");
  Caller caller(hello.SerializeAsString());
  ASSERT_TRUE(caller.until([&] { return !caller.taken.empty() && !caller.answers.empty(); }));
  caller.io.run_for(std::chrono::milliseconds(300));  // until all that was said is acknowledged
  const int repair = 1;                               // so that its end is told to nobody
  if (::setsockopt(caller.descriptor, IPPROTO_TCP, TCP_REPAIR, &repair, sizeof repair) != 0)
    GTEST_SKIP() << "TCP_REPAIR: " << std::strerror(errno);
  caller.framed->close();
  EXPECT_EQ(caller.listener.nodes(), 1u);
  EXPECT_TRUE(caller.until([&] { return caller.listener.nodes() == 0; }));
}

}  // namespace
}  // namespace rejoin::daemon
