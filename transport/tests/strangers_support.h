// A TCP listener with a secret, and who comes to it.
#pragma once

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadlines.h"
#include "base/fd.h"
#include "transport/handshake.h"
#include "transport/tcp/factory.h"
#include "transport/tcp/wire.h"
#include "transport/tests/within.h"

namespace rejoin::transport::tcp {

inline const Secret kKey = Secret::of({7, 1}), kOther = Secret::of({7, 2});

// A listener with the secret, and whatever comes to it.
struct Listener {
  explicit Listener(Duration silence = deadlines::kSilence) : engine(make_engine({}).value()) {
    engine->set_silence(silence);
    engine->set_secrets({kKey});
    address = engine->listen({"127.0.0.1:0"}).value();
    port = static_cast<std::uint16_t>(std::stoi(address.text.substr(address.text.rfind(':') + 1)));
  }
  // Whether it has accepted somebody by now.
  bool poll() {
    for (const auto& event : engine->poll())
      if (event.kind == EventKind::accepted)
        accepted.push_back(event.endpoint), hellos.emplace_back(as_text(event.message));
    return !accepted.empty();
  }
  std::unique_ptr<Engine> engine;
  Address address;
  std::uint16_t port = 0;
  std::vector<EndpointId> accepted;
  std::vector<std::string> hellos;
};

// A stranger: a plain socket.
class Stranger {
 public:
  explicit Stranger(std::uint16_t port) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const sockaddr_in address{
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
    EXPECT_EQ(::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  }
  void send(BytesView bytes) { (void)::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL); }
  // Without waiting; from there on. Returns how many bytes went.
  std::size_t send_some(BytesView bytes, std::size_t from) {
    const ssize_t sent = ::send(socket_.get(), bytes.data() + from, bytes.size() - from, MSG_NOSIGNAL | MSG_DONTWAIT);
    return static_cast<std::size_t>(std::max<ssize_t>(sent, 0));
  }
  void send(wire::Kind kind, BytesView body) {
    wire::Header header{.kind = kind, .length = body.size(), .operation = wire::kMagic};
    if (!body.empty()) header.body_digest = wire::digest_of(body);
    header.digest = wire::digest_of_header(header);
    send(joined(header, body));
  }
  // What has come so far; nothing once the listener has closed.
  std::optional<Bytes> received() {
    std::byte bytes[4096];
    for (;;) {
      const ssize_t got = ::recv(socket_.get(), bytes, sizeof bytes, MSG_DONTWAIT);
      if (got > 0) in_.insert(in_.end(), bytes, bytes + got);
      else if (got == 0 || (errno != EAGAIN && errno != EINTR)) return {};
      else return in_;
    }
  }

 private:
  Fd socket_;
  Bytes in_;
};

// What a client of this secret meets.
inline std::optional<Error> connect_with(Listener& listener, const Secret& secret) {
  auto client = make_engine({}).value();
  const auto endpoint = client->connect({listener.address.text, secret}, as_bytes("hello")).value();
  std::optional<Error> error;
  bool connected = false;
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    listener.poll();
    for (const auto& event : client->poll()) {
      connected = connected || event.kind == EventKind::connected;
      if (event.kind == EventKind::closed) error = event.error;
    }
    return connected || error;
  }));
  client->close(endpoint);
  return error;
}

inline Bytes called(const Nonce& nonce) { return joined(nonce, bytes_of(handshake::name_of(kKey))); }

// The listener's challenge, to this nonce.
struct Challenge {
  Nonce nonce{};
  Mac proof{};
};
inline Challenge challenged(Listener& listener, Stranger& stranger, const Nonce& nonce) {
  stranger.send(wire::Kind::call, called(nonce));
  std::optional<Bytes> got;
  EXPECT_TRUE(within(std::chrono::seconds(20), [&] {
    listener.poll();
    got = stranger.received();
    return !got || got->size() >= sizeof(wire::Header) + sizeof(Challenge);
  }));
  Challenge challenge;
  if (!got) return challenge;
  BytesView bytes = *got;
  wire::Header header;
  EXPECT_TRUE(take(bytes, header) && take(bytes, challenge.nonce) && take(bytes, challenge.proof));
  return challenge;
}

// Proves that it has the secret. Returns whether the listener has accepted it.
inline bool comes_in(Listener& listener, Stranger& stranger) {
  const Nonce nonce = make_nonce();
  const auto challenge = challenged(listener, stranger, nonce);
  stranger.send(wire::Kind::hello,
                joined(handshake::prove_caller(kKey, nonce, challenge.nonce, as_bytes("hello")), as_bytes("hello")));
  return within(std::chrono::seconds(20), [&] { return listener.poll(); });
}

}  // namespace rejoin::transport::tcp
