#include "base/no_signals.h"
#include "daemon/status_server.h"

// What anybody may send to the status port.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace rejoin;
  static asio::io_context io{1};
  static const auto server =
      daemon::StatusServer::start(
          io, "127.0.0.1:0",
          [](const std::string&) {
            return daemon::StatusServer::Answer{.body = std::make_shared<std::string>("the status\n")};
          },
          std::chrono::milliseconds(2))
          .value();  // requests that never become whole are many here
  static const asio::ip::tcp::endpoint where(
      asio::ip::address_v4::loopback(),
      static_cast<std::uint16_t>(std::stoi(server->address().substr(server->address().rfind(':') + 1))));
  asio::ip::tcp::socket caller(io);
  {
    const NoSignals no_clock;  // libFuzzer's, which would end the wait
    caller.connect(where);
  }
  asio::error_code gone;
  asio::write(caller, asio::buffer(data, size), gone);
  caller.shutdown(asio::socket_base::shutdown_send, gone);
  std::string answer;
  bool ended = false;
  asio::async_read(caller, asio::dynamic_buffer(answer), [&](asio::error_code, std::size_t) { ended = true; });
  while (!ended) io.run_one();
  return 0;
}
