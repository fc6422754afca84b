#include "daemon/exiting.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <fstream>
#include <thread>

#include "base/clock.h"
#include "base/fd.h"
#include "daemon/tests/held_end.h"

namespace rejoin::daemon {
namespace {

namespace fs = std::filesystem;

// What /proc would say of descriptor 7 and of a process.
struct MadeUpProc {
  MadeUpProc() : folder(fs::path(testing::TempDir()) / ("exiting_test." + std::to_string(::getpid()))) {}
  ~MadeUpProc() { fs::remove_all(folder); }
  void write(const std::string& file, const std::string& text) const {
    fs::create_directories((folder / file).parent_path());
    std::ofstream(folder / file) << text;
  }
  void pidfd(const std::string& pid) const {
    write("self/fdinfo/7", "pos:\t0\nflags:\t02000002\nmnt_id:\t15\nPid:\t" + pid + "\nNSpid:\t" + pid + "\n");
  }
  void thread(const std::string& number, const std::string& name, unsigned flags) const {
    const std::string stat = number + " (" + name + ") R 1 4 4 0 -1 " + std::to_string(flags) + " 4 4 4\n";
    if (number == "42") write("42/stat", stat);
    write("42/task/" + number + "/stat", stat);
  }
  bool exiting() const { return is_exiting(7, folder); }
  const fs::path folder;
};

constexpr unsigned kRuns = 0x400100, kEnds = 0x40010c;

TEST(Exiting, IsAProcessAllOfWhoseThreadsAre) {
  const MadeUpProc proc;
  EXPECT_FALSE(proc.exiting()) << "there is nothing";
  proc.pidfd("42");
  EXPECT_FALSE(proc.exiting()) << "there is no process";
  proc.thread("42", "python3", kRuns);
  EXPECT_FALSE(proc.exiting());
  proc.thread("42", "python3", kEnds);
  EXPECT_TRUE(proc.exiting());
  proc.thread("43", "a) R 1 4 4 0 -1 4 (b", kRuns);
  EXPECT_FALSE(proc.exiting()) << "its first thread alone has ended";
  proc.thread("43", "a) R 1 4 4 0 -1 0 (b", kEnds);
  EXPECT_TRUE(proc.exiting());
  for (const auto& none : {"-1", "0", "", "x"}) {
    proc.pidfd(none);
    EXPECT_FALSE(proc.exiting()) << none;
  }
  proc.pidfd("42");
  for (const auto& stat : {"", "42 (python3", "42 (python3) R 1 4 4", "4 4 4 4 4 4 4 4 4 4"}) {
    proc.write("42/task/43/stat", stat);
    EXPECT_FALSE(proc.exiting()) << stat;
  }
  fs::remove_all(proc.folder / "42/task");
  EXPECT_FALSE(proc.exiting()) << "its threads are not to be seen";
  fs::create_directories(proc.folder / "42/task");
  EXPECT_FALSE(proc.exiting());
}

bool readable(const Fd& pidfd) {
  pollfd look{pidfd.get(), POLLIN, 0};
  return ::poll(&look, 1, 0) > 0;
}

// As where it has ended between the file's opening and its reading. Of a directory, too, a read alone fails.
TEST(Exiting, AProcessOfWhichNothingCanBeReadIsNone) {
  const MadeUpProc proc;
  proc.pidfd("42");
  fs::create_directories(proc.folder / "42/stat");
  EXPECT_FALSE(proc.exiting());
}

TEST(Exiting, IsKnownBeforeThePidfdTellsOfTheEnd) {
  for (const auto first : {test::HeldEnd::First::stays, test::HeldEnd::First::ends}) {
    Fd pidfd;
    {
      const test::HeldEnd process(first);
      if (!process.traced()) GTEST_SKIP() << "ptrace is forbidden here";
      pidfd = *make_pidfd(process.pid());
      EXPECT_FALSE(is_exiting(pidfd.get()));
      process.kill();
      const TimePoint deadline = SteadyClock().now() + std::chrono::seconds(20);
      while (!is_exiting(pidfd.get()) && SteadyClock().now() < deadline) std::this_thread::yield();
      EXPECT_TRUE(is_exiting(pidfd.get()));
      EXPECT_FALSE(readable(pidfd));
    }
    EXPECT_TRUE(readable(pidfd));
    EXPECT_FALSE(is_exiting(pidfd.get())) << "its number may be another's";
  }
}

TEST(Exiting, ANumberIsThatOfTheSameProcessWhereItBeganAtTheSameTime) {
  const MadeUpProc proc;
  EXPECT_FALSE(began(42, proc.folder));
  const auto says = [&](const std::string& state) {
    proc.write("42/stat", "42 (a) Z 1) " + state + " 1 42 42 0 -1 4194560 8 9 10 11 12 13 14 15 16 17 18 19 4711 21\n");
    return began(42, proc.folder);
  };
  EXPECT_EQ(says("S"), 4711u);
  EXPECT_EQ(says("T"), 4711u) << "it is stopped";
  EXPECT_FALSE(says("Z"));
  EXPECT_FALSE(says("X"));
  for (const auto& stat : {"", "42 (a", "42 (a)", "42 (a) S 1 42"}) {
    proc.write("42/stat", stat);
    EXPECT_FALSE(began(42, proc.folder)) << stat;
  }
  EXPECT_FALSE(began(0)) << "it has no number here";
  const auto own = began(::getpid());
  ASSERT_TRUE(own);
  EXPECT_EQ(own, began(::getpid()));
}

}  // namespace
}  // namespace rejoin::daemon
