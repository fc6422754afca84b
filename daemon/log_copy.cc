#include "daemon/log_copy.h"

#include "base/fail.h"
#include "base/log.h"
#include "base/start_thread.h"

namespace rejoin::daemon {

LogCopy::LogCopy(membership::Log log) : log_(std::move(log)) {}

Result<std::unique_ptr<LogCopy>> LogCopy::open(const std::string& directory, membership::Disk disk) {
  auto log = membership::Log::open(directory, std::move(disk));
  if (!log) return tl::unexpected(log.error());
  if (log->bytes_cut() > 0)
    spdlog::warn("copy of the decisions: a torn tail of {} bytes was cut off", log->bytes_cut());
  std::unique_ptr<LogCopy> copy(new LogCopy(std::move(*log)));
  const auto& records = copy->log_.records();
  if (!records.empty()) {
    const auto& first = records.front();
    if (first.has_snapshot() && first.snapshot().position() == 0)
      return fail(ErrorCode::mismatch,
                  "{}/decisions.log was compacted by a coordinator that kept its decisions in a file alone, so that it "
                  "can't be the copy of those in a store. To take that job into the store, give it this log with "
                  "'rejoin log import', and start with another --log-directory",
                  directory);
    copy->position_ = membership::records_of_job(records);
    copy->job_ = membership::job_of(first).id();
    copy->empty_ = false;
    copy->records_ = records;
    copy->log_.forget_records();
  }
  copy->size_ = copy->log_.size();
  if (auto started = start_thread(copy->thread_, [one = copy.get()] { one->write(); }); !started)
    return tl::unexpected(started.error());
  return copy;
}

LogCopy::~LogCopy() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void LogCopy::begin_with(const proto::LogRecord& snapshot) { put({snapshot}, How::begin); }

void LogCopy::compact(const proto::LogRecord& snapshot) { put({snapshot}, How::compact); }

void LogCopy::add(const std::vector<proto::LogRecord>& records) {
  if (!records.empty()) put(records, How::append);
}

std::string LogCopy::given_up() const {
  const std::lock_guard lock(mutex_);
  return given_up_;
}

void LogCopy::put(std::vector<proto::LogRecord> records, How how) {
  std::uint64_t bytes = 0;
  for (const auto& record : records) bytes += record.ByteSizeLong();
  {
    const std::lock_guard lock(mutex_);
    if (!given_up_.empty()) return;
    behind_ += bytes;
    if (behind_ > kMostBehind)
      return give_up(
          fmt::format("its disk is {} behind, over the limit of {}", human_bytes(behind_), human_bytes(kMostBehind)));
    waiting_.push_back({std::move(records), how, bytes});
  }
  wake_.notify_one();
}

void LogCopy::give_up(const std::string& why) {
  given_up_ = why;
  waiting_.clear();
  spdlog::warn(
      "the copy of the decisions is given up, and the job goes on without it: {}. Make room, or see to the disk, and "
      "start this coordinator again: the copy goes on from where it ends",
      why);
}

// What has come meanwhile goes to the disk together.
void LogCopy::write() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return ending_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    Item next = std::move(waiting_.front());
    waiting_.pop_front();
    const auto appends = [](const Item& item) { return item.how == How::append; };
    for (; appends(next) && !waiting_.empty() && appends(waiting_.front()); waiting_.pop_front()) {
      auto& more = waiting_.front();
      next.bytes += more.bytes;
      std::move(more.records.begin(), more.records.end(), std::back_inserter(next.records));
    }
    lock.unlock();
    const auto written = write(next.records, next.how);
    lock.lock();
    behind_ -= next.bytes;
    if (!written && given_up_.empty()) give_up(written.error().message);
  }
}

// A log without a record has nothing that could stay beside it.
Result<> LogCopy::write(const std::vector<proto::LogRecord>& records, How how) {
  const bool empty = std::exchange(empty_, false);
  auto written = how != How::append && !empty ? log_.compact(records.front()) : log_.append(records);
  if (!written && how == How::compact && !log_.failed()) {
    spdlog::warn("the copy of the decisions is not compacted, and goes on growing: {}", written.error().message);
    written = {};
  }
  size_ = log_.size();
  return written;
}

}  // namespace rejoin::daemon
