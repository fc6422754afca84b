// What a process of its own says: it keeps to itself what it does to its filters, mounts or limits.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <string>

namespace rejoin::test {

// Returns what `says` returned in a child of this process.
inline std::string said_by_child(const std::function<std::string()>& says) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string said = says();
    (void)!::write(ends[1], said.data(), said.size());
    ::_exit(0);
  }
  ::close(ends[1]);
  char said[4096];
  const ssize_t got = ::read(ends[0], said, sizeof said);
  ::close(ends[0]);
  ::waitpid(child, nullptr, 0);
  return {said, static_cast<std::size_t>(std::max<ssize_t>(got, 0))};
}

}  // namespace rejoin::test
