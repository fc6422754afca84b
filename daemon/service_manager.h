// What the service manager that has started this process hears of it: the protocol of systemd's Type=notify,
// sd_notify(3).
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "base/fd.h"
#include "base/result.h"

namespace rejoin::daemon {

// Thread: one. No call waits: what a full socket does not take is sent with the next call.
class ServiceManager {
 public:
  // That of $NOTIFY_SOCKET; without one nothing is sent.
  static Result<ServiceManager> from_environment();
  // An address as that variable has it: a path, or '@name' for an abstract one.
  static Result<ServiceManager> at(const std::string& address);

  bool listens() const { return static_cast<bool>(socket_); }
  // That this process is ready, once; and in a line what it does, where that has changed.
  void ready(const std::string& line);
  void stopping();

 private:
  bool send(const std::string& text);

  Fd socket_;
  sockaddr_un address_{};
  socklen_t length_ = 0;
  std::string heard_;  // the line of the last message that was taken; before the first, nothing
};

// A status document in a line.
std::string line_of(const nlohmann::json& status);

}  // namespace rejoin::daemon
