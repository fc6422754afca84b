// A decision log in a directory of its own, for tests.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "membership/log.h"
#include "tests/process.h"

namespace rejoin::membership {

using test::read_file;

inline std::vector<std::string> serialized(const std::vector<proto::LogRecord>& records) {
  std::vector<std::string> texts;
  for (const auto& record : records) texts.push_back(record.SerializeAsString());
  return texts;
}

struct LogDirectory : testing::Test {
  test::Scratch scratch;
  const std::string& directory = scratch.path;
  std::string path = directory + "/decisions.log";
};

struct LogFile : LogDirectory {
  static proto::LogRecord commit(std::uint64_t step) {
    proto::LogRecord record;
    record.mutable_committed()->set_step(step);
    record.mutable_committed()->set_epoch(7);
    return record;
  }
  // Without the room behind what is written.
  Bytes bytes() const {
    const std::string text = read_file(path);
    Bytes all(as_bytes(text).begin(), as_bytes(text).end());
    if (const auto parsed = parse_log(all, path)) all.resize(parsed->end());
    return all;
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

}  // namespace rejoin::membership
