#include "daemon/log_copy.h"

#include <filesystem>

#include "base/fail.h"
#include "base/log.h"
#include "base/start_thread.h"

namespace rejoin::daemon {

namespace {
constexpr const char* kMendDisk =
    "Make room, or see to the disk, and start this coordinator again: the copy goes on from where it ends";
constexpr const char* kBeginAnew =
    "What counts is in the store: where this coordinator goes on with it, move what is there aside, or give another "
    "--log-directory, and start it again, which begins a new copy";
}  // namespace

Result<LogCopy::Handle> LogCopy::open(const std::string& directory, membership::Disk disk, Duration longest_end) {
  Handle copy(new LogCopy(directory), End{longest_end});
  std::error_code ignored;
  const bool there = std::filesystem::exists(directory + "/decisions.log", ignored);
  if (auto log = membership::Log::open(directory, std::move(disk))) {
    if (log->bytes_cut() > 0)
      spdlog::warn("copy of the decisions: a torn tail of {} bytes was cut off", log->bytes_cut());
    if (auto taken = copy->take(log->records()); !taken) return tl::unexpected(taken.error());
    log->forget_records();
    copy->size_ = log->size();
    copy->log_ = std::move(*log);
  } else if (log.error().code == ErrorCode::refused) {
    return tl::unexpected(log.error());
  } else {
    const auto legible = membership::legible_records(directory);
    if (!legible) copy->position_ = 1, copy->unread_ = legible.error().message;
    else if (auto taken = copy->take(*legible); !taken) return tl::unexpected(taken.error());
    copy->give_up(log.error(), true, there);
  }
  if (auto started = start_thread(copy->thread_, [one = copy.get()] { one->write(); }); !started)
    return tl::unexpected(started.error());
  return copy;
}

Result<> LogCopy::take(const std::vector<proto::LogRecord>& records) {
  if (records.empty()) return {};
  const auto& first = records.front();
  if (first.has_snapshot() && first.snapshot().position() == 0)
    return fail(
        ErrorCode::mismatch,
        "what is in {} was compacted by a coordinator that kept its decisions in a file alone, so that it can't "
        "be the copy of those in a store. To take that job into the store, give it that log with 'rejoin log "
        "import', and start with another --log-directory",
        directory_);
  position_ = membership::records_of_job(records);
  job_ = membership::job_of(first).id();
  empty_ = false;
  records_ = records;
  return {};
}

// What is not written counts all the same: it is in the store, and the copy gets it when it is opened again.
void LogCopy::End::operator()(LogCopy* copy) const {
  std::unique_lock lock(copy->mutex_);
  copy->ending_ = true;
  copy->wake_.notify_one();
  if (copy->thread_.joinable() && !copy->over_.wait_for(lock, longest, [&] { return copy->ended_; })) {
    spdlog::warn(
        "the copy of the decisions in {} is left without its end, which its disk has not written in {:.1f} s. It gets "
        "that when this coordinator is started again; see to the disk",
        copy->directory_, seconds(longest));
    copy->left_ = true;
    copy->thread_.detach();
    return;
  }
  lock.unlock();
  if (copy->thread_.joinable()) copy->thread_.join();
  delete copy;
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
          fmt::format("its disk is {} behind, over the limit of {}", human_bytes(behind_), human_bytes(kMostBehind)),
          kMendDisk);
    waiting_.push_back({std::move(records), how, bytes});
  }
  wake_.notify_one();
}

// The log's own words for what has become of its file are for a coordinator that has nothing else.
void LogCopy::give_up(const Error& error, bool at_start, bool there) {
  const auto file = directory_ + "/decisions.log";
  if (error.code == ErrorCode::corrupt && at_start)
    return give_up(fmt::format("{} is damaged, or none of this version ('rejoin audit {}' says where)", file, file),
                   kBeginAnew);
  if (error.code == ErrorCode::corrupt)
    return give_up(fmt::format("{} was cut, and nothing but its coordinator may write to it", file), kBeginAnew);
  if (error.code == ErrorCode::not_found && at_start)
    return give_up(fmt::format("{} {}, and archives of it are there", file, there ? "holds no decision" : "is gone"),
                   kBeginAnew);
  if (error.code == ErrorCode::not_found) return give_up(fmt::format("{} was removed or moved away", file), kBeginAnew);
  give_up(error.message, kMendDisk);
}

void LogCopy::give_up(const std::string& why, const char* remedy) {
  given_up_ = fmt::format("{}. {}", why, remedy);
  waiting_.clear();
  spdlog::warn("the copy of the decisions is given up, and the job goes on without it: {}", given_up_);
}

// What has come meanwhile goes to the disk together.
void LogCopy::write() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return ending_ || !waiting_.empty(); });
    if (waiting_.empty()) break;
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
    if (!written && given_up_.empty()) give_up(written.error(), false, true);
  }
  ended_ = true;
  over_.notify_one();
  if (!left_) return;
  lock.unlock();
  delete this;
}

// A log without a record has nothing that could stay beside it.
Result<> LogCopy::write(const std::vector<proto::LogRecord>& records, How how) {
  const bool empty = std::exchange(empty_, false);
  auto written = how != How::append && !empty ? log_->compact(records.front()) : log_->append(records);
  if (!written && how == How::compact && !log_->failed()) {
    spdlog::warn("the copy of the decisions is not compacted, and goes on growing: {}", written.error().message);
    written = {};
  }
  size_ = log_->size();
  if (written && how != How::append) remove_archives(*log_, archives_);
  return written;
}

void remove_archives(const membership::Log& log, std::uint32_t keep) {
  if (keep == 0) return;
  const auto gone = log.remove_archives(keep);
  if (!gone)
    spdlog::warn("more archives of the decision log are kept than --log-archives {}: {}", keep, gone.error().message);
  else if (*gone > 0) spdlog::info("archives of the decision log beyond the newest {} are removed: {}", keep, *gone);
}

}  // namespace rejoin::daemon
