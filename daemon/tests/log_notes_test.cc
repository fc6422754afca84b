#include "daemon/log_notes.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace rejoin::daemon {
namespace {

TEST(LogNotes, WhatATrainerIsRefusedForAgainAndAgainIsSaidOnce) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  for (int i = 0; i < 100; ++i)
    log_notes({{"replica 1 rank 0 was refused: its buckets differ", true},
               {"replica 2 rank 0 was refused: its buckets differ", true},
               {"replica 1 rank 0: it has left: its buckets differ", true}});
  log_notes({{"this daemon was paused for 2000 ms", true}});
  log_notes({{"this daemon was paused for 2000 ms", true}});
  const std::string text = testing::internal::GetCapturedStdout() + testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::ranges::count(text, '\n'), 5) << text;
}

}  // namespace
}  // namespace rejoin::daemon
