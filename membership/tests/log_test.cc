// What a decision log holds, and what it makes of damage.
#include <fmt/format.h>
#include <unistd.h>

#include <cstring>

#include "base/sanitized.h"
#include "membership/tests/log_file.h"

namespace rejoin::membership {
namespace {

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
    const auto begin = size - intact < mark ? intact : intact + mark;
    const std::string torn = read_file(path).substr(begin);
    auto log = Log::open(directory);
    ASSERT_TRUE(log) << log.error().message;
    EXPECT_EQ(log->records().size(), 3u);
    EXPECT_EQ(log->bytes_cut(), torn.find_last_not_of('\0') + 1) << size << ": zeros are room";
    ASSERT_TRUE(log->append({commit(4)}));
  }
  EXPECT_EQ(read_log(path)->size(), 4u);
}

TEST_F(LogFile, DamageIsFoundAndTornTailsAreCutWithRoomBehindThem) {
  write(3);
  const Bytes sound = bytes();
  const auto with_room = [&](Bytes content) {
    content.resize(content.size() + 100 * KiB);
    return content;
  };
  Bytes damaged = sound;
  damaged[8 + 16 + 1] ^= std::byte{1};
  EXPECT_FALSE(parse_log(with_room(damaged), path));
  Bytes torn = sound;
  torn.insert(torn.end(), 7, std::byte{9});
  const auto parsed = parse_log(with_room(torn), path);
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->torn, 7u);
  EXPECT_EQ(parsed->records.size(), 3u);
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
  const auto mark = log_bytes({}, sound.size()).size();  // it alone may go: whatever it speaks for is there
  std::size_t errors = 0, guarded = 0;
  for (std::size_t bit = 0; bit < 8 * sound.size(); bit += kSanitized ? 5 : 1) {
    Bytes damaged = sound;
    damaged[bit / 8] ^= std::byte{1} << static_cast<int>(bit % 8);
    ASSERT_FALSE(lost_silently(damaged, written)) << "bit " << bit << " of " << 8 * sound.size();
    errors += !parse_log(damaged, "log").has_value();
    guarded += bit / 8 < sound.size() - mark;
  }
  EXPECT_EQ(errors, guarded);
}

TEST_F(LogFile, ManyFlippedBitsLoseARecordSilentlyOnlyWhereTheyHitTheLastMarkToo) {
  const auto written = write_groups(40);
  const Bytes sound = bytes();
  const auto mark = parse_log(sound, path)->intact;
  std::mt19937_64 random(20);
  for (int round = 0; round < (kSanitized ? 600 : 3000); ++round) {
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

// Where what is written next makes it as long as it was.
TEST_F(LogFile, OneThatIsCutDuringAnAppendTakesNoMore) {
  std::uint64_t cut_to = 0;
  const auto cut = [&] {
    if (cut_to > 0) std::filesystem::resize_file(path, cut_to);
  };
  Disk in_sync = Disk::real(), before_write = Disk::real();
  in_sync.sync = [&](int fd) { return cut(), ::fdatasync(fd); };
  before_write.write = [&](int fd, const void* bytes, std::size_t size, off_t at) {
    return cut(), ::pwrite(fd, bytes, size, at);
  };
  proto::LogRecord snapshot;
  snapshot.mutable_snapshot()->set_epoch(9);
  for (const Disk& disk : {in_sync, before_write})
    for (const std::string_view last : {"appended", "opened", "compacted"}) {
      SCOPED_TRACE(last);
      std::filesystem::remove_all(directory);
      cut_to = 0;
      auto log = Log::open(directory, disk);
      ASSERT_TRUE(log) << log.error().message;
      for (std::uint64_t step = 1; step <= 9; ++step) ASSERT_TRUE(log->append({commit(step)}));
      if (last == "opened") {
        { const Log closed = std::move(*log); }
        log = Log::open(directory, disk);
        ASSERT_TRUE(log) << log.error().message;
      }
      if (last == "compacted") ASSERT_TRUE(log->compact(snapshot));
      cut_to = log->size() / 2;
      const auto refused = log->append({commit(10)});
      ASSERT_FALSE(refused);
      EXPECT_EQ(refused.error().code, ErrorCode::corrupt);
      EXPECT_NE(refused.error().message.find("was cut from "), std::string::npos) << refused.error().message;
      EXPECT_TRUE(log->failed());
    }
}

TEST_F(LogFile, OneOfBeforeMarksThatHoldsNothingTakesItsFirstRecord) {
  const std::string_view magic = "RJNLOG01";
  put(Bytes(as_bytes(magic).begin(), as_bytes(magic).end()));
  auto log = Log::open(directory);
  ASSERT_TRUE(log) << log.error().message;
  const auto appended = log->append({commit(1)});
  EXPECT_TRUE(appended) << appended.error().message;
  EXPECT_EQ(read_log(path)->size(), 1u);
}

TEST_F(LogFile, AShortFileThatIsNoLogIsLeftAsItIs) {
  const std::string_view notes = "hello\n";
  put(Bytes(as_bytes(notes).begin(), as_bytes(notes).end()));
  const auto refused = Log::open(directory);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("is not a Rejoin decision log"), std::string::npos);
  EXPECT_EQ(std::filesystem::file_size(path), notes.size());
}

// Each header names its own position, and all that follows as its record, whose checksum is wrong: hashed for each of
// them it is 8 TiB.
TEST_F(LogFile, AFileThatIsMadeToBeHashedWithoutEndIsReadAtOnce) {
  for (const std::string_view magic : {"RJNLOG02", "RJNLOG01"}) {
    constexpr std::uint32_t kBytes = 16 * MiB - 8;  // whole headers behind the magic
    Bytes made(as_bytes(magic).begin(), as_bytes(magic).end());
    while (made.size() + 16 <= kBytes) {
      const auto at = static_cast<std::uint32_t>(made.size());
      const std::array<std::uint32_t, 4> header{kBytes - at - 16, at, 1, 1};
      made.insert(made.end(), bytes_of(header).begin(), bytes_of(header).end());
    }
    const auto parsed = parse_log(made, path);
    if (magic == "RJNLOG02") EXPECT_TRUE(parsed);
    else EXPECT_EQ(parsed.error().code, ErrorCode::corrupt);
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

}  // namespace
}  // namespace rejoin::membership
