// Processes of the demo's, and what they answer over HTTP on this machine.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "base/result.h"

namespace rejoin::demo {

// Its output goes behind what the file `output` has. It does not outlive the demo.
Result<pid_t> spawn(std::vector<std::string> arguments, const std::string& output);
// With SIGKILL; it is gone when this returns. 0: nobody.
void end(pid_t pid);

// The body of what HOST:PORT says to GET; empty where nobody says it in time.
std::string get(const std::string& address, const std::string& path,
                std::chrono::milliseconds patience = std::chrono::milliseconds(300));

}  // namespace rejoin::demo
