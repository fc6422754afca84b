// A log whose compaction ends at any call, on file systems with hard links and without.
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>

#include "membership/tests/compacted_log.h"

namespace rejoin::membership {
namespace {

// A process that ends before any call that compacting makes of the system, or whose disk fails from there on. Also
// where the file system knows no hard links.
struct CompactedLogAtAnyCall : CompactedLog, testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(Links, CompactedLogAtAnyCall, testing::Bool());

TEST_P(CompactedLogAtAnyCall, EndsAndLosesNothing) {
  const bool links = GetParam();
  int calls = 0;
  for (int last = 0; last <= calls; ++last) {
    SCOPED_TRACE(last);
    std::filesystem::remove_all(directory);
    bool armed = false;
    calls = 0;
    const auto real = Disk::real();
    const auto works = [&] { return !armed || calls++ < last || (errno = EIO, false); };
    const Disk disk{.write = [&](int fd, const void* bytes, std::size_t size,
                                 off_t at) { return works() ? real.write(fd, bytes, size, at) : -1; },
                    .sync = [&](int fd) { return works() ? real.sync(fd) : -1; },
                    .link =
                        [&](const char* from, const char* to) {
                          return !works() ? -1 : links ? real.link(from, to) : (errno = EPERM, -1);
                        },
                    .rename = [&](const char* from, const char* to) { return works() ? real.rename(from, to) : -1; }};
    {
      auto log = Log::open(directory, disk).value();
      commit(log, 1, 10);
      armed = true;
      const bool compacted = log.compact(snapshot_after(10)).has_value();
      EXPECT_EQ(compacted, calls <= last) << calls;
      if (!compacted) {
        EXPECT_FALSE(log.append({commit(11)})) << "as the disk fails";
      }
    }
    {
      auto log = Log::open(directory).value();
      const auto& records = log.records();
      ASSERT_FALSE(records.empty());
      if (records[0].has_snapshot()) {
        ASSERT_EQ(records.size(), 1u);
        EXPECT_EQ(records[0].snapshot().committed(), 10u);
      } else {
        ASSERT_EQ(records.size(), 10u);
      }
      EXPECT_EQ(steps(), up_to(10));
      commit(log, 11, 12);
      EXPECT_EQ(steps(), up_to(12));
      ASSERT_TRUE(log.compact(snapshot_after(12)));
      commit(log, 13, 13);
    }
    EXPECT_EQ(Log::open(directory)->records().size(), 2u);
    EXPECT_EQ(steps(), up_to(13));
  }
  EXPECT_EQ(calls, links ? 8 : 9);
}

// Then the next one that starts would find nothing under the log's name.
TEST_F(CompactedLog, WithoutHardLinksGetsItsNameBackWhereTheNewFileDoesNotTakeIt) {
  auto disk = Disk::real();
  int renames = 0;
  disk.link = [](const char*, const char*) { return errno = EOPNOTSUPP, -1; };
  disk.rename = [&](const char* from, const char* to) {
    return ++renames == 2 ? (errno = EIO, -1) : ::rename(from, to);
  };
  auto log = Log::open(directory, disk).value();
  commit(log, 1, 3);
  EXPECT_FALSE(log.compact(snapshot_after(3)));
  EXPECT_FALSE(log.failed());
  EXPECT_FALSE(std::filesystem::exists(archive(1)));
  EXPECT_EQ(Log::open(directory).error().code, ErrorCode::refused) << "it holds the file at its path";
  commit(log, 4, 5);
  ASSERT_TRUE(log.compact(snapshot_after(5)));
  commit(log, 6, 6);
  EXPECT_TRUE(std::filesystem::exists(archive(1)));
  EXPECT_EQ(steps(), up_to(6));
}

// The new file is between its two names, and its process lives.
TEST_F(CompactedLog, WithoutHardLinksIsTakenByNobodyElseMeanwhile) {
  auto disk = Disk::real();
  disk.link = [](const char*, const char*) { return errno = EPERM, -1; };
  int renames = 0;
  disk.rename = [&](const char* from, const char* to) {
    if (++renames == 2) EXPECT_EQ(Log::open(directory).error().code, ErrorCode::refused);
    return ::rename(from, to);
  };
  auto log = Log::open(directory, disk).value();
  commit(log, 1, 3);
  ASSERT_TRUE(log.compact(snapshot_after(3)));
  commit(log, 4, 4);
  EXPECT_EQ(steps(), up_to(4));
}

}  // namespace
}  // namespace rejoin::membership
