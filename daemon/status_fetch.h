// Asks a daemon for its status.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "base/result.h"

namespace rejoin::daemon {

enum class Texts : std::uint8_t {
  as_they_are,
  printable,  // for a terminal: without control characters
};
// `address`: "host:port", or the URL of its page. Errors: `unavailable`: nobody answers there; `timeout`; `corrupt`:
// what answers is no daemon.
Result<nlohmann::json> fetch_status(const std::string& address, Texts texts);

}  // namespace rejoin::daemon
