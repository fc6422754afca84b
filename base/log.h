// Logging: spdlog, one logger a process, lines on stderr with monotonic milliseconds so that several processes line up.
#pragma once

#include <spdlog/spdlog.h>

#include <string>

namespace rejoin {

// Call once from main. `who` heads every line, e.g. "rejoind r0" or "trainer r1.0". Level: trace … error, off.
void init_logging(const std::string& who, const std::string& level);

}  // namespace rejoin
