// Both ends of a control connection in one thread.
#pragma once

#include <string>

#include "daemon/auth.h"

namespace rejoin::test {

inline const daemon::JobKey kKey("0123456789abcdef"), kOther("fedcba9876543210");

struct Met {
  bool in = false;  // both sides
  bool refused = false;
  std::string client, server;                       // why not
  bool client_ready = false, server_ready = false;  // each took the other in, for a moment at least
};

// What becomes of a caller that asks for `host`. Whoever gets in says something, and is heard.
Met meet(const daemon::JobKeys& caller, const daemon::JobKeys& listener, const std::string& host = "127.0.0.1");

}  // namespace rejoin::test
