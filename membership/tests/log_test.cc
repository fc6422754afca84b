#include "membership/log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

namespace rejoin::membership {
namespace {

std::vector<std::string> serialized(const std::vector<proto::LogRecord>& records) {
  std::vector<std::string> texts;
  for (const auto& record : records) texts.push_back(record.SerializeAsString());
  return texts;
}

struct LogFile : testing::Test {
  std::string directory = [] {
    char name[] = "/tmp/rejoin-log-XXXXXX";
    return std::string(::mkdtemp(name));
  }();
  std::string path = directory + "/decisions.log";
  ~LogFile() override { std::filesystem::remove_all(directory); }

  static proto::LogRecord commit(std::uint64_t step) {
    proto::LogRecord record;
    record.mutable_committed()->set_step(step);
    record.mutable_committed()->set_epoch(7);
    return record;
  }
  Bytes bytes() const {
    std::ifstream file(path, std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    return {as_bytes(text).begin(), as_bytes(text).end()};
  }
  void put(const Bytes& content) const {
    std::ofstream(path, std::ios::binary | std::ios::trunc)
        .write(reinterpret_cast<const char*>(content.data()), static_cast<std::streamsize>(content.size()));
  }
  static std::vector<std::string> some_records(std::mt19937_64& random) {
    std::vector<std::string> records;
    for (std::uint64_t count = 1 + random() % 3; count > 0; --count) {
      proto::LogRecord record = commit(random() % 1000);
      if (random() % 4 == 0) record.mutable_epoch()->set_reason(std::string(random() % 3000, 'r'));
      records.push_back(record.SerializeAsString());
    }
    return records;
  }
  static std::vector<proto::LogRecord> records_of(const std::vector<std::string>& texts) {
    std::vector<proto::LogRecord> records(texts.size());
    for (std::size_t i = 0; i < texts.size(); ++i) EXPECT_TRUE(records[i].ParseFromString(texts[i]));
    return records;
  }
  std::vector<std::string> write_groups(int count) {
    std::mt19937_64 random(3);
    std::vector<std::string> written;
    auto log = Log::open(directory);
    for (int i = 0; i < count; ++i) {
      const auto records = some_records(random);
      EXPECT_TRUE(log->append(records_of(records)));
      written.insert(written.end(), records.begin(), records.end());
    }
    return written;
  }
  void write(std::uint64_t count) {
    auto log = Log::open(directory);
    ASSERT_TRUE(log) << log.error().message;
    for (std::uint64_t step = 1; step <= count; ++step) ASSERT_TRUE(log->append({commit(step)}));
  }
};

TEST_F(LogFile, GivesBackWhatWasAppendedAfterReopening) {
  write(5);
  auto log = Log::open(directory);
  ASSERT_TRUE(log);
  ASSERT_EQ(log->records().size(), 5u);
  EXPECT_EQ(log->records()[4].committed().step(), 5u);
}

TEST_F(LogFile, ATornTailOfAnyLengthIsCutOffAndTheLogGoesOn) {
  write(3);
  const auto intact = parse_log(bytes(), path)->intact;
  {
    auto log = Log::open(directory);
    ASSERT_TRUE(log->append({commit(4)}));
  }
  const auto longer = parse_log(bytes(), path)->intact;
  const auto mark = log_bytes({}, intact).size();
  for (auto size = intact + 1; size < longer; ++size) {
    std::filesystem::resize_file(path, size);
    auto log = Log::open(directory);
    ASSERT_TRUE(log) << log.error().message;
    EXPECT_EQ(log->records().size(), 3u);
    EXPECT_EQ(log->bytes_cut(), size - intact < mark ? size - intact : size - intact - mark) << size;
    ASSERT_TRUE(log->append({commit(4)}));
  }
  EXPECT_EQ(read_log(path)->size(), 4u);
}

TEST_F(LogFile, DamageIsAnErrorThatSaysWhereAndWhatToDo) {
  write(3);
  const auto last = parse_log(bytes(), path)->intact - 1;
  for (const std::uint64_t at : {std::uint64_t{8 + 16 + 16 + 1}, last}) {
    const Bytes sound = bytes();
    Bytes damaged = sound;
    damaged[at] ^= std::byte{0x40};
    put(damaged);
    auto log = Log::open(directory);
    ASSERT_FALSE(log) << "a flip at " << at << " was not seen";
    EXPECT_EQ(log.error().code, ErrorCode::corrupt);
    for (const char* part : {"damaged at byte", "acknowledged", "Restore it from a copy"})
      EXPECT_NE(log.error().message.find(part), std::string::npos) << log.error().message;
    EXPECT_EQ(bytes(), damaged) << "it was touched";
    put(sound);
  }
}

// Whether these bytes, damaged somehow, are taken for a sound log that holds less or something else.
bool lost_silently(const Bytes& damaged, const std::vector<std::string>& written) {
  const auto parsed = parse_log(damaged, "log");
  return parsed && serialized(parsed->records) != written;
}

TEST_F(LogFile, NoFlippedBitAnywhereLosesAnAcknowledgedRecordSilently) {
  const auto written = write_groups(12);
  const Bytes sound = bytes();
  ASSERT_FALSE(lost_silently(sound, written));
  std::size_t errors = 0;
  for (std::size_t bit = 0; bit < 8 * sound.size(); ++bit) {
    Bytes damaged = sound;
    damaged[bit / 8] ^= std::byte{1} << static_cast<int>(bit % 8);
    ASSERT_FALSE(lost_silently(damaged, written)) << "bit " << bit << " of " << 8 * sound.size();
    errors += !parse_log(damaged, "log").has_value();
  }
  // The last mark alone may go: whatever it speaks for is there.
  const auto mark = log_bytes({}, sound.size()).size();
  EXPECT_EQ(errors, 8 * (sound.size() - mark));
}

TEST_F(LogFile, ManyFlippedBitsLoseARecordSilentlyOnlyWhereTheyHitTheLastMarkToo) {
  const auto written = write_groups(40);
  const Bytes sound = bytes();
  const auto mark = parse_log(sound, path)->intact;
  std::mt19937_64 random(20);
  for (int round = 0; round < 3000; ++round) {
    Bytes damaged = sound;
    bool hit = false;
    for (std::uint64_t flips = 1 + random() % 6; flips > 0; --flips) {
      const std::uint64_t bit = random() % (8 * sound.size());
      damaged[bit / 8] ^= std::byte{1} << static_cast<int>(bit % 8);
      hit = hit || bit / 8 >= mark;
    }
    ASSERT_TRUE(hit || !lost_silently(damaged, written)) << "round " << round;
  }
}

TEST_F(LogFile, AnOldLogIsReadAndItsLastRecordIsGuardedFromThenOn) {
  Bytes old = log_bytes({commit(1), commit(2), commit(3)}, 0);
  std::memcpy(old.data(), "RJNLOG01", 8);
  Bytes torn = old;
  torn.resize(old.size() - 3);
  Bytes damaged = old;
  damaged[8 + 16] ^= std::byte{1};
  put(damaged);
  EXPECT_FALSE(Log::open(directory)) << "whole records follow";
  put(torn);
  EXPECT_EQ(Log::open(directory)->records().size(), 2u);
  put(old);
  EXPECT_EQ(Log::open(directory)->records().size(), 3u);
  Bytes now = bytes();
  EXPECT_EQ(as_text(BytesView(now).first(8)), "RJNLOG02");
  now[old.size() - 1] ^= std::byte{1};
  put(now);
  EXPECT_FALSE(Log::open(directory)) << "its last record is damaged";
}

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

// The next coordinator would look for it there, and decide again.
TEST_F(LogFile, OneThatIsNoLongerAtItsPathTakesNoMore) {
  const std::function<void()> losses[] = {[&] { std::filesystem::remove_all(directory); },
                                          [&] { std::filesystem::rename(path, path + ".old"); },
                                          [&] { std::filesystem::rename(path, path + ".older"), put(Bytes(8)); }};
  for (const auto& lose : losses) {
    auto log = Log::open(directory);
    ASSERT_TRUE(log) << log.error().message;
    ASSERT_TRUE(log->append({commit(1)}));
    lose();
    const auto refused = log->append({commit(2)});
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::not_found);
    EXPECT_NE(refused.error().message.find(path + " was removed or moved away"), std::string::npos)
        << refused.error().message;
    EXPECT_FALSE(log->append({commit(2)})) << "and none after it";
  }
}

// As a tool does that copies a log and truncates it.
TEST_F(LogFile, OneThatIsCutWhileItIsInUseTakesNoMore) {
  auto log = Log::open(directory);
  ASSERT_TRUE(log) << log.error().message;
  ASSERT_TRUE(log->append({commit(1)}));
  std::filesystem::resize_file(path, 0);
  const auto refused = log->append({commit(2)});
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("was cut from "), std::string::npos) << refused.error().message;
  EXPECT_EQ(std::filesystem::file_size(path), 0u) << "a hole would hide what is lost";
}

TEST_F(LogFile, AShortFileThatIsNoLogIsLeftAsItIs) {
  const std::string_view notes = "hello\n";
  put(Bytes(as_bytes(notes).begin(), as_bytes(notes).end()));
  const auto refused = Log::open(directory);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("is not a Rejoin decision log"), std::string::npos);
  EXPECT_EQ(std::filesystem::file_size(path), notes.size());
}

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

TEST_F(LogFile, ARecordOverTheLimitIsRefusedAndTheLogGoesOn) {
  auto log = Log::open(directory);
  ASSERT_TRUE(log);
  proto::LogRecord large;
  large.mutable_epoch()->set_reason(std::string(17 * MiB, 'x'));
  auto appended = log->append({large});
  ASSERT_FALSE(appended);
  EXPECT_NE(appended.error().message.find("over the limit of 16.0 MiB"), std::string::npos) << appended.error().message;
  EXPECT_TRUE(log->append({commit(1)}));
}

TEST_F(LogFile, OneCoordinatorAtATime) {
  auto first = Log::open(directory);
  ASSERT_TRUE(first);
  auto second = Log::open(directory);
  ASSERT_FALSE(second);
  EXPECT_NE(second.error().message.find("in use by another coordinator"), std::string::npos);
}

TEST_F(LogFile, AFileWhoseHeaderNeverReachedTheDiskIsANewLog) {
  put(Bytes(4096));
  EXPECT_FALSE(Log::open(directory)) << "so much was never written at once";
  for (const std::size_t size : {3, 16}) {
    put(Bytes(size));
    auto log = Log::open(directory);
    ASSERT_TRUE(log) << log.error().message;
    ASSERT_TRUE(log->append({commit(1)}));
    EXPECT_EQ(read_log(path)->size(), 1u);
  }
}

TEST_F(LogFile, AForeignFileIsNotTouched) {
  std::ofstream(path) << "this is somebody's diary";
  EXPECT_FALSE(Log::open(directory));
  EXPECT_EQ(std::filesystem::file_size(path), 24u);
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
