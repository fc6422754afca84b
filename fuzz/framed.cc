#include "daemon/framed.h"

#include <asio.hpp>

#include "base/log.h"

namespace {

using namespace rejoin;

std::string framed(std::string_view bytes) {
  std::string frame(4, '\0');
  for (int i = 0; i < 4; ++i) frame[static_cast<std::size_t>(i)] = static_cast<char>(bytes.size() >> (8 * i));
  return frame.append(bytes);
}

}  // namespace

// Bytes over a control connection, before the job key is proved (first byte even) or after (odd): a client that has the
// key and then sends anything.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using asio::ip::tcp;
  static const daemon::JobKey key("0123456789abcdef");
  static asio::io_context io(1);
  static tcp::acceptor acceptor(io, tcp::endpoint(asio::ip::address_v4::loopback(), 0));
  if (size == 0) return 0;
  const bool proved = data[0] % 2 == 1;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  io.restart();
  tcp::socket client(io);
  client.connect(acceptor.local_endpoint());
  auto server = std::make_shared<daemon::Framed>(acceptor.accept(), key, true);
  bool ready = false, closed = false;
  std::size_t messages = 0;
  server->start({.ready = [&] { ready = true; },
                 .message = [&](std::string_view) { ++messages; },
                 .closed = [&](const std::string&) { closed = true; }},
                std::chrono::seconds(5));
  std::shared_ptr<daemon::Framed> speaker;
  if (proved) {
    // The key is proved by the code that proves it; from then on its socket is ours.
    tcp::socket twin(io, tcp::v4(), ::dup(client.native_handle()));
    speaker = std::make_shared<daemon::Framed>(std::move(twin), key, false);
    bool open = false;
    speaker->start(
        {.ready = [&] { open = true; }, .message = [](std::string_view) {}, .closed = [](const std::string&) {}},
        std::chrono::seconds(5));
    while (!(open && ready)) io.run_one();
  }
  asio::error_code ignored;
  asio::write(client, asio::buffer(proved ? std::string(bytes) : std::string(bytes.substr(0, bytes.size() / 2))),
              ignored);
  if (!proved) asio::write(client, asio::buffer(framed(bytes.substr(bytes.size() / 2))), ignored);
  client.shutdown(tcp::socket::shutdown_send, ignored);
  while (!closed) io.run_one();
  if (messages > 0 || (!proved && ready)) __builtin_trap();  // without the key, and its tags, nothing is heard
  if (speaker) speaker->close();
  server->close();
  client.close(ignored);
  io.poll();
  return 0;
}
