// A decision log on disks that fail, fill up, or lose power.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstring>
#include <set>

#include "membership/tests/log_file.h"

namespace rejoin::membership {
namespace {

Disk without_sync() {
  return {.write = ::pwrite, .sync = [](int) { return 0; }};
}

// A disk that loses what was written since the last sync when power goes: of every sector, the old or the new.
struct VolatileDisk {
  Bytes durable, shown;

  Disk disk() {
    return {.write =
                [this](int fd, const void* bytes, std::size_t size, off_t at) {
                  const auto end = static_cast<std::size_t>(at) + size;
                  if (shown.size() < end) shown.resize(end);
                  std::memcpy(shown.data() + at, bytes, size);
                  return ::pwrite(fd, bytes, size, at);
                },
            .sync = [this](int) { return durable = shown, 0; }};
  }
  Bytes after_power_loss(std::mt19937_64& random) const {
    constexpr std::size_t sector = 512;
    Bytes left = durable;
    left.resize(random() % 2 == 0 ? shown.size() : durable.size() + random() % (shown.size() - durable.size() + 1));
    for (std::size_t at = 0; at < left.size(); at += sector)
      if (random() % 2 == 0) std::copy_n(shown.begin() + at, std::min(sector, left.size() - at), left.begin() + at);
    return left;
  }
};

TEST_F(LogFile, WhateverPowerLossLeavesOfAnAppendNothingAcknowledgedIsLostAndTheLogGoesOn) {
  std::mt19937_64 random(5);
  int cut = 0, kept = 0;
  for (int round = 0; round < 300; ++round) {
    std::filesystem::remove(path);
    VolatileDisk disk;
    std::vector<std::string> acknowledged, tried;
    {
      auto log = Log::open(directory, disk.disk());
      ASSERT_TRUE(log) << log.error().message;
      for (std::uint64_t group = 1 + random() % 6; group > 0; --group) {
        const auto records = some_records(random);
        acknowledged.insert(acknowledged.end(), records.begin(), records.end());
        ASSERT_TRUE(log->append(records_of(records)));
      }
      // The last one is not synced when power goes.
      Disk cable = disk.disk();
      auto last = some_records(random);
      tried = acknowledged;
      tried.insert(tried.end(), last.begin(), last.end());
      const auto end = parse_log(disk.shown, path)->intact;
      const Bytes bytes = log_bytes(records_of(last), end);
      const auto fd = Fd(::open(path.c_str(), O_RDWR));
      ASSERT_EQ(cable.write(fd.get(), bytes.data(), bytes.size(), static_cast<off_t>(end)),
                static_cast<ssize_t>(bytes.size()));
    }
    put(disk.after_power_loss(random));
    auto log = Log::open(directory, without_sync());
    ASSERT_TRUE(log) << "round " << round << ": " << log.error().message;
    const auto found = serialized(log->records());
    ASSERT_GE(found.size(), acknowledged.size()) << round;
    ASSERT_TRUE(std::equal(found.begin(), found.end(), tried.begin())) << round;
    (found.size() < tried.size() ? cut : kept) += 1;
    ASSERT_TRUE(log->append({commit(1)}));
    ASSERT_EQ(read_log(path)->size(), found.size() + 1);
  }
  EXPECT_GT(cut, 20);
  EXPECT_GT(kept, 20);
}

struct FailingDisk {
  int writes_left = 1 << 20, syncs_left = 1 << 20, error = EIO;
  std::size_t most = SIZE_MAX;  // bytes of a write
  Disk disk() {
    return {.write = [this](int fd, const void* bytes, std::size_t size, off_t at) -> ssize_t {
              if (writes_left-- <= 0) return errno = error, -1;
              return ::pwrite(fd, bytes, std::min(size, most), at);
            },
            .sync = [this](int) { return syncs_left-- > 0 ? 0 : (errno = error, -1); }};
  }
};

TEST_F(LogFile, WritesThatTakeOnlyAPartAreGoneOnWith) {
  FailingDisk disk{.most = 3};
  {
    auto log = Log::open(directory, disk.disk());
    ASSERT_TRUE(log) << log.error().message;
    for (std::uint64_t step = 1; step <= 5; ++step) ASSERT_TRUE(log->append({commit(step), commit(step)}));
  }
  EXPECT_EQ(read_log(path)->size(), 10u);
}

TEST_F(LogFile, AnErrorOfTheDiskAtAnyCallStopsTheDecidingAndLosesNothingAcknowledged) {
  for (const int error : {EIO, ENOSPC, EDQUOT})
    for (const bool at_sync : {false, true})
      for (int calls = 0; calls < 30; ++calls) {
        SCOPED_TRACE(fmt::format("{} at {} {}", std::strerror(error), at_sync ? "sync" : "write", calls));
        std::filesystem::remove(path);
        FailingDisk disk{.error = error, .most = 20};
        (at_sync ? disk.syncs_left : disk.writes_left) = calls;
        std::uint64_t acknowledged = 0;
        if (auto log = Log::open(directory, disk.disk())) {
          for (bool failed = false; acknowledged < 8;) {
            auto appended = log->append({commit(acknowledged + 1)});
            if (appended) {
              ASSERT_FALSE(failed) << "it went on";
              ++acknowledged;
              continue;
            }
            if (!failed) EXPECT_NE(appended.error().message.find(std::strerror(error)), std::string::npos);
            if (std::exchange(failed, true)) break;  // twice: it stays so
            disk.writes_left = disk.syncs_left = 1 << 20;
          }
        }
        auto log = Log::open(directory, without_sync());
        ASSERT_TRUE(log) << log.error().message;
        ASSERT_GE(log->records().size(), acknowledged);
        ASSERT_LE(log->records().size(), acknowledged + 1);
        for (std::uint64_t i = 0; i < acknowledged; ++i) EXPECT_EQ(log->records()[i].committed().step(), i + 1);
      }
}

TEST_F(LogFile, MostAppendsChangeNoSizeOfTheFile) {
  auto log = Log::open(directory);
  ASSERT_TRUE(log);
  std::set<std::uintmax_t> sizes;
  constexpr std::uint64_t count = 10'000;
  for (std::uint64_t step = 1; step <= count; ++step) {
    ASSERT_TRUE(log->append({commit(step)}));
    sizes.insert(std::filesystem::file_size(path));
  }
  EXPECT_GT(log->size(), 256 * KiB);
  EXPECT_LT(*sizes.rbegin(), log->size() + 300 * KiB);
  EXPECT_LE(sizes.size(), 4u);
  EXPECT_EQ(read_log(path)->size(), count);
  ASSERT_TRUE(parse_one_file(path));
  EXPECT_EQ(parse_one_file(path)->torn, 0u) << "the room is no trace of a crash";
}

TEST_F(LogFile, WhereTheDiskHasNoRoomAppendsGoOnWithout) {
  Disk disk = Disk::real();
  disk.write = [](int fd, const void* bytes, std::size_t size, off_t at) -> ssize_t {
    return size < 1000 ? ::pwrite(fd, bytes, size, at) : (errno = ENOSPC, -1);
  };
  auto log = Log::open(directory, disk);
  ASSERT_TRUE(log);
  for (std::uint64_t step = 1; step <= 10; ++step) ASSERT_TRUE(log->append({commit(step)}));
  EXPECT_LT(std::filesystem::file_size(path), 1000u);
  EXPECT_EQ(read_log(path)->size(), 10u);
}

TEST(Log, AFullDiskIsAnErrorThatStopsTheDeciding) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  char name[] = "/tmp/rejoin-full-XXXXXX";
  const std::string directory = ::mkdtemp(name);
  std::filesystem::create_symlink("/dev/full", directory + "/decisions.log");
  auto log = Log::open(directory);
  EXPECT_FALSE(log);  // not even the header fits
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace rejoin::membership
