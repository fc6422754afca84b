// The copy that one of several coordinators keeps, on its own disk, of the decisions in their store: for `rejoin
// audit`, and for `rejoin log import` where the store's data is lost. It is a decision log like that of a single
// coordinator (membership/log.h), and nobody's decisions wait for it: a thread of its own writes it, and where that
// fails, or falls too far behind, or where it can't be opened, the copy is given up, and goes on when the coordinator
// is started again. What can be read of it counts all the same: the store can't have less.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "membership/log.h"

namespace rejoin::daemon {

// All but the newest `keep` of the archives beside a log; 0: none. Where they can't be removed the log says so.
void remove_archives(const membership::Log& log, std::uint32_t keep);

class LogCopy {
 public:
  static constexpr std::uint64_t kMostBehind = 64 * MiB;
  static constexpr Duration kLongestEnd = std::chrono::seconds(10);
  // When everything is written, or given up; where the disk stands still it is left to itself after so long.
  struct End {
    Duration longest = kLongestEnd;
    void operator()(LogCopy* copy) const;
  };
  using Handle = std::unique_ptr<LogCopy, End>;
  // Errors: another process has it open (`refused`), or it does not say how many records of its job it stands for
  // (`mismatch`).
  static Result<Handle> open(const std::string& directory, membership::Disk disk = membership::Disk::real(),
                             Duration longest_end = kLongestEnd);
  // What was in it when it was opened: records, counted from the beginning of the job, and the job's id; 0: nothing.
  // Where none can be read of those that are there, it is one, of an unknown job.
  std::uint64_t position() const { return position_; }
  const std::string& unread() const { return unread_; }  // why not even its first record could be read; else empty
  std::uint64_t job() const { return job_; }
  std::vector<proto::LogRecord> take_records() { return std::exchange(records_, {}); }

  void begin_with(const proto::LogRecord& snapshot);  // in place of all before it, which stays beside it
  // All that is in it, in one record: takes its place where the disk lets it, which otherwise keeps what there is.
  void compact(const proto::LogRecord& snapshot);
  void add(const std::vector<proto::LogRecord>& records);
  void keep_archives(std::uint32_t newest) { archives_ = newest; }  // from the next compaction on; 0: all
  std::uint64_t size() const { return size_; }                      // bytes of the file that is written to
  // Why it is given up, and what to do; empty: it is not. The same is logged, once.
  std::string given_up() const;

 private:
  explicit LogCopy(std::string directory) : directory_(std::move(directory)) {}
  ~LogCopy() = default;
  Result<> take(const std::vector<proto::LogRecord>& records);
  enum class How : std::uint8_t { append, begin, compact };
  void put(std::vector<proto::LogRecord> records, How how);
  void write();
  Result<> write(const std::vector<proto::LogRecord>& records, How how);
  // `there`: the file was. mutex_ is held.
  void give_up(const Error& error, bool at_start, bool there);
  void give_up(const std::string& why, const char* remedy);

  struct Item {
    std::vector<proto::LogRecord> records;
    How how = How::append;  // otherwise it is one snapshot
    std::uint64_t bytes = 0;
  };
  const std::string directory_;
  std::optional<membership::Log> log_;  // the thread's
  bool empty_ = true;                   // … likewise
  std::string unread_;
  std::uint64_t position_ = 0, job_ = 0;
  std::vector<proto::LogRecord> records_;  // that were in it, until they are taken
  std::atomic<std::uint64_t> size_ = 0;
  std::atomic<std::uint32_t> archives_ = 0;
  // Keeps what is not written yet, why no more is, that it is to end, has ended, and is nobody's any more.
  mutable std::mutex mutex_;
  std::condition_variable wake_, over_;
  std::deque<Item> waiting_;
  std::uint64_t behind_ = 0;  // bytes, those that are being written included
  std::string given_up_;
  bool ending_ = false, ended_ = false, left_ = false;
  std::thread thread_;
};

}  // namespace rejoin::daemon
