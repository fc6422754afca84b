#include "base/priority.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

namespace rejoin {
namespace {

// In a process of its own, which a thread's priority can't be put back in without being root.
TEST(Priority, WhatWorksBesideTrainingIsBehindItUnderAnyNiceness) {
  for (const auto& [of_process, expected] : {std::pair{2, 6}, {5, 9}, {18, 19}}) {
    const pid_t child = ::fork();
    if (child == 0) {
      if (::setpriority(PRIO_PROCESS, 0, of_process) != 0) ::_exit(100);
      let_training_go_first();
      ::_exit(::getpriority(PRIO_PROCESS, 0));
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status));
    if (WEXITSTATUS(status) == 100) GTEST_SKIP() << "this process is nicer than that";
    EXPECT_EQ(WEXITSTATUS(status), expected);
  }
}

}  // namespace
}  // namespace rejoin
