// A program takes the library's log lines over.
#include "rejoin/log.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "base/log.h"
#include "rejoin/session.h"

namespace rejoin {
namespace {

struct Log : testing::Test {
  std::vector<std::pair<LogLevel, std::string>> lines;
  Log() {
    set_log([this](LogLevel level, std::string_view line) { lines.emplace_back(level, line); });
  }
  ~Log() override {
    set_log({});
    set_log_level(LogLevel::info);
  }
};

TEST_F(Log, LinesComeWithTheirLevelAndNowhereElse) {
  testing::internal::CaptureStderr();
  spdlog::warn("rail {} is dead", 1);
  spdlog::info("it is back");
  spdlog::critical("worse than an error");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(lines, (std::vector<std::pair<LogLevel, std::string>>{{LogLevel::warn, "rail 1 is dead"},
                                                                  {LogLevel::info, "it is back"},
                                                                  {LogLevel::error, "worse than an error"}}));
}

TEST_F(Log, TheLevelSaysWhatIsLeftOut) {
  spdlog::debug("left out from the start");
  set_log_level(LogLevel::debug);
  spdlog::debug("said");
  set_log_level(LogLevel::error);
  spdlog::warn("left out");
  set_log_level(LogLevel::off);
  spdlog::critical("left out, too");
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0].second, "said");
}

TEST_F(Log, WithoutASinkLinesGoToStandardErrorAgain) {
  set_log({});
  testing::internal::CaptureStderr();
  spdlog::warn("for people");
  EXPECT_NE(testing::internal::GetCapturedStderr().find("for people"), std::string::npos);
  EXPECT_TRUE(lines.empty());
}

TEST_F(Log, ASinkMayBeReplacedWhileOthersLog) {
  std::atomic<bool> done = false;
  std::atomic<std::uint64_t> late = 0, taken = 0;
  std::thread other([&] {
    while (!done) spdlog::info("line");
  });
  for (int round = 0; round < 200; ++round) {
    auto replaced = std::make_shared<std::atomic<bool>>(false);
    set_log([&, replaced](LogLevel, std::string_view) { ++taken, late += *replaced ? 1 : 0; });
    for (const auto before = taken.load(); taken == before;) std::this_thread::yield();
    set_log([](LogLevel, std::string_view) {});
    *replaced = true;
  }
  done = true;
  other.join();
  EXPECT_EQ(late, 0u) << "a sink was called after it had been replaced";
}

}  // namespace
}  // namespace rejoin
