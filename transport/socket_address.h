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

// "host:port"; an IPv6 address gets its brackets.
std::string with_port(const std::string& host, std::uint16_t port);

class SocketAddress {
 public:
  // The form alone. Errors: what is wrong with it, the text named.
  static Result<HostPort> split(const std::string& text);
  // Accepts "host:port", "1.2.3.4:port", "[::1]:port"; port 0 where the system is to choose. A name may have several
  // addresses: resolve() returns the one that the system prefers. A name server may take its time, in which the thread
  // stands (transport/names.h). Errors: `unavailable`, where it does not answer.
  static Result<SocketAddress> resolve(const std::string& text);
  static Result<std::deque<SocketAddress>> resolve_all(const std::string& text);  // one at least
  // The same of an address; a name is an error, and no name server is asked.
  static Result<SocketAddress> numeric(const std::string& text);
  // Whether a listener can be bound to this host: it is one of this machine's.
  static Result<> check_own(const HostPort& parts);
  // A link-local one has its interface with it, without which nobody connects to it: "[fe80::1%eth0]:7000".
  static std::string format(const sockaddr_storage& address);
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t length() const { return length_; }

 private:
  static Result<std::deque<SocketAddress>> find(const std::string& text, int flags);
  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

}  // namespace rejoin::transport
