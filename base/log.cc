#include "base/log.h"

#include <fcntl.h>
#include <poll.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"

namespace rejoin {

namespace {

class StandardError : public spdlog::sinks::base_sink<std::mutex> {
 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    (void)descriptor();  // which looks what it is
    const std::string priority = is_journal_ ? fmt::format("<{}>", priority_of(message.level)) : "";
    if (left_out_ > 0)
      fmt::format_to(std::back_inserter(line), "{}... {} lines were left out, since nobody read them\n", priority,
                     left_out_);
    line.append(priority);
    formatter_->format(message, line);
    // Whoever reads may be about to; and the last words of a process are worth waiting for.
    const int patience = message.level == spdlog::level::critical ? 1000 : left_out_ > 0 ? 0 : 10;  // ms
    if (!put(rest_, patience)) return ++left_out_, void();
    rest_.assign(line.data(), line.size());
    const bool begun = !put(rest_, patience) && rest_.size() < line.size();
    left_out_ = rest_.empty() || begun ? 0 : left_out_ + 1;
    if (!begun) rest_.clear();
  }
  void flush_() override {}

 private:
  // Where lines go now: a program may put another file in the place of its standard error. A pipe or a terminal takes
  // part of a line where it is opened anew, which does not change it for others.
  int descriptor() {
    struct stat now {};
    if (::fstat(STDERR_FILENO, &now) != 0) return STDERR_FILENO;
    if (now.st_dev != seen_.st_dev || now.st_ino != seen_.st_ino || now.st_rdev != seen_.st_rdev) {
      seen_ = now;
      is_journal_ = leads_to_journal();
      own_ = {};
      if (S_ISFIFO(now.st_mode) || S_ISCHR(now.st_mode))
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
  // As much of it as is taken.
  bool put(std::string& text, int patience) {
    const int to = descriptor();
    while (!text.empty()) {
      if (!has_room(to, std::chrono::milliseconds(patience))) return false;
      const ssize_t wrote = ::write(to, text.data(), std::min<std::size_t>(text.size(), PIPE_BUF));
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote <= 0) return false;
      text.erase(0, static_cast<std::size_t>(wrote));
    }
    return true;
  }

  bool is_journal_ = false;
  struct stat seen_ {};
  Fd own_;            // the same file, opened anew
  std::string rest_;  // of a line of which a part is out
  std::size_t left_out_ = 0;
};

}  // namespace

std::shared_ptr<spdlog::sinks::sink> standard_error() {
  auto its = std::make_shared<StandardError>();
  // As rejoin explain has times, whatever zone each machine of a job is in.
  its->set_formatter(std::make_unique<spdlog::pattern_formatter>("%Y-%m-%dT%H:%M:%S.%eZ %-5l [%n] %v",
                                                                 spdlog::pattern_time_type::utc));
  return its;
}

void init_logging(const std::string& who, const std::string& level) {
  open_standard_descriptors();
  auto its = std::make_shared<spdlog::logger>(who, standard_error());
  its->set_level(spdlog::level::from_str(level));
  spdlog::set_default_logger(std::move(its));
}

namespace {

std::atomic<spdlog::logger*> present_logger = nullptr;

}  // namespace

spdlog::logger& logger() {
  auto* const its = present_logger.load(std::memory_order_acquire);
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
