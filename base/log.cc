#include "base/log.h"

#include <fcntl.h>
#include <poll.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/sink.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "base/log_file.h"
#include "base/no_cancel.h"
#include "base/no_signals.h"

namespace rejoin {

namespace {

// What all loggers of this process have in common. It lives as long as that.
class StandardError {
 public:
  // In a child of fork() another one than its parent's, whose locks others may have held, whose thread is not there,
  // and whose lines the parent writes.
  static StandardError& its() {
    auto* present = present_.load(std::memory_order_acquire);
    if (present != nullptr && present->process_ == ::getpid()) return *present;
    auto made = std::unique_ptr<StandardError>(new StandardError(present));
    return present_.compare_exchange_strong(present, made.get(), std::memory_order_acq_rel) ? *made.release()
                                                                                            : *present;
  }

  void say(const spdlog::details::log_msg& message) {
    const NoCancel no_cancel;
    std::unique_lock lock(mutex_);
    const bool last_words = message.level == spdlog::level::critical;
    (void)descriptor();  // which looks what it is
    const std::string head = is_journal_ ? fmt::format("<{}>", priority_of(message.level)) : "";
    spdlog::memory_buf_t line;
    line.append(head);
    formatter_.format(message, line);
    if (S_ISREG(seen_.stx_mode)) {
      const std::uint64_t device = std::uint64_t{seen_.stx_dev_major} << 32 | seen_.stx_dev_minor;
      const auto number = file_.put({line.data(), line.size()}, {STDERR_FILENO, device, seen_.stx_ino}, last_words);
      if (number) return lock.unlock(), file_.wait_for(*number, last_words);
    }  // where no thread is to be had it is written here
    // Whoever reads may be about to; and the last words of a process are worth waiting for.
    const int patience = last_words ? 1000 : lines_.left_out() > 0 ? 0 : 10;  // ms
    lines_.say({line.data(), line.size()}, head, "since nobody read them",
               [&](std::string& text) { return put(text, patience); });
  }
  void wait() {
    const NoCancel no_cancel;
    file_.wait_for_all();
  }

 private:
  explicit StandardError(StandardError* parents) : parents_(parents), process_(::getpid()) {}
  // Where lines go now: a program may put another file in the place of its standard error. A pipe or a terminal takes
  // part of a line where it is opened anew, which does not change it for others. What it is the kernel knows: a server
  // of NFS that is away is not asked.
  int descriptor() {
    struct statx now {};
    if (::statx(STDERR_FILENO, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE | STATX_INO, &now) != 0) {
      seen_ = {}, own_ = {}, is_journal_ = false;
      return STDERR_FILENO;
    }
    if (now.stx_mode != seen_.stx_mode || now.stx_ino != seen_.stx_ino || now.stx_dev_major != seen_.stx_dev_major ||
        now.stx_dev_minor != seen_.stx_dev_minor || now.stx_rdev_major != seen_.stx_rdev_major ||
        now.stx_rdev_minor != seen_.stx_rdev_minor) {
      seen_ = now;
      is_journal_ = leads_to_journal();
      own_ = {};
      if (S_ISFIFO(now.stx_mode) || S_ISCHR(now.stx_mode))
        own_ = Fd(::open("/proc/thread-self/fd/2", O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
    }
    return own_ ? own_.get() : STDERR_FILENO;
  }
  // What systemd starts has a socket that is connected with its journal.
  static bool leads_to_journal() {
    sockaddr_un to{};
    socklen_t size = sizeof to - 1;  // so that its path ends with a zero
    if (::getpeername(STDERR_FILENO, reinterpret_cast<sockaddr*>(&to), &size) != 0) return false;
    return to.sun_family == AF_UNIX && std::string_view(to.sun_path).ends_with("/systemd/journal/stdout");
  }
  // As the journal has them.
  static int priority_of(spdlog::level::level_enum level) {
    switch (level) {
      case spdlog::level::critical: return 2;
      case spdlog::level::err: return 3;
      case spdlog::level::warn: return 4;
      case spdlog::level::info: return 6;
      default: return 7;
    }
  }
  // Within so long, whatever signals come meanwhile.
  static bool has_room(int descriptor, Duration patience) {
    const SteadyClock clock;
    for (const TimePoint deadline = clock.now() + patience;;) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(std::max(Duration{}, deadline - clock.now()));
      pollfd may{descriptor, POLLOUT, 0};
      const int ready = ::poll(&may, 1, static_cast<int>(left.count()));
      if (ready >= 0 || errno != EINTR) return ready > 0;
    }
  }
  // As much of it as is taken. Where nobody reads a pipe any more, or the file may not grow, this is no signal for a
  // program's thread that happens to have something to say.
  bool put(std::string& text, int patience) {
    const int to = descriptor();
    const NoSignalsOfWriting none;
    while (!text.empty()) {
      if (!has_room(to, std::chrono::milliseconds(patience))) return false;
      const ssize_t wrote = ::write(to, text.data(), std::min<std::size_t>(text.size(), PIPE_BUF));
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote <= 0) return false;
      text.erase(0, static_cast<std::size_t>(wrote));
    }
    return true;
  }

  inline static std::atomic<StandardError*> present_ = nullptr;
  [[maybe_unused]] StandardError* const parents_;  // where this is a child
  const pid_t process_;
  std::mutex mutex_;  // guards all that follows, but for what file_ guards itself
  // As rejoin explain has times, whatever zone each machine of a job is in.
  spdlog::pattern_formatter formatter_{"%Y-%m-%dT%H:%M:%S.%eZ %-5l [%n] %v", spdlog::pattern_time_type::utc};
  bool is_journal_ = false;
  struct statx seen_ {};
  Fd own_;  // the same file, opened anew
  WholeLines lines_;
  LogFile file_;
};

// Its lines look as they do, whatever spdlog is told.
class Sink final : public spdlog::sinks::sink {
 public:
  void log(const spdlog::details::log_msg& message) override { StandardError::its().say(message); }
  void flush() override { wait_for_log(); }
  void set_pattern(const std::string&) override {}
  void set_formatter(std::unique_ptr<spdlog::formatter>) override {}
};

}  // namespace

void wait_for_log() { StandardError::its().wait(); }

std::shared_ptr<spdlog::sinks::sink> standard_error() {
  [[maybe_unused]] static const int once = std::atexit(wait_for_log);
  return std::make_shared<Sink>();
}

void init_logging(const std::string& who, const std::string& level) {
  open_standard_descriptors();
  auto its = std::make_shared<spdlog::logger>(who, standard_error());
  its->set_level(spdlog::level::from_str(level));
  spdlog::set_default_logger(std::move(its));
}

namespace {

std::atomic<spdlog::logger*> present_logger = nullptr;
std::atomic<void (*)()> at_need = nullptr;

}  // namespace

void set_logger_at_need(void (*set)()) { at_need = set; }

spdlog::logger& logger() {
  auto* its = present_logger.load(std::memory_order_acquire);
  if (auto* const set = its == nullptr ? at_need.load() : nullptr) {
    set();
    its = present_logger.load(std::memory_order_acquire);
  }
  return its != nullptr ? *its : *spdlog::default_logger_raw();
}

void set_logger(std::shared_ptr<spdlog::logger> its) {
  static std::mutex one_at_a_time;
  // Not given back before the library goes: while the process ends, threads may still have something to say.
  static std::vector<std::shared_ptr<spdlog::logger>>* kept = nullptr;
  const std::lock_guard lock(one_at_a_time);
  present_logger.store(its.get(), std::memory_order_release);
  if (its == nullptr) return delete std::exchange(kept, nullptr);
  if (kept == nullptr) kept = new std::vector<std::shared_ptr<spdlog::logger>>;
  kept->push_back(std::move(its));
}

}  // namespace rejoin
