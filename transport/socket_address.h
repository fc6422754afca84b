// "host:port" to and from socket addresses.
#pragma once

#include <sys/socket.h>

#include <string>

#include "base/result.h"

namespace rejoin::transport {

class SocketAddress {
 public:
  // Accepts "host:port", "1.2.3.4:port", "[::1]:port"; port 0 where the system is to choose.
  static Result<SocketAddress> resolve(const std::string& text);
  static std::string format(const sockaddr_storage& address);
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t length() const { return length_; }

 private:
  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

}  // namespace rejoin::transport
