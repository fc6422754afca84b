// The coordinator's durable log: checksummed records in one file, each on disk before append() returns.
//
// An append is one write and one sync. When the sync has returned, a mark goes behind what was written: all before it
// is on disk. The mark itself is not synced; the next append writes it again, before its records. Behind it is room:
// zeros, which the append that finds none writes ahead where the disk has plenty, so that the following ones leave the
// file's size as it is, and none has to be synced. So at opening:
// - Damage with a mark somewhere behind it is damage to what was acknowledged: an error.
// - Anything else behind the last mark that is not intact, nor room, was never acknowledged: a crash tore it, and it is
//   cut off.
// What this promises: an acknowledged record is never lost without a word as long as its mark, or a later one, is
// sound. What it can't: to notice a file that ends early just behind some mark (a copy that was cut short, say), or
// damage to the last append where power was lost before the mark behind it reached the disk, which the kernel sees to
// within half a minute. A sector is taken to be written whole or not at all.
//
// A log that has grown is compacted: a new file with a snapshot of what follows from all records takes its place and
// its name, and the old one stays beside it as decisions.1.log, decisions.2.log … Recovery reads the first alone; the
// audit reads all that are there. The old one has both names meanwhile; where the file system knows no hard links it is
// renamed, and the name is nobody's for a moment: the new file is found as decisions.log.next then.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/fd.h"
#include "control.pb.h"
#include "membership/ledger.h"

namespace rejoin::membership {

constexpr std::size_t kMarkBytes = 16;  // behind the records that are on disk

// Returns what is written at byte `at` to append these records: the mark, and then the records; at 0 the file's head
// comes instead of the mark. Without records it is the mark alone. This and parse_log() are pure.
Bytes log_bytes(const std::vector<proto::LogRecord>& records, std::uint64_t at);
struct ParsedLog {
  std::vector<proto::LogRecord> records;
  std::uint64_t marked = 0;  // bytes that were on disk for certain
  std::uint64_t intact = 0;  // bytes up to the last record's end: what follows is a mark, or torn
  std::uint64_t torn = 0;    // bytes behind `intact` that a crash has left, without the room behind them
  bool old = false;          // without marks: there the last record's damage looks like a torn tail
  // Returns where what is sound ends, its last mark included: what is torn follows, and room.
  std::uint64_t end() const { return std::max(marked, intact); }
};
// Parses a log. Errors: `corrupt` where what was acknowledged is damaged; they name it by `name`.
Result<ParsedLog> parse_log(BytesView bytes, const std::string& name);
Result<ParsedLog> parse_file(const Fd& file, const std::string& name);
Result<ParsedLog> parse_one_file(const std::string& path);
// Returns what can be read of a file before any damage; nothing where there is no file. Errors: that there is nothing.
Result<std::vector<proto::LogRecord>> records_before_damage(const std::string& path);
// … of the log in a directory, or of its newest archive where it holds nothing: its job has decided that much at least.
Result<std::vector<proto::LogRecord>> legible_records(const std::string& directory);
// Returns the first record of a file, if it is intact.
std::optional<proto::LogRecord> first_record(const Fd& file);

// Returns the job that a log is of, as its first record names it.
const proto::LogRecord::Job& job_of(const proto::LogRecord& first);

// A snapshot that has shares in it, or units of another kind, which an older release would misread, gets a `Needs`
// behind it when a log is compacted. That is none of the job's records. Those stand directly before a commit, and while
// shares are in force no commit is without one: so it is the one that is not before a commit.
bool has_needs_of_its_own(const std::vector<proto::LogRecord>& records);
// Returns how many records of the job these stand for, with those that a snapshot at their beginning says.
std::uint64_t records_of_job(const std::vector<proto::LogRecord>& records);

// The system calls by which a log reaches its file.
struct Disk {
  std::function<ssize_t(int, const void*, std::size_t, off_t)> write;  // as pwrite()
  std::function<int(int)> sync;                                        // as fdatasync(); also of a directory
  std::function<int(const char*, const char*)> link, rename;           // as those of the system
  std::function<std::uint64_t(int)> free;  // bytes that are left on it; without it there are plenty
  static Disk real();
};

class Log {
 public:
  // Opens or creates DIRECTORY/decisions.log and reads what is in it. Errors: `refused` where another process has it
  // open; `not_found` where it holds nothing and archives are beside it, since it is lost then.
  static Result<Log> open(const std::string& directory, Disk disk = Disk::real());
  Log(Log&&) = default;
  Log& operator=(Log&&) = default;
  ~Log();  // an orderly end: without the room behind the records, which an older release takes for a torn tail
  const std::vector<proto::LogRecord>& records() const { return records_; }  // those that it had when it was opened
  void forget_records() { records_ = {}; }
  std::uint64_t size() const { return end_; }             // the bytes that recovery would read
  std::uint64_t bytes_cut() const { return bytes_cut_; }  // the bytes of a torn tail
  // Makes all of them durable, or fails, and then takes no more: the process must stop deciding. `not_found`:
  // the file isn't at its path any more, where the next coordinator would look for it. `corrupt`: it was cut.
  Result<> append(const std::vector<proto::LogRecord>& records);
  // Puts `snapshot` into the place of all records so far. After an error the log goes on as it is, unless it has
  // failed(): then it can't be told any more which file a crash would leave.
  Result<> compact(const proto::LogRecord& snapshot);
  bool failed() const { return failed_; }  // says whether append() takes no more
  // Removes the oldest archives until no more than `keep` are beside it, at least one. Returns how many are gone.
  Result<std::size_t> remove_archives(std::size_t keep) const;

 private:
  Log() = default;
  Result<Fd> write_next(const proto::LogRecord& snapshot, std::uint64_t& end) const;
  Result<> put_in_place();
  Result<> finish_compaction() const;
  Result<> lock(const Fd& file, const std::string& path) const;  // `refused`: another coordinator has it
  Result<> check_size(const proto::LogRecord& record) const;
  Result<> check_new() const;
  std::string next_path() const { return path_ + ".next"; }
  Result<> recover();
  bool in_its_place() const;
  std::optional<std::uint64_t> file_size() const;
  void remember_tail();
  bool tail_is_there() const;
  Result<> cut_to(std::optional<std::uint64_t> size);
  Result<> write(const Fd& file, BytesView bytes, std::uint64_t at) const;
  Result<> write_and_sync(const Fd& file, BytesView bytes, std::uint64_t at) const;
  Result<> sync(const Fd& file) const;
  void make_room(std::uint64_t at) const;
  void give_room_back() const;

  Fd file_, folder_;
  std::string path_;
  Disk disk_;
  std::uint64_t end_ = 0;  // where the last record ends; the mark behind it is written again
  Bytes tail_;             // what is just before end_ by what was written, or read when it was opened
  std::vector<proto::LogRecord> records_;
  std::uint64_t bytes_cut_ = 0;
  bool failed_ = false;
};

// Reads a log without opening it for writing, for the audit; its coordinator may be at work. Calls `take` with each
// record in order, those of the archives beside it first, as far as they are there. One file at a time is in memory.
// Returns what the newest file holds, without its records.
Result<ParsedLog> for_each_record(const std::string& path, const std::function<void(const proto::LogRecord&)>& take);
Result<std::vector<proto::LogRecord>> read_log(const std::string& path);

// What an operator gave up: steps that were committed, and are trained again.
struct RolledBack {
  std::uint64_t steps = 0, samples = 0;
  std::uint64_t before = 0;  // steps of these that a compacted log only counts, without their samples
};

// Takes a log's records in their order.
class TrainedSteps {
 public:
  // Knows so many of the last steps one by one: of a long job's log no more is needed than a ledger keeps, since the
  // job can't be rolled back further than that. What the steps before them trained stands under the last of these.
  explicit TrainedSteps(std::uint64_t kept = ~std::uint64_t{0}) : kept_(kept) {}
  void take(const proto::LogRecord& record);
  // Returns the samples that its commits trained, by step, without those of steps that were rolled back; audit() takes
  // them.
  const std::map<std::uint64_t, Batch>& by_step() const { return by_step_; }
  const RolledBack& rolled_back() const { return rolled_back_; }

 private:
  void begin_from(const proto::LogRecord::Snapshot& snapshot);
  void go_back(const proto::LogRecord::RolledBack& record);
  std::uint64_t samples() const;
  std::uint64_t kept_;
  std::map<std::uint64_t, Batch> by_step_;
  RolledBack rolled_back_;
};
RolledBack rolled_back(const std::vector<proto::LogRecord>& records);
std::map<std::uint64_t, Batch> trained_by_step(const std::vector<proto::LogRecord>& records);

}  // namespace rejoin::membership
