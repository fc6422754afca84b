#include "base/log_file.h"

#include <fcntl.h>
#include <pthread.h>

#include <cerrno>
#include <utility>

#include "base/start_thread.h"

namespace rejoin {

LogFile::~LogFile() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

std::optional<std::uint64_t> LogFile::put(std::string line, const File& file, bool last_words) {
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable() && !start_thread(thread_, [this] { write(); })) return std::nullopt;
  if (bytes_ + line.size() > kMostWaiting && !last_words) return ++left_out_, handed_over_;
  // Not the descriptor itself, in whose place the program may put another file before the line is written. Who is
  // behind takes no descriptor for each line.
  std::shared_ptr<Fd> same;
  if (!waiting_.empty() && waiting_.back().of.device == file.device && waiting_.back().of.inode == file.inode)
    same = waiting_.back().file;
  else same = std::make_shared<Fd>(::fcntl(file.descriptor, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
  bytes_ += line.size();
  waiting_.push_back({std::move(line), file, std::move(same), std::exchange(left_out_, 0)});
  wake_.notify_one();
  return ++handed_over_;
}

void LogFile::wait_for(std::uint64_t number, bool last_words) {
  std::unique_lock lock(mutex_);
  if (late_ && !last_words) return;
  const Duration patience = last_words ? Duration(kLastPatience) : Duration(kPatience);
  if (!done_.wait_for(lock, patience, [&] { return written_ >= number; })) late_ = true;
}

void LogFile::wait_for_all() {
  std::unique_lock lock(mutex_);
  const std::uint64_t all = handed_over_;
  lock.unlock();
  wait_for(all, true);
}

void LogFile::write() {
  (void)::pthread_setname_np(::pthread_self(), "rejoin-log");  // for people
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return ending_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    Line next = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    const int to = *next.file ? next.file->get() : next.of.descriptor;  // where there was no other
    lines_.leave_out(next.left_out);
    lines_.say(next.text, "", "since their file did not take them", [&](std::string& text) { return write(text, to); });
    lock.lock();
    bytes_ -= next.text.size();
    ++written_;
    if (waiting_.empty()) late_ = false;
    lock.unlock();
    done_.notify_all();
    next.file.reset();  // which may wait for a server, too
    lock.lock();
  }
}

// SIGXFSZ is blocked, as in all threads of ours.
bool LogFile::write(std::string& text, int to) const {
  while (!text.empty()) {
    const ssize_t wrote = how_(to, text.data(), text.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return false;
    text.erase(0, static_cast<std::size_t>(wrote));
  }
  return true;
}

}  // namespace rejoin
