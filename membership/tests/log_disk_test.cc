// A decision log on disks that fail, fill up, or lose power.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <set>
#include <thread>

#include "membership/tests/log_file.h"

namespace rejoin::membership {
namespace {

Disk without_sync() {
  return {.write = ::pwrite, .sync = [](int) { return 0; }};
}

// A disk that loses what was written since the last sync when power goes: of every sector, the old or the new.
struct VolatileDisk {
  Bytes durable, shown;
  std::size_t most = SIZE_MAX;  // bytes of a write that are taken
  bool power_goes = false;      // at the next sync

  Disk disk() {
    return {.write =
                [this](int fd, const void* bytes, std::size_t size, off_t at) {
                  size = std::min(size, most);
                  const auto end = static_cast<std::size_t>(at) + size;
                  if (shown.size() < end) shown.resize(end);
                  std::memcpy(shown.data() + at, bytes, size);
                  return ::pwrite(fd, bytes, size, at);
                },
            .sync = [this](int) { return power_goes ? (errno = EIO, -1) : (durable = shown, 0); }};
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
  int cut = 0, kept = 0, made_room = 0, had_room = 0;
  for (int round = 0; round < 300; ++round) {
    SCOPED_TRACE(round);
    std::filesystem::remove(path);
    VolatileDisk disk;
    disk.most = std::array<std::size_t, 3>{500, 5000, SIZE_MAX}[random() % 3];  // so it is with room
    std::vector<std::string> acknowledged, tried;
    {
      auto log = Log::open(directory, disk.disk());
      ASSERT_TRUE(log) << log.error().message;
      for (std::uint64_t group = random() % 7; group > 0; --group) {
        const auto records = some_records(random);
        acknowledged.insert(acknowledged.end(), records.begin(), records.end());
        ASSERT_TRUE(log->append(records_of(records)));
      }
      disk.power_goes = true;
      const auto last = some_records(random);
      tried = acknowledged;
      tried.insert(tried.end(), last.begin(), last.end());
      ASSERT_FALSE(log->append(records_of(last)));
    }
    (disk.shown.size() > disk.durable.size() ? made_room : had_room) += 1;
    put(disk.after_power_loss(random));
    auto log = Log::open(directory, without_sync());
    ASSERT_TRUE(log) << log.error().message;
    const auto found = serialized(log->records());
    ASSERT_GE(found.size(), acknowledged.size());
    ASSERT_LE(found.size(), tried.size());
    ASSERT_TRUE(std::equal(found.begin(), found.end(), tried.begin()));
    (found.size() < tried.size() ? cut : kept) += 1;
    ASSERT_TRUE(log->append({commit(1)}));
    ASSERT_EQ(read_log(path)->size(), found.size() + 1);
  }
  for (const int rounds : {cut, kept, made_room, had_room}) EXPECT_GT(rounds, 20);
}

// Whoever reads it meanwhile sees a part of it from before an append, and a part from after it.
TEST_F(LogFile, IsReadWhileItIsInUse) {
  std::atomic<bool> done = false;
  auto log = Log::open(directory, without_sync());
  ASSERT_TRUE(log);
  ASSERT_TRUE(log->append({commit(1)}));
  std::jthread coordinator([&] {
    for (std::uint64_t step = 2; step <= 30'000; ++step)
      if (!log->append({commit(step)})) break;
    done = true;
  });
  std::size_t before = 0;
  while (!done) {
    const auto read = read_log(path);
    ASSERT_TRUE(read) << read.error().message;
    ASSERT_GE(read->size(), before);
    before = read->size();
  }
  EXPECT_EQ(read_log(path)->size(), 30'000u);
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

TEST_F(LogFile, ADiskThatTakesNothingIsAnErrorAndNoEndlessLoop) {
  auto disk = Disk::real();
  bool takes = true;
  disk.write = [&](int fd, const void* bytes, std::size_t size, off_t at) {
    return takes ? ::pwrite(fd, bytes, size, at) : 0;
  };
  auto log = Log::open(directory, disk);
  ASSERT_TRUE(log) << log.error().message;
  takes = false;
  const auto appended = log->append({commit(1)});
  ASSERT_FALSE(appended);
  EXPECT_NE(appended.error().message.find("Input/output error"), std::string::npos) << appended.error().message;
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

// A kernel's pages: what a sync could not write is shown, and not written again before its page is written to.
struct PageCache {
  static constexpr std::size_t kPage = 4096;
  const std::string& path;
  Bytes durable;
  std::set<std::size_t> dirty;
  bool fails = false;

  Disk disk() {
    return {.write =
                [this](int fd, const void* bytes, std::size_t size, off_t at) {
                  const auto begin = static_cast<std::size_t>(at);
                  for (std::size_t page = begin / kPage; page * kPage < begin + size; ++page) dirty.insert(page);
                  return ::pwrite(fd, bytes, size, at);
                },
            .sync = [this](int) { return sync(); }};
  }
  int sync() {
    const std::string shown = read_file(path);
    durable.resize(shown.size());
    for (std::size_t page : std::exchange(dirty, {}))
      for (std::size_t i = page * kPage; i < std::min(shown.size(), (page + 1) * kPage) && !fails; ++i)
        durable[i] = static_cast<std::byte>(shown[i]);
    return fails ? (errno = EIO, -1) : 0;
  }
};

// Its mark was written with what the sync then failed for.
TEST_F(LogFile, AMarkThatASyncFailedForIsOnDiskBeforeWhatFollowsWhereverItsPageEnds) {
  for (std::size_t fill = PageCache::kPage - 80; fill < PageCache::kPage - 10; ++fill) {
    std::filesystem::remove(path);
    PageCache pages{.path = path, .durable = {}, .dirty = {}};
    {
      auto log = Log::open(directory, pages.disk()).value();
      auto record = commit(1);
      record.mutable_epoch()->set_reason(std::string(fill, 'r'));
      ASSERT_TRUE(log.append({record}));
      pages.fails = true;
      ASSERT_FALSE(log.append({commit(2)}));
      pages.fails = false;
    }
    {
      auto again = Log::open(directory, pages.disk()).value();
      ASSERT_EQ(again.records().size(), 2u);
      ASSERT_TRUE(again.append({commit(3)}));
      ASSERT_TRUE(again.append({commit(4)}));
      pages.sync();
    }
    put(pages.durable);  // power is lost
    const auto log = Log::open(directory);
    ASSERT_TRUE(log) << fill << ": " << log.error().message;
    EXPECT_EQ(log->records().size(), 4u);
  }
}

TEST_F(LogFile, MostAppendsChangeNoSizeOfTheFile) {
  auto log = Log::open(directory, without_sync());
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

// An older release takes zeros behind the records for what a crash has left.
TEST_F(LogFile, AnOrderlyEndGivesTheRoomBack) {
  std::uint64_t end = 0;
  for (const std::uint64_t step : {1, 2}) {
    auto log = Log::open(directory, without_sync());
    ASSERT_TRUE(log);
    EXPECT_EQ(log->bytes_cut(), 0u);
    ASSERT_TRUE(log->append({commit(step)}));
    end = log->size();
    EXPECT_GT(std::filesystem::file_size(path), end + 1000);
    Log moved = std::move(*log);
    EXPECT_GT(std::filesystem::file_size(path), end + 1000) << "it goes on";
  }
  const auto bytes = read_file(path);
  EXPECT_LT(bytes.size(), end + 100) << "the last mark alone";
  EXPECT_EQ(parse_one_file(path)->end(), bytes.size()) << "all of it is sound";
  EXPECT_EQ(read_log(path)->size(), 2u);
  (void)Log::open(directory, without_sync());
  EXPECT_EQ(read_file(path), bytes) << "where it has none there is none to give back";
}

// What is there then is nobody's room.
TEST_F(LogFile, AnEndThatFindsAnotherFileInItsPlaceLeavesItAsItIs) {
  auto log = Log::open(directory, without_sync());
  ASSERT_TRUE(log && log->append({commit(1)}));
  const std::string others(std::filesystem::file_size(path), 'x');
  put(Bytes(as_bytes(others).begin(), as_bytes(others).end()));
  log = tl::unexpected(Error{});
  EXPECT_EQ(read_file(path), others);
}

// The whole log, in the place of an older copy of it that a coordinator has.
TEST_F(LogFile, AnEndThatFindsALongerLogInItsPlaceLeavesItAsItIs) {
  {
    auto whole = Log::open(directory, without_sync());
    ASSERT_TRUE(whole);
    for (std::uint64_t step = 1; step <= 3000; ++step) ASSERT_TRUE(whole->append({commit(step)}));
  }
  const auto bytes = read_file(path);
  std::filesystem::remove(path);
  {
    auto older = Log::open(directory, without_sync());
    ASSERT_TRUE(older && older->append({commit(1)}));
    put(Bytes(as_bytes(bytes).begin(), as_bytes(bytes).end()));
  }
  EXPECT_EQ(read_file(path), bytes);
  EXPECT_EQ(read_log(path)->size(), 3000u);
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

// A compaction needs the place of a snapshot: what room would take is left to it.
TEST_F(LogFile, WhereTheDiskHasLittleLeftNoRoomIsMade) {
  for (const std::uint64_t left : {1 * MiB, 60 * MiB, 70 * MiB}) {
    std::filesystem::remove(path);
    Disk disk = Disk::real();
    disk.free = [left](int) { return left; };
    auto log = Log::open(directory, disk);
    ASSERT_TRUE(log);
    for (std::uint64_t step = 1; step <= 10; ++step) ASSERT_TRUE(log->append({commit(step)}));
    EXPECT_EQ(std::filesystem::file_size(path) > 1000u, left == 70 * MiB) << left;
    EXPECT_EQ(read_log(path)->size(), 10u);
  }
}

TEST(Log, AFullDiskIsAnErrorThatStopsTheDeciding) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  const test::Scratch scratch;
  std::filesystem::create_symlink("/dev/full", scratch.path + "/decisions.log");
  EXPECT_FALSE(Log::open(scratch.path)) << "not even the header fits";
}

// Archives that can't be seen are not taken for none: the next one's number would be an older one's.
TEST_F(LogFile, WithoutADescriptorToListItsArchivesIsNotCompacted) {
  const auto archive = [&](int number) { return fmt::format("{}/decisions.{}.log", directory, number); };
  const auto snapshot_after = [](std::uint64_t step) {
    proto::LogRecord record;
    record.mutable_snapshot()->set_committed(step);
    return record;
  };
  auto log = Log::open(directory).value();
  for (std::uint64_t step = 1; step <= 2; ++step) {
    ASSERT_TRUE(log.append({commit(step)}));
    ASSERT_TRUE(log.compact(snapshot_after(step)));
  }
  std::filesystem::remove(archive(1));
  const int next = ::dup(0);
  ::close(next);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit lower = before;
  lower.rlim_cur = static_cast<rlim_t>(next) + 1;  // one for the new file
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &lower), 0);
  const auto compacted = log.compact(snapshot_after(2));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_FALSE(compacted);
  EXPECT_NE(compacted.error().message.find("can't be listed: Too many open files"), std::string::npos)
      << compacted.error().message;
  EXPECT_FALSE(std::filesystem::exists(archive(1)));
  ASSERT_TRUE(log.compact(snapshot_after(2)));
  EXPECT_TRUE(std::filesystem::exists(archive(3)));
}

// Its writer never comes, or it is a device without end.
TEST_F(LogFile, ThatIsNoFileIsNotWaitedFor) {
  const std::string pipe = directory + "/pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& one : {pipe, std::string("/dev/zero"), directory}) {
    const std::string says = one + " is no regular file";
    EXPECT_EQ(parse_one_file(one).error().message, says);
    EXPECT_EQ(for_each_record(one, [](const auto&) {}).error().message, says);
    EXPECT_EQ(records_before_damage(one).error().message, says);
  }
}

}  // namespace
}  // namespace rejoin::membership
