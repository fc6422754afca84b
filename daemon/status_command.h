// The commands `rejoin status` and `rejoin top`: what daemons say of themselves, as a person reads it.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"

namespace rejoin::daemon {

// Both print, and return the status to exit with. `address` is a daemon's --status address, HOST:PORT.
Result<int> show_status(const std::string& address, bool json);
// The tables of several daemons, again and again, with the rate of steps, until interrupted (or `count` times).
Result<int> top(const std::vector<std::string>& addresses, std::chrono::milliseconds interval, std::uint64_t count);

}  // namespace rejoin::daemon
