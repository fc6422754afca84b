#include "membership/log.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>

namespace rejoin::membership {
namespace {

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
  const auto whole = std::filesystem::file_size(path);
  write(0);
  {
    auto log = Log::open(directory);
    ASSERT_TRUE(log->append({commit(4)}));
  }
  const auto longer = std::filesystem::file_size(path);
  for (auto size = whole + 1; size < longer; ++size) {
    std::filesystem::resize_file(path, size);
    auto log = Log::open(directory);
    ASSERT_TRUE(log) << log.error().message;
    EXPECT_EQ(log->records().size(), 3u);
    EXPECT_EQ(log->bytes_cut(), size - whole);
    ASSERT_TRUE(log->append({commit(4)}));
  }
  EXPECT_EQ(read_log(path)->size(), 4u);
}

TEST_F(LogFile, DamageBeforeTheTailIsAnErrorThatSaysWhere) {
  write(3);
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(8 + 16 + 1);
  file.put('\x7f');
  file.close();
  auto log = Log::open(directory);
  ASSERT_FALSE(log);
  EXPECT_EQ(log.error().code, ErrorCode::corrupt);
  EXPECT_NE(log.error().message.find("damaged at byte 8"), std::string::npos) << log.error().message;
}

TEST_F(LogFile, OneCoordinatorAtATime) {
  auto first = Log::open(directory);
  ASSERT_TRUE(first);
  auto second = Log::open(directory);
  ASSERT_FALSE(second);
  EXPECT_NE(second.error().message.find("in use by another coordinator"), std::string::npos);
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
