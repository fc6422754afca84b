#include "daemon/log_notes.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace rejoin::daemon {
namespace {

TEST(LogNotes, WhatATrainerIsRefusedForAgainAndAgainIsSaidOnce) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  static int run = 0;  // what is said once a minute is remembered by the process
  const auto why = fmt::format("its buckets differ in run {}", ++run);
  for (int i = 0; i < 100; ++i)
    log_notes({{"replica 1 rank 0 was refused: " + why, true},
               {"replica 2 rank 0 was refused: " + why, true},
               {"replica 1 rank 0: it has left: " + why, true}});
  log_notes({{"this daemon was paused for 2000 ms", true}});
  log_notes({{"this daemon was paused for 2000 ms", true}});
  const std::string text = testing::internal::GetCapturedStdout() + testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::ranges::count(text, '\n'), 5) << text;
}

// Each process has another number, and each answer another time.
TEST(LogNotes, LinesThatAreAlikeAreSaidOnceWhateverNumbersTheyHave) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  for (int i = 0; i < 100; ++i) {
    const auto process = fmt::format("process {} asks for the place", i);
    log_notes({{process, true, "of one"}, {process, true, "of another"}, {process, true}});
  }
  const std::string text = testing::internal::GetCapturedStdout() + testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::ranges::count(text, '\n'), 102) << text;
}

}  // namespace
}  // namespace rejoin::daemon
