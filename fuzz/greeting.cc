#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <optional>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/no_signals.h"
#include "transport/handshake.h"
#include "transport/tcp/factory.h"
#include "transport/tcp/wire.h"

namespace {

using namespace rejoin;
using namespace rejoin::transport;
namespace wire = rejoin::transport::tcp::wire;

const Secret kSecret = Secret::of({77, 3});
constexpr std::string_view kHello = "the caller's hello";

sockaddr_in loopback(std::uint16_t port) {
  return {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
}

// A socket that somebody else's bytes go through.
struct Wire {
  Fd fd;
  explicit Wire(Fd socket) : fd(std::move(socket)) {}
  static Wire to(std::uint16_t port) {
    Wire made(Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
    const sockaddr_in address = loopback(port);
    const NoSignals no_clock;  // libFuzzer's, which would end the wait
    if (::connect(made.fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) __builtin_trap();
    return made;
  }
  void send(BytesView bytes) const { (void)::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT); }
  void send(wire::Kind kind, BytesView body) const {
    wire::Header header{.kind = kind, .length = body.size(), .operation = wire::kMagic};
    if (!body.empty()) header.body_digest = wire::digest_of(body);
    header.digest = wire::digest_of_header(header);
    send(joined(header, body));
  }
  Bytes receive() const {
    Bytes bytes(4096);
    const auto got = ::recv(fd.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    bytes.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
    return bytes;
  }
};

struct Listener {
  Listener() : engine(tcp::make_engine({}).value()) {
    engine->set_secrets({kSecret});
    const auto address = engine->listen({"127.0.0.1:0"}).value().text;
    port = static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
  }
  // Who came in, with its hello.
  void poll() {
    for (const auto& event : engine->poll()) {
      if (event.kind == EventKind::accepted)
        hellos.emplace_back(as_text(event.message)), accepted.push_back(event.endpoint);
      if (event.kind == EventKind::message) __builtin_trap();  // nobody who has the secret sends one
    }
  }
  void forget() {
    for (const auto endpoint : accepted) engine->close(endpoint);
    accepted.clear();
    hellos.clear();
  }
  std::unique_ptr<Engine> engine;
  std::uint16_t port = 0;
  std::vector<std::string> hellos;
  std::vector<EndpointId> accepted;
};

// A caller that has the secret, and somebody between it and the listener who changes bytes.
void through_a_changing_hand(Listener& listener, BytesView changes) {
  const Fd between(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = loopback(0);
  socklen_t length = sizeof address;
  if (::bind(between.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(between.get(), 1) != 0 ||
      ::getsockname(between.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0)
    __builtin_trap();
  auto caller = tcp::make_engine({}).value();
  const std::string where = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  (void)caller->connect({where, kSecret}, as_bytes(kHello)).value();
  const Wire near(Fd(::accept4(between.get(), nullptr, nullptr, SOCK_CLOEXEC))), far = Wire::to(listener.port);
  std::size_t passed[2] = {};
  const auto pass = [&](const Wire& from, const Wire& to, int way) {
    Bytes bytes = from.receive();
    for (std::size_t i = 0; i + 2 < changes.size(); i += 3) {
      const auto at = std::to_integer<std::size_t>(changes[i]);
      if (std::to_integer<int>(changes[i + 1]) % 2 == way && at >= passed[way] && at < passed[way] + bytes.size())
        bytes[at - passed[way]] ^= changes[i + 2];
    }
    passed[way] += bytes.size();
    to.send(bytes);
  };
  bool connected = false;
  for (int turn = 0; turn < 12; ++turn) {
    for (const auto& event : caller->poll()) connected = connected || event.kind == EventKind::connected;
    pass(near, far, 0);
    listener.poll();
    pass(far, near, 1);
  }
  for (const auto& hello : listener.hellos)
    if (hello != kHello) __builtin_trap();
  if (connected && listener.hellos.empty()) __builtin_trap();
}

}  // namespace

// The handshake of a data connection (first byte modulo 3): bytes of a stranger (0); whole frames of one (1: a kind, a
// length, a body); changes of what a caller with the secret and its listener say (2: place, direction, bits).
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Listener listener;
  if (size == 0) return 0;
  const BytesView bytes(reinterpret_cast<const std::byte*>(data) + 1, size - 1);
  if (data[0] % 3 == 2) {
    through_a_changing_hand(listener, bytes);
    listener.forget();
    return 0;
  }
  const Wire stranger = Wire::to(listener.port);
  if (data[0] % 3 == 0) {
    stranger.send(bytes);
    listener.poll();
  } else {
    for (BytesView left = bytes; left.size() >= 2;) {
      const auto kind = static_cast<wire::Kind>(std::to_integer<int>(left[0]) % 10);
      const auto length = std::min(left.size() - 2, std::to_integer<std::size_t>(left[1]));
      stranger.send(kind, left.subspan(2, length));
      left = left.subspan(2 + length);
      listener.poll();
    }
  }
  listener.poll();
  if (!listener.hellos.empty()) __builtin_trap();  // without the secret
  return 0;
}
