// A program takes the library's log lines over.
#include "rejoin/log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "base/log.h"
#include "rejoin/prepare_process.h"
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
  logger().warn("rail {} is dead", 1);
  logger().info("it is back");
  logger().critical("worse than an error");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(lines, (std::vector<std::pair<LogLevel, std::string>>{{LogLevel::warn, "rail 1 is dead"},
                                                                  {LogLevel::info, "it is back"},
                                                                  {LogLevel::error, "worse than an error"}}));
}

TEST_F(Log, TheLevelSaysWhatIsLeftOut) {
  logger().debug("left out from the start");
  set_log_level(LogLevel::debug);
  logger().debug("said");
  set_log_level(LogLevel::error);
  logger().warn("left out");
  set_log_level(LogLevel::off);
  logger().critical("left out, too");
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0].second, "said");
}

TEST_F(Log, WithoutASinkLinesGoToStandardErrorAgain) {
  set_log({});
  testing::internal::CaptureStderr();
  logger().warn("for people");
  EXPECT_NE(testing::internal::GetCapturedStderr().find("for people"), std::string::npos);
  EXPECT_TRUE(lines.empty());
}

TEST_F(Log, AStandardErrorThatNobodyReadsKeepsNobodyAndWhatIsLeftOutIsCounted) {
  set_log({});
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const Fd reader(ends[0]);
  Fd writer(ends[1]);
  const Fd before(::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0));
  ASSERT_EQ(::dup2(writer.get(), STDERR_FILENO), STDERR_FILENO);
  writer = {};
  const std::string text(1000, 'x');
  for (int i = 0; i < 100; ++i) logger().warn("{} {}", i, text);  // more than the pipe has room for
  std::string read(std::size_t{1} << 20, 0);
  read.resize(static_cast<std::size_t>(std::max<ssize_t>(::read(reader.get(), read.data(), read.size()), 0)));
  EXPECT_NE(read.find("] 0 xxx"), std::string::npos);
  EXPECT_EQ(read.find("] 99 xxx"), std::string::npos);
  logger().warn("the next");
  std::string next(std::size_t{1} << 20, 0);
  next.resize(static_cast<std::size_t>(std::max<ssize_t>(::read(reader.get(), next.data(), next.size()), 0)));
  EXPECT_NE(next.find(" lines were left out, since nobody read them"), std::string::npos) << next;
  EXPECT_NE(next.find("the next"), std::string::npos) << next;
  ::dup2(before.get(), STDERR_FILENO);
  testing::internal::CaptureStderr();
  logger().warn("for people again");
  EXPECT_NE(testing::internal::GetCapturedStderr().find("for people again"), std::string::npos);
}

// In a child, whose spdlog ends.
TEST_F(Log, AProgramsOwnLoggerIsItsOwnAndTheLibrarysOutlivesIt) {
  const pid_t child = ::fork();
  if (child == 0) {
    const auto programs = std::make_shared<spdlog::logger>("", standard_error());
    spdlog::set_default_logger(programs);
    log_to_stderr_by_default();  // as each open() does
    set_log([this](LogLevel level, std::string_view line) { lines.emplace_back(level, line); });
    bool right = spdlog::default_logger() == programs;
    logger().info("the library's");
    spdlog::shutdown();
    logger().info("and its last");
    right = right && lines.size() == 2 && lines[1].second == "and its last";
    ::_exit(right ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(Log, ASinkMayBeReplacedWhileOthersLog) {
  std::atomic<bool> done = false;
  std::atomic<std::uint64_t> late = 0, taken = 0;
  std::thread other([&] {
    while (!done) logger().info("line");
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
