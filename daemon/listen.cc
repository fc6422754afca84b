#include "daemon/listen.h"

#include <cstring>

#include "base/fail.h"
#include "transport/socket_address.h"

namespace rejoin::daemon {

Result<asio::ip::tcp::endpoint> endpoint_of(const std::string& text) {
  auto address = transport::SocketAddress::resolve(text);
  if (!address) return tl::unexpected(address.error());
  asio::ip::tcp::endpoint endpoint;
  std::memcpy(endpoint.data(), address->get(), address->length());
  endpoint.resize(address->length());
  return endpoint;
}

Result<std::string> listen_on(asio::ip::tcp::acceptor& acceptor, const std::string& where) {
  constexpr int backlog = 4096;  // many daemons may come back at once
  auto endpoint = endpoint_of(where);
  if (!endpoint) return tl::unexpected(endpoint.error());
  asio::error_code error;
  acceptor.open(endpoint->protocol(), error);
  if (!error) acceptor.set_option(asio::socket_base::reuse_address(true), error);
  if (!error) acceptor.bind(*endpoint, error);
  if (!error) acceptor.listen(backlog, error);
  if (error) return fail(ErrorCode::unavailable, "{}", error.message());
  return text_of(acceptor.local_endpoint());
}

std::string text_of(const asio::ip::tcp::endpoint& endpoint) {
  const std::string host = endpoint.address().to_string();
  return endpoint.address().is_v6() ? fmt::format("[{}]:{}", host, endpoint.port())
                                    : fmt::format("{}:{}", host, endpoint.port());
}

bool without_descriptors(const asio::error_code& error) {
  // By its number: of ENFILE Asio's category knows no std::errc.
  return error.category() == asio::error::get_system_category() && without_descriptors(error.value());
}

Result<Watched> watch(asio::io_context& io, Fd descriptor) {
  auto watched = std::make_unique<asio::posix::stream_descriptor>(io);
  asio::error_code error;
  watched->assign(descriptor.get(), error);
  if (error)
    return fail(ErrorCode::exhausted,
                "the system gives no watch ({}): raise fs.epoll.max_user_watches, for which those of "
                "all processes of this user count",
                error.message());
  (void)descriptor.release();
  return watched;
}

bool leads_to(const std::string& where, const std::string& listening) {
  const auto peer = endpoint_of(where), here = endpoint_of(listening);
  if (!peer || !here || peer->port() != here->port()) return false;
  if (peer->address() == here->address()) return true;
  if (peer->address().is_unspecified()) return here->address().is_loopback() || here->address().is_unspecified();
  if (!here->address().is_unspecified()) return false;
  // Only an address of this machine can be bound.
  asio::io_context io;
  asio::ip::tcp::socket probe(io);
  asio::error_code error;
  probe.open(peer->protocol(), error);
  if (!error) probe.bind({peer->address(), 0}, error);
  return !error;
}

}  // namespace rejoin::daemon
