// The coordinator's durable log: checksummed records in one file, each on disk before append() returns.
// A torn tail (a crash in mid-append) is cut off at opening; damage before the tail is an error.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/fd.h"
#include "control.pb.h"
#include "membership/ledger.h"

namespace rejoin::membership {

// What a log's file holds, and how it is read: pure. These records as they are appended at byte `at`; at 0 the file's
// head comes before them.
Bytes log_bytes(const std::vector<proto::LogRecord>& records, std::uint64_t at);
struct ParsedLog {
  std::vector<proto::LogRecord> records;
  std::uint64_t whole = 0;  // bytes; what follows is a torn tail
};
// `corrupt` where damage is followed by a whole record. `name`: for errors.
Result<ParsedLog> parse_log(BytesView bytes, const std::string& name);

class Log {
 public:
  // Opens or creates DIRECTORY/decisions.log and reads what is in it. Only one process at a time (`exhausted`).
  static Result<Log> open(const std::string& directory);
  const std::vector<proto::LogRecord>& records() const { return records_; }
  std::uint64_t bytes_cut() const { return bytes_cut_; }  // of a torn tail
  // All of them durable, or an error, after which the log takes no more: the process must stop deciding.
  Result<> append(const std::vector<proto::LogRecord>& records);

 private:
  Fd file_;
  std::string path_;
  std::vector<proto::LogRecord> records_;
  std::uint64_t bytes_cut_ = 0;
  bool failed_ = false;
};

// Reads a log without opening it for writing, for the audit.
Result<std::vector<proto::LogRecord>> read_log(const std::string& path);

// What an operator gave up: steps that were committed, and are trained again.
struct RolledBack {
  std::uint64_t steps = 0, samples = 0;
};
RolledBack rolled_back(const std::vector<proto::LogRecord>& records);

// The samples that its commits trained, by step, without those of steps that were rolled back. For audit().
std::map<std::uint64_t, Batch> trained_by_step(const std::vector<proto::LogRecord>& records);

}  // namespace rejoin::membership
