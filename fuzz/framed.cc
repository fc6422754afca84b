#include "daemon/framed.h"

#include <sys/stat.h>

#include <asio.hpp>
#include <filesystem>
#include <fstream>

#include "base/fail.h"
#include "base/log.h"
#include "base/no_signals.h"
#include "fuzz/certificate.h"

namespace {

using namespace rejoin;
using asio::ip::tcp;

constexpr std::string_view kSaid = "what the one that has the key says";

// One side of a connection, over a socket that somebody else has, too.
struct Side {
  Side(tcp::socket socket, const daemon::JobKeys& keys, bool server)
      : framed(std::make_shared<daemon::Framed>(std::move(socket), keys, server, "127.0.0.1")) {
    framed->start({.ready = [this] { ready = true; },
                   .message =
                       [this](std::string_view message) {
                         if (message != kSaid) __builtin_trap();  // nobody who has the key has said so
                         ++messages;
                       },
                   .closed = [this](const std::string&) { closed = true; }},
                  std::chrono::seconds(5));
  }
  ~Side() { framed->close(); }
  std::shared_ptr<daemon::Framed> framed;
  bool ready = false, closed = false;
  std::size_t messages = 0;
};

// Passes on what has come, and changes the bytes at the places that the input names.
class Passing {
 public:
  Passing(tcp::socket& from, tcp::socket& to, std::string_view changes) : from_(from), to_(to), changes_(changes) {}
  void pass() {
    char bytes[4096];
    asio::error_code error;
    const std::size_t got = from_.read_some(asio::buffer(bytes), error);
    if (error == asio::error::eof) to_.shutdown(tcp::socket::shutdown_send, error);
    if (error) return;
    for (std::size_t i = 0; i + 2 < changes_.size(); i += 3) {
      const std::size_t at = static_cast<std::uint8_t>(changes_[i]) + 256u * static_cast<std::uint8_t>(changes_[i + 1]);
      if (at >= passed_ && at < passed_ + got)
        bytes[at - passed_] = static_cast<char>(bytes[at - passed_] ^ changes_[i + 2]);
    }
    passed_ += got;
    asio::write(to_, asio::buffer(bytes, got), error);
  }

 private:
  tcp::socket &from_, &to_;
  const std::string_view changes_;
  std::size_t passed_ = 0;
};

// libFuzzer's clock is a signal, which ends the wait of a connect().
tcp::socket caller_of(tcp::acceptor& acceptor) {
  const NoSignals no_clock;
  tcp::socket socket(acceptor.get_executor());
  socket.connect(acceptor.local_endpoint());
  // So that no connection keeps its port for a minute when it has ended: there are 28,000.
  socket.set_option(asio::socket_base::linger(true, 0));
  return socket;
}

daemon::JobKeys with_certificates() {
  char directory[] = "/tmp/rejoin-fuzz-XXXXXX";
  REJOIN_CHECK(::mkdtemp(directory) != nullptr);
  const std::string certificate = std::string(directory) + "/certificate", key = std::string(directory) + "/key";
  std::ofstream(certificate) << fuzz::kCertificate;
  std::ofstream(key) << fuzz::kCertificateKey;
  ::chmod(key.c_str(), 0600);
  spdlog::set_level(spdlog::level::off);
  auto keys = daemon::JobKeys::with_certificates(daemon::JobKeys(daemon::JobKey("0123456789abcdef")),
                                                 {.ca = certificate, .cert = certificate, .key = key});
  REJOIN_CHECK(keys, "{}", keys.error().message);
  std::filesystem::remove_all(directory);
  return *keys;
}

}  // namespace

// Bytes over a control connection: instead of a handshake (first byte 0 modulo 3), after it (1), or as changes of what
// two sides with the key say in it and afterwards (2). To a server; or, where the rest of the first byte is odd, to a
// client, from who it takes for its server. Where half of that rest is odd both sides have certificates, too.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const daemon::JobKeys by_key(daemon::JobKey("0123456789abcdef")), by_certificates = with_certificates();
  static asio::io_context io(1);
  static tcp::acceptor acceptor(io, tcp::endpoint(asio::ip::address_v4::loopback(), 0));
  if (size == 0) return 0;
  const int mode = data[0] % 3;
  const bool serves = data[0] / 3 % 2 == 0;
  const daemon::JobKeys& keys = data[0] / 6 % 2 == 0 ? by_key : by_certificates;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  io.restart();
  tcp::socket far = caller_of(acceptor);
  Side side(acceptor.accept(), keys, serves);
  asio::error_code ignored;
  if (mode == 2) {
    tcp::socket near = caller_of(acceptor);
    Side other(acceptor.accept(), keys, !serves);
    Side &server = serves ? side : other, &client = serves ? other : side;
    near.non_blocking(true);
    far.non_blocking(true);
    Passing up(near, far, bytes.substr(0, bytes.size() / 2)), down(far, near, bytes.substr(bytes.size() / 2));
    bool said = false;
    // A length that was changed makes a side wait for more: nothing follows, so that it ends by itself here.
    for (int idle = 0; idle < 8 && !server.closed && !client.closed && server.messages == 0;) {
      const auto ran = io.poll();
      idle = ran > 0 ? 0 : idle + 1;
      if (client.ready && !std::exchange(said, true)) client.framed->send(std::string(kSaid));
      up.pass();
      down.pass();
    }
    if (server.messages > 1) __builtin_trap();
    return 0;
  }
  if (mode == 1) {
    // The key is proven by the code that proves it; from then on its socket is ours.
    tcp::socket twin(io, tcp::v4(), ::dup(far.native_handle()));
    Side other(std::move(twin), keys, !serves);
    while (!(other.ready && side.ready)) io.run_one();
    asio::write(far, asio::buffer(bytes), ignored);
    far.shutdown(tcp::socket::shutdown_send, ignored);
    while (!side.closed) io.run_one();
  } else {
    asio::write(far, asio::buffer(bytes), ignored);
    far.shutdown(tcp::socket::shutdown_send, ignored);
    while (!side.closed) io.run_one();
    if (side.ready) __builtin_trap();
  }
  if (side.messages > 0) __builtin_trap();
  return 0;
}
