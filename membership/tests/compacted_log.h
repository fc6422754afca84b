// A decision log that is compacted, for tests.
#pragma once

#include <fmt/format.h>

#include "membership/tests/log_file.h"

namespace rejoin::membership {

struct CompactedLog : LogDirectory {
  std::string archive(int number) const { return fmt::format("{}/decisions.{}.log", directory, number); }
  static proto::LogRecord commit(std::uint64_t step) {
    proto::LogRecord record;
    record.mutable_committed()->set_step(step);
    auto& member = *record.mutable_committed()->add_members();
    member.add_batch()->set_begin(4 * (step - 1));
    member.mutable_batch(0)->set_end(4 * step);
    return record;
  }
  static proto::LogRecord snapshot_after(std::uint64_t step) {
    proto::LogRecord record;
    record.mutable_snapshot()->set_committed(step);
    auto& ledger = *record.mutable_snapshot()->mutable_ledger();
    ledger.set_next(4 * step);
    ledger.set_from(step);
    auto& trained = *ledger.add_trained();
    trained.set_end(4 * step);
    return record;
  }
  static void commit(Log& log, std::uint64_t from, std::uint64_t to) {
    for (auto step = from; step <= to; ++step) ASSERT_TRUE(log.append({commit(step)}));
  }
  // The steps that all files together commit.
  std::vector<std::uint64_t> steps() const {
    std::vector<std::uint64_t> steps;
    auto records = read_log(path);
    EXPECT_TRUE(records) << records.error().message;
    for (const auto& record : *records) {
      EXPECT_TRUE(record.has_committed());
      steps.push_back(record.committed().step());
    }
    return steps;
  }
  static std::vector<std::uint64_t> up_to(std::uint64_t last) {
    std::vector<std::uint64_t> steps;
    for (std::uint64_t step = 1; step <= last; ++step) steps.push_back(step);
    return steps;
  }
};

}  // namespace rejoin::membership
