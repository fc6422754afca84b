// A log that is compacted while in use, and processes that end in the middle of that.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "membership/tests/compacted_log.h"

namespace rejoin::membership {
namespace {

TEST_F(CompactedLog, BeginsWithTheSnapshotAndTheAuditReadsWhatWasBefore) {
  {
    auto log = Log::open(directory).value();
    commit(log, 1, 500);
    const auto before = log.size();
    ASSERT_TRUE(log.compact(snapshot_after(500)));
    EXPECT_LT(log.size(), before / 10);
    commit(log, 501, 503);
    ASSERT_TRUE(log.compact(snapshot_after(503)));
    commit(log, 504, 505);
    const auto second = Log::open(directory);
    ASSERT_FALSE(second) << "the new file is locked as the old one was";
    EXPECT_EQ(second.error().code, ErrorCode::refused);
  }
  const auto log = Log::open(directory).value();
  ASSERT_EQ(log.records().size(), 3u);
  EXPECT_EQ(log.records()[0].snapshot().committed(), 503u);
  EXPECT_EQ(log.records()[2].committed().step(), 505u);
  EXPECT_EQ(steps(), up_to(505));
  EXPECT_TRUE(std::filesystem::exists(archive(1)) && std::filesystem::exists(archive(2)));
}

// What a compaction adds for older releases is nothing that was decided: neither a count nor the audit has it.
TEST_F(CompactedLog, CountsAndReadsWhatWasDecidedAlone) {
  const auto position = [&] { return records_of_job(Log::open(directory)->records()); };
  const auto add = [&](const std::vector<proto::LogRecord>& records) {
    ASSERT_TRUE(Log::open(directory)->append(records));
  };
  const auto balanced = [](std::uint64_t step, std::uint64_t position_there) {
    auto snapshot = snapshot_after(step);
    snapshot.mutable_snapshot()->set_position(position_there);
    snapshot.mutable_snapshot()->mutable_ledger()->mutable_balance()->set_at_most(1500);
    return snapshot;
  };
  proto::LogRecord needs, incarnated;
  needs.mutable_needs()->set_protocol(16);
  incarnated.mutable_incarnated()->set_incarnation(3);
  add({commit(1), commit(2), commit(3)});
  EXPECT_EQ(position(), 3u);
  ASSERT_TRUE(Log::open(directory)->compact(snapshot_after(3)));
  add({commit(4), commit(5)});
  EXPECT_EQ(position(), 3u) << "nothing says of how many records the snapshot is";
  ASSERT_TRUE(Log::open(directory)->compact(balanced(5, 40)));
  ASSERT_TRUE(Log::open(directory)->records()[1].has_needs());
  EXPECT_EQ(position(), 40u);
  add({incarnated});
  EXPECT_EQ(position(), 41u);
  add({needs, commit(6)});
  EXPECT_EQ(position(), 43u);
  ASSERT_TRUE(Log::open(directory)->compact(balanced(6, 43)));
  add({needs, commit(7)});
  EXPECT_EQ(position(), 45u) << "of two in a row the first is the log's own";
  std::filesystem::remove_all(directory);
  add({balanced(6, 43)});
  add({needs, commit(7)});
  EXPECT_EQ(position(), 45u) << "one that begins with a store's snapshot has none of its own";

  std::filesystem::remove_all(directory);
  add({commit(1), commit(2), commit(3)});
  ASSERT_TRUE(Log::open(directory)->compact(balanced(3, 0)));
  add({needs, commit(4)});
  const auto all = read_log(path);
  ASSERT_TRUE(all) << all.error().message;
  EXPECT_EQ(serialized(*all), serialized({commit(1), commit(2), commit(3), needs, commit(4)}));
}

// What was not synced is lost with the power, and a name may reach the disk before what it names. So the new file is
// whole before it takes the log's name, and the old one has its second name by then.
TEST_F(CompactedLog, IsOnDiskBeforeItTakesTheName) {
  std::vector<std::string> calls;
  bool armed = false;
  const auto note = [&](const char* call, const std::string& name) {
    if (armed) calls.push_back(fmt::format("{} {}", call, std::filesystem::path(name).filename().string()));
  };
  const auto name_of = [](int fd) {
    return std::filesystem::read_symlink(fmt::format("/proc/self/fd/{}", fd)).string();
  };
  const auto real = Disk::real();
  const Disk disk{.write =
                      [&](int fd, const void* bytes, std::size_t size, off_t at) {
                        note("write", name_of(fd));
                        return real.write(fd, bytes, size, at);
                      },
                  .sync =
                      [&](int fd) {
                        note("sync", name_of(fd) == directory ? "the folder" : name_of(fd));
                        return real.sync(fd);
                      },
                  .link =
                      [&](const char* from, const char* to) {
                        note("link", to);
                        return real.link(from, to);
                      },
                  .rename =
                      [&](const char* from, const char* to) {
                        note("rename to", to);
                        return real.rename(from, to);
                      }};
  auto log = Log::open(directory, disk).value();
  commit(log, 1, 3);
  armed = true;
  ASSERT_TRUE(log.compact(snapshot_after(3)));
  EXPECT_EQ(calls,
            (std::vector<std::string>{"write decisions.log.next", "sync decisions.log.next", "write decisions.log.next",
                                      "sync decisions.log.next", "link decisions.1.log", "sync the folder",
                                      "rename to decisions.log", "sync the folder"}));
}

// Then nobody knows which file a crash leaves under the log's name.
TEST_F(CompactedLog, TakesNoMoreOnceItsNewNameCouldNotBeSynced) {
  auto disk = Disk::real();
  bool renamed = false;
  disk.rename = [&](const char* from, const char* to) { return renamed = true, ::rename(from, to); };
  disk.sync = [&](int fd) { return renamed ? (errno = EIO, -1) : ::fdatasync(fd); };
  {
    auto log = Log::open(directory, disk).value();
    commit(log, 1, 3);
    ASSERT_FALSE(log.compact(snapshot_after(3)));
    EXPECT_TRUE(log.failed());
    EXPECT_FALSE(log.append({commit(4)}));
    EXPECT_EQ(Log::open(directory).error().code, ErrorCode::refused) << "it still holds the file at its path";
  }
  EXPECT_EQ(steps(), up_to(3));
  EXPECT_TRUE(Log::open(directory));
}

TEST_F(CompactedLog, RefusesASnapshotThatItCouldNotReadAgain) {
  auto log = Log::open(directory).value();
  commit(log, 1, 3);
  auto snapshot = snapshot_after(3);
  snapshot.mutable_snapshot()->set_stopped(std::string(17 * MiB, 'x'));
  const auto compacted = log.compact(snapshot);
  ASSERT_FALSE(compacted);
  EXPECT_EQ(compacted.error().message, path + ": a record of 17.0 MiB is over the limit of 16.0 MiB");
  EXPECT_FALSE(log.failed());
  EXPECT_FALSE(std::filesystem::exists(path + ".next"));
  commit(log, 4, 5);
  EXPECT_EQ(steps(), up_to(5));
}

// The oldest are removed while the job runs: the next one is still the newest by its number.
TEST_F(CompactedLog, GoesOnCountingItsArchivesWhereOldOnesWereRemoved) {
  auto log = Log::open(directory).value();
  for (std::uint64_t round = 0; round < 4; ++round) {
    if (round == 3) {
      std::filesystem::remove(archive(1));
      std::filesystem::remove(archive(2));
    }
    commit(log, 10 * round + 1, 10 * round + 10);
    ASSERT_TRUE(log.compact(snapshot_after(10 * round + 10)));
  }
  EXPECT_FALSE(std::filesystem::exists(archive(1)));
  EXPECT_TRUE(std::filesystem::exists(archive(4)));
  const auto records = read_log(path);
  ASSERT_TRUE(records) << records.error().message;
  EXPECT_EQ(records->front().snapshot().committed(), 20u);
  EXPECT_EQ(records->size(), 21u);
}

TEST_F(CompactedLog, RemovesTheOldestOfItsArchives) {
  auto log = Log::open(directory).value();
  EXPECT_EQ(log.remove_archives(1).value(), 0u) << "there are none";
  for (std::uint64_t step = 1; step <= 12; ++step) {
    commit(log, step, step);
    ASSERT_TRUE(log.compact(snapshot_after(step)));
  }
  EXPECT_EQ(log.remove_archives(12).value(), 0u);
  EXPECT_EQ(log.remove_archives(3).value(), 9u) << "by number, not by name";
  for (std::uint64_t number = 1; number <= 12; ++number)
    EXPECT_EQ(std::filesystem::exists(archive(number)), number > 9) << number;
  EXPECT_EQ(log.remove_archives(0).value(), 2u) << "the newest stays";
  EXPECT_TRUE(std::filesystem::exists(archive(12)));
  commit(log, 13, 14);
  const auto records = read_log(path);
  ASSERT_TRUE(records) << records.error().message;
  EXPECT_EQ(records->front().snapshot().committed(), 11u);
  EXPECT_EQ(records->back().committed().step(), 14u);
}

// No room for the new file: the old one goes on.
TEST_F(CompactedLog, ThatFindsNoRoomGoesOnAsItIs) {
  bool full = false;
  auto disk = Disk::real();
  disk.write = [&](int fd, const void* bytes, std::size_t size, off_t at) -> ssize_t {
    const auto name = std::filesystem::read_symlink(fmt::format("/proc/self/fd/{}", fd)).string();
    const bool longer = static_cast<std::uintmax_t>(at) + size > std::filesystem::file_size(name);
    return full && longer ? (errno = ENOSPC, -1) : ::pwrite(fd, bytes, size, at);
  };
  {
    auto log = Log::open(directory, disk).value();
    commit(log, 1, 3);
    full = true;
    const auto compacted = log.compact(snapshot_after(3));
    ASSERT_FALSE(compacted);
    EXPECT_NE(compacted.error().message.find("No space left"), std::string::npos) << compacted.error().message;
    EXPECT_FALSE(std::filesystem::exists(path + ".next")) << "it takes the room that the log needs";
    commit(log, 4, 5);  // in the room that it has
    full = false;
    ASSERT_TRUE(log.compact(snapshot_after(5)));
    EXPECT_LT(std::filesystem::file_size(archive(1)), 1000u) << "nothing is added to an archive";
    commit(log, 6, 6);
  }
  EXPECT_EQ(steps(), up_to(6));
}

TEST_F(CompactedLog, WithoutItsArchivesSaysWhatItKnowsAndWithAnotherLogsNames) {
  {
    auto log = Log::open(directory).value();
    for (std::uint64_t round = 0; round < 3; ++round) {
      commit(log, 10 * round + 1, 10 * round + 10);
      ASSERT_TRUE(log.compact(snapshot_after(10 * round + 10)));
    }
    commit(log, 31, 32);
  }
  std::filesystem::remove(archive(1));  // to save room
  auto records = read_log(path);
  ASSERT_TRUE(records) << records.error().message;
  ASSERT_EQ(records->size(), 23u);
  EXPECT_EQ(records->front().snapshot().committed(), 10u);
  auto audited = audit(trained_by_step(*records));
  EXPECT_EQ(audited.once, 4 * 32u);
  EXPECT_EQ(audited.lost + audited.repeated, 0u);

  // What is no archive, whatever its name.
  ASSERT_EQ(::mkfifo(archive(17).c_str(), 0600), 0);
  std::ofstream(directory + "/decisions.18446744073709551615.log") << "x";
  EXPECT_EQ(read_log(path)->size(), 23u);

  std::filesystem::remove(archive(3));
  records = read_log(path);
  ASSERT_FALSE(records);
  EXPECT_NE(
      records.error().message.find("decisions.log begins after step 30, and the archive before it ends after step "
                                   "20"),
      std::string::npos)
      << records.error().message;
}

// The audit of a running job.
TEST_F(CompactedLog, IsReadAsItWasWhenItIsCompactedMeanwhile) {
  auto log = Log::open(directory).value();
  commit(log, 1, 10);
  ASSERT_TRUE(log.compact(snapshot_after(10)));
  commit(log, 11, 20);
  std::vector<std::uint64_t> seen;
  const auto read = for_each_record(path, [&](const proto::LogRecord& record) {
    seen.push_back(record.committed().step());
    if (seen.size() != 1) return;
    for (std::uint64_t step = 21; step <= 22; ++step) {
      commit(log, step, step);
      ASSERT_TRUE(log.compact(snapshot_after(step)));
    }
    commit(log, 23, 23);
  });
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(seen, up_to(21));
  EXPECT_EQ(steps(), up_to(23));
}

TEST_F(CompactedLog, DoesNotGoOnFromAnotherJobsArchives) {
  const auto began = [](std::uint64_t job) {
    proto::LogRecord record;
    record.mutable_job()->set_id(job);
    return record;
  };
  const auto compacted_job = [&](std::uint64_t job) {
    auto log = Log::open(directory).value();
    ASSERT_TRUE(log.append({began(job)}));
    commit(log, 1, 5);
    auto snapshot = snapshot_after(5);
    snapshot.mutable_snapshot()->mutable_job()->set_id(job);
    ASSERT_TRUE(log.compact(snapshot));
    commit(log, 6, 6);
  };
  compacted_job(1);
  // Its log is lost: that is no new job.
  const std::string log_of_the_first = directory + "/elsewhere";
  std::filesystem::rename(path, log_of_the_first);
  const auto lost = Log::open(directory);
  ASSERT_FALSE(lost);
  EXPECT_EQ(lost.error().message, path + " holds no decision, and " + archive(1) +
                                      " says that a job was under way here: put the log back, or a copy of it. To "
                                      "start a new job, use another log directory, or move the archives away");
  std::filesystem::rename(archive(1), log_of_the_first);
  compacted_job(2);
  std::filesystem::rename(archive(1), archive(2));
  std::filesystem::rename(log_of_the_first, archive(1));
  ASSERT_TRUE(std::filesystem::exists(archive(2)));
  auto records = read_log(path);
  ASSERT_TRUE(records) << records.error().message;
  ASSERT_EQ(records->size(), 7u);
  EXPECT_EQ(records->front().job().id(), 2u);

  std::filesystem::rename(archive(1), archive(2));
  records = read_log(path);
  ASSERT_FALSE(records);
  EXPECT_EQ(records.error().message, archive(2) + " is of another job than " + path + ". Move it away");
}

}  // namespace
}  // namespace rejoin::membership
