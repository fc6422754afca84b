// What the system says of this process's threads.
#pragma once

#include <signal.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace rejoin::test {

// How many of them take this signal: those that do not block it.
inline std::size_t threads_that_take(int signal) {
  std::size_t taking = 0;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(thread.path() / "status");
    for (std::string line; std::getline(status, line);)
      if (line.starts_with("SigBlk:")) taking += (std::stoull(line.substr(7), nullptr, 16) >> (signal - 1) & 1) == 0;
  }
  return taking;
}

}  // namespace rejoin::test
