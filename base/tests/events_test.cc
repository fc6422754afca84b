// Event files that can't be written, and what they are called.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <utility>

#include "base/event_file.h"
#include "base/fail.h"
#include "base/log.h"
#include "base/log_file.h"
#include "tests/process.h"

namespace rejoin {
namespace {

std::string said_during(const std::function<void()>& what) {
  init_logging("test", "info");
  testing::internal::CaptureStderr();
  what();
  wait_for_log();
  return testing::internal::GetCapturedStderr();
}

std::string file_of(const test::Scratch& scratch, const std::string& who) {
  return fmt::format("{}/{}.{}.jsonl", scratch.path, who, ::getpid());
}

TEST(EventFile, ThatMayNotGrowEndsWithAWholeLineAndAWarningAndTheProcessGoesOn) {
  const test::Scratch scratch;
  events::open_file(scratch.path, "r0.0");
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const std::string told = said_during([&] {
    rlimit small = before;
    small.rlim_cur = 1000;  // which ends in a line
    ::setrlimit(RLIMIT_FSIZE, &small);
    for (int i = 0; i < 100; ++i) events::emit("note", {{"text", std::string(100, 'x')}});
    ::setrlimit(RLIMIT_FSIZE, &before);
    events::emit("note", {{"text", std::string("there would be room")}});
  });
  sigset_t pending;
  ::sigpending(&pending);
  EXPECT_FALSE(::sigismember(&pending, SIGXFSZ));
  const std::string path = file_of(scratch, "r0.0");
  std::ifstream file(path);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  EXPECT_LE(text.size(), 1000u);
  EXPECT_GE(text.size(), 600u);
  EXPECT_TRUE(text.ends_with("xxx\"}\n")) << text;
  EXPECT_NE(told.find("event file " + path + ": File too large: no more events of this process are written"),
            std::string::npos)
      << told;
  EXPECT_EQ(std::ranges::count(told, '\n'), 1) << told;
}

TEST(EventFile, ThatCannotBeMadeIsAWarning) {
  const test::Scratch scratch;
  scratch.write("file", "");
  const std::string told = said_during([&] { events::open_file(scratch.path + "/file", "r0.0"); });
  EXPECT_NE(told.find("no events of this process are written (--events): event "), std::string::npos) << told;
  EXPECT_NE(told.find(scratch.path + "/file: "), std::string::npos) << told;
}

TEST(EventFile, IsInItsDirectoryWhateverTheProcessIsCalled) {
  const test::Scratch scratch;
  const std::string longest(200, 'x');
  for (const auto& [who, name] : {std::pair<std::string, std::string>{"../rack 1/\u00e9", "_._rack_1___"},
                                  {longest + std::string(100, 'x'), longest}}) {
    const auto opened = events::open(scratch.path, who);
    EXPECT_TRUE(opened) << opened.error().message;
    EXPECT_TRUE(std::filesystem::exists(file_of(scratch, name))) << name;
  }
}

}  // namespace
}  // namespace rejoin
