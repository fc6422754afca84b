// "host:port" to and from socket addresses.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <deque>
#include <string>

#include "base/result.h"

namespace rejoin::transport {

struct HostPort {
  std::string host;  // without brackets
  std::uint16_t port = 0;
};

class SocketAddress {
 public:
  // The form alone. Errors: what is wrong with it, the text named.
  static Result<HostPort> split(const std::string& text);
  // Accepts "host:port", "1.2.3.4:port", "[::1]:port"; port 0 where the system is to choose. A name may have several
  // addresses: resolve() returns the one that the system prefers.
  static Result<SocketAddress> resolve(const std::string& text);
  static Result<std::deque<SocketAddress>> resolve_all(const std::string& text);  // one at least
  // Whether a listener can be bound to this host: it is one of this machine's.
  static Result<> check_own(const HostPort& parts);
  static std::string format(const sockaddr_storage& address);
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t length() const { return length_; }

 private:
  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

}  // namespace rejoin::transport
