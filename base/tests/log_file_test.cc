// A log on a disk that stands still keeps nobody, and what it takes later is all there, in order.
#include "base/log_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>

#include "base/fail.h"
#include "base/log.h"
#include "base/sanitized.h"
#include "tests/process.h"

namespace rejoin {
namespace {

using test::read_file;

// A disk that stands still while it is told to, and one that is full.
std::atomic<bool> stands_still = false, is_full = false;
ssize_t slow_write(int to, const void* bytes, std::size_t size) {
  stands_still.wait(true);
  if (is_full) return errno = ENOSPC, -1;
  return ::write(to, bytes, size);
}
void goes_on() {
  stands_still = false;
  stands_still.notify_all();
}
// However a test ends: who is joined at its end may wait for this.
struct GoesOn {
  ~GoesOn() { goes_on(), is_full = false; }
};

struct LogFileTest : testing::Test {
  test::Scratch scratch;
  const std::string path = scratch.path + "/log";
  const Fd file = Fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  const LogFile::File it{file.get(), 1, 1};
  LogFile log{slow_write};
  GoesOn at_end;
  void say(const std::string& line, bool last_words = false) {
    const auto number = log.put(line + "\n", it, last_words);
    ASSERT_TRUE(number);
    log.wait_for(*number, last_words);
  }
  static std::chrono::milliseconds timed(const std::function<void()>& what) {
    const auto before = std::chrono::steady_clock::now();
    what();
    return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - before);
  }
};

TEST_F(LogFileTest, OfADiskThatStandsStillKeepsNobodyAndHasAllLinesInTheirOrderLater) {
  stands_still = true;
  std::string all;
  const auto took = timed([&] {
    for (int i = 0; i < 1000; ++i) say("line " + std::to_string(i)), all += "line " + std::to_string(i) + "\n";
  });
  EXPECT_LT(took, std::chrono::seconds(5)) << "the first one has waited for 10 ms, and no other";
  EXPECT_EQ(read_file(path), "");
  goes_on();
  log.wait_for_all();
  EXPECT_EQ(read_file(path), all);
}

TEST_F(LogFileTest, HasALineWhenItWasSaidWhereTheDiskIsWell) {
  for (int i = 0; i < 100; ++i) {
    const auto number = log.put("line\n", it, true);
    log.wait_for(*number, true);
    EXPECT_EQ(read_file(path).size(), 5u * static_cast<std::size_t>(i + 1));
  }
}

TEST_F(LogFileTest, CountsWhatIsBeyondItsBoundWhereThatIsMissing) {
  stands_still = true;
  const std::string much(LogFile::kMostWaiting / 4, 'x');
  for (int i = 0; i < 8; ++i) say(much);
  say("the last words", true);  // for which there is room in any case
  goes_on();
  log.wait_for_all();
  say("the next");
  log.wait_for_all();
  const std::string read = read_file(path);
  EXPECT_EQ(read.substr(3 * (much.size() + 1)),
            "... 5 lines were left out, since their file did not take them\nthe last words\nthe next\n");
}

TEST_F(LogFileTest, CountsWhatAFullDiskDidNotTake) {
  is_full = true;
  say("lost"), say("lost");
  log.wait_for_all();
  is_full = false;
  say("there", true);
  EXPECT_EQ(read_file(path), "... 2 lines were left out, since their file did not take them\nthere\n");
}

TEST_F(LogFileTest, LastWordsAreWaitedForAndForASecondAtMost) {
  stands_still = true;
  const auto took = timed([&] { say("nobody takes it", true); });
  EXPECT_GE(took, std::chrono::milliseconds(900));
  std::thread disk(goes_on);  // while somebody waits, or before
  say("the last words", true);
  disk.join();
  EXPECT_EQ(read_file(path), "nobody takes it\nthe last words\n");
}

TEST_F(LogFileTest, ALineGoesToTheFileThatWasThereWhenItWasSaid) {
  stands_still = true;
  const std::string other_path = scratch.path + "/other";
  const Fd other(::open(other_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  Fd number(::dup(file.get()));
  say("the first"), say("the second");
  ASSERT_TRUE(log.put("the third\n", {number.get(), 1, 1}, false));
  ASSERT_EQ(::dup2(other.get(), number.get()), number.get());
  ASSERT_TRUE(log.put("the fourth\n", {number.get(), 1, 2}, false));
  number.reset();
  goes_on();
  log.wait_for_all();
  EXPECT_EQ(read_file(path), "the first\nthe second\nthe third\n");
  EXPECT_EQ(read_file(other_path), "the fourth\n");
}

// What a child of this process does with its standard error at `path`; returns how it ended.
int in_child(const std::string& path, const std::function<void()>& what) {
  const pid_t child = ::fork();
  if (child == 0) {
    const int to = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    ::dup2(to, STDERR_FILENO);
    init_logging("child", "info");
    what();
    ::_exit(0);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

std::size_t threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<std::size_t>(std::distance(begin(tasks), end(tasks)));
}

TEST(StandardErrorFile, LinesStandAmongWhatTheProgramWrites) {
  const test::Scratch scratch;
  const std::string path = scratch.path + "/log";
  EXPECT_EQ(in_child(path,
                     [] {
                       for (int i = 0; i < 20; ++i) {
                         spdlog::info("line {}", i);
                         wait_for_log();  // a crowded machine may take longer than a line waits
                         (void)!::write(STDERR_FILENO, "the program's\n", 14);
                       }
                     }),
            0);
  const std::string text = read_file(path);
  std::size_t at = 0;
  for (int i = 0; i < 20; ++i) {
    at = text.find(fmt::format("[child] line {}\nthe program's\n", i), at);
    ASSERT_NE(at, std::string::npos) << i << "\n" << text;
  }
}

// Its parent's thread is not there, and another thread may have held each lock; but ASan's allocator stands still in a
// child where another thread had its locks.
TEST(StandardErrorFile, AChildOfForkHasAThreadOfItsOwnAndLosesNothing) {
  const test::Scratch scratch;
  const std::string path = scratch.path + "/log";
  EXPECT_EQ(in_child(path,
                     [] {
                       std::atomic<bool> done = false;
                       std::thread busy([&] {
                         while (!done && !kSanitized) spdlog::info("the parent's");
                       });
                       for (int i = 0; i < 50; ++i) {
                         spdlog::info("the parent's, too");
                         const pid_t child = ::fork();
                         if (child == 0) {
                           spdlog::info("grandchild {}", i);
                           wait_for_log();
                           ::_exit(0);
                         }
                         int status = -1;
                         if (::waitpid(child, &status, 0) != child || status != 0) ::_exit(1);
                       }
                       done = true;
                       busy.join();
                     }),
            0);
  const std::string text = read_file(path);
  for (int i = 0; i < 50; ++i) {
    const std::string line = fmt::format("[child] grandchild {}\n", i);
    const std::size_t at = text.find(line);
    ASSERT_NE(at, std::string::npos) << i << "\n" << text;
    EXPECT_EQ(text.find(line, at + 1), std::string::npos) << "twice: " << i;
  }
}

TEST(StandardErrorFile, OnlyAFileHasAThread) {
  const test::Scratch scratch;
  EXPECT_EQ(in_child(scratch.path + "/log",
                     [] {
                       int ends[2];
                       const Fd file(::dup(STDERR_FILENO));
                       if (::pipe(ends) != 0 || ::dup2(ends[1], STDERR_FILENO) < 0) ::_exit(1);
                       const auto before = threads();
                       spdlog::info("to the pipe");
                       if (threads() != before) ::_exit(2);
                       ::dup2(file.get(), STDERR_FILENO);
                       spdlog::info("to the file");
                       if (threads() != before + 1) ::_exit(3);
                     }),
            0);
  EXPECT_NE(read_file(scratch.path + "/log").find("to the file"), std::string::npos);
}

TEST(StandardErrorFile, AFailedCheckComesBehindTheLinesBefore) {
  const test::Scratch scratch;
  const std::string path = scratch.path + "/log";
  EXPECT_EQ(in_child(path,
                     [] {
                       spdlog::warn("before");
                       REJOIN_CHECK(threads() == 0, "a lie");
                     }),
            1000 + SIGABRT);
  const std::string text = read_file(path);
  EXPECT_LT(text.find("[child] before\n"), text.find("check failed: ")) << text;
}

TEST(StandardErrorFile, NobodyWhoReadsAPipeAndAFileThatMayNotGrowEndNoProgram) {
  const test::Scratch scratch;
  EXPECT_EQ(in_child(scratch.path + "/log",
                     [] {
                       ::signal(SIGPIPE, SIG_DFL);
                       ::signal(SIGXFSZ, SIG_DFL);
                       const Fd file(::dup(STDERR_FILENO));
                       int ends[2];
                       if (::pipe(ends) != 0 || ::dup2(ends[1], STDERR_FILENO) < 0) ::_exit(1);
                       ::close(ends[0]);
                       spdlog::warn("nobody reads it");
                       sigset_t waiting;
                       ::sigpending(&waiting);
                       if (::sigismember(&waiting, SIGPIPE) != 0) ::_exit(2);
                       ::dup2(file.get(), STDERR_FILENO);
                       const rlimit none{0, 0};
                       ::setrlimit(RLIMIT_FSIZE, &none);
                       spdlog::warn("there is no room for it");
                       wait_for_log();
                     }),
            0);
  EXPECT_EQ(read_file(scratch.path + "/log"), "");
}

}  // namespace
}  // namespace rejoin
