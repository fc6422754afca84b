// A program takes the library's log lines over.
#include "rejoin/log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "base/log.h"
#include "base/log_file.h"
#include "rejoin/prepare_process.h"
#include "rejoin/session.h"
#include "tests/process.h"

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
  wait_for_log();  // it is a file
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
  wait_for_log();
  EXPECT_NE(testing::internal::GetCapturedStderr().find("for people again"), std::string::npos);
}

// What lines go to for as long as this lives in the place of standard error.
class PipeAsStandardError {
 public:
  PipeAsStandardError() : before_(::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0)) {
    int ends[2];
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    reader_ = Fd(ends[0]);
    const Fd writer(ends[1]);
    EXPECT_EQ(::dup2(writer.get(), STDERR_FILENO), STDERR_FILENO);
  }
  ~PipeAsStandardError() { ::dup2(before_.get(), STDERR_FILENO); }
  std::string read() const {
    std::string text(std::size_t{1} << 16, 0);
    text.resize(static_cast<std::size_t>(std::max<ssize_t>(::read(reader_.get(), text.data(), text.size()), 0)));
    return text;
  }

 private:
  const Fd before_;
  Fd reader_;
};

// A profiler's, say, which come far more often than a line waits for room.
TEST_F(Log, SignalsLoseNoLineThatWaitsForRoom) {
  set_log({});
  static std::atomic<int> signals;
  signals = 0;
  const PipeAsStandardError pipe;
  ASSERT_GT(::fcntl(STDERR_FILENO, F_SETPIPE_SZ, 4096), 0);
  const std::string full(4096, 'x');
  ASSERT_EQ(::write(STDERR_FILENO, full.data(), full.size()), 4096);
  struct sigaction count {};
  count.sa_handler = [](int) { ++signals; };
  struct sigaction before {};
  ASSERT_EQ(::sigaction(SIGALRM, &count, &before), 0);
  std::thread reader([&] {
    while (signals < 10) std::this_thread::yield();
    (void)pipe.read();
  });
  const itimerval often{{0, 1000}, {0, 1000}}, never{};
  ::setitimer(ITIMER_REAL, &often, nullptr);
  logger().critical("the last words");
  ::setitimer(ITIMER_REAL, &never, nullptr);
  reader.join();
  ::sigaction(SIGALRM, &before, nullptr);
  EXPECT_GE(signals, 10);
  ASSERT_GT(::write(STDERR_FILENO, "\n", 1), 0);  // so that a read finds something
  EXPECT_NE(pipe.read().find("the last words"), std::string::npos);
}

// Jobs last for weeks, and their machines are in several zones.
TEST(StandardError, HasTheDateAndTheTimeInUtcOfEachLine) {
  const PipeAsStandardError pipe;
  ::setenv("TZ", "XYZ-7", 1);
  ::tzset();
  const auto now = std::time(nullptr);
  spdlog::logger("who", standard_error()).warn("for people");
  ::unsetenv("TZ");
  ::tzset();
  const std::string line = pipe.read();
  std::tm read{};
  const char* rest = ::strptime(line.c_str(), "%Y-%m-%dT%H:%M:%S", &read);
  ASSERT_NE(rest, nullptr) << line;
  EXPECT_LE(std::abs(::timegm(&read) - now), 60) << line;
  EXPECT_TRUE(std::regex_match(rest, std::regex("\\.[0-9]{3}Z warning \\[who\\] for people\n"))) << line;
}

TEST(StandardError, TellsTheJournalTheLevelAndNobodyElse) {
  const test::Scratch scratch;
  const auto first = [&](const std::string& folder, spdlog::level::level_enum level) {
    const std::string path = scratch.path + folder;
    std::filesystem::create_directories(path);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::snprintf(address.sun_path, sizeof address.sun_path, "%s/stdout", path.c_str());
    ::unlink(address.sun_path);
    const auto* to = reinterpret_cast<const sockaddr*>(&address);
    const Fd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)),
        caller(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)), before(::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0));
    EXPECT_TRUE(::bind(listener.get(), to, sizeof address) == 0 && ::listen(listener.get(), 1) == 0 &&
                ::connect(caller.get(), to, sizeof address) == 0)
        << std::strerror(errno);
    const Fd journal(::accept(listener.get(), nullptr, nullptr));
    ::dup2(caller.get(), STDERR_FILENO);
    spdlog::logger("who", standard_error()).log(level, "line");
    ::dup2(before.get(), STDERR_FILENO);
    char line[3] = {};
    EXPECT_EQ(::read(journal.get(), line, sizeof line), 3);
    return std::string(line, 3);
  };
  EXPECT_EQ(first("/systemd/journal", spdlog::level::info), "<6>");
  EXPECT_EQ(first("/systemd/journal", spdlog::level::warn), "<4>");
  EXPECT_EQ(first("/systemd/journal", spdlog::level::err), "<3>");
  EXPECT_EQ(first("/systemd/journal", spdlog::level::critical), "<2>");
  EXPECT_NE(first("/other", spdlog::level::warn).front(), '<');
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
