#include "bench/usage.h"

#include <fmt/format.h>
#include <linux/perf_event.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <optional>

namespace rejoin::bench {

namespace {

// The number of the kernel's tracepoint at the entry of every system call.
std::optional<std::uint64_t> tracepoint() {
  for (const char* where : {"/sys/kernel/tracing", "/sys/kernel/debug/tracing"}) {
    std::ifstream file(std::string(where) + "/events/raw_syscalls/sys_enter/id");
    std::uint64_t id = 0;
    if (file >> id) return id;
  }
  return std::nullopt;
}

}  // namespace

Used& Used::operator+=(const Used& other) {
  cpu_seconds += other.cpu_seconds;
  system_calls += other.system_calls;
  counted = counted && other.counted;
  return *this;
}

Usage::Usage(pid_t process) : process_(process), cpu_before_(cpu()) {
  const auto id = tracepoint();
  if (!id) {
    why_not_ = "no tracepoint raw_syscalls:sys_enter under /sys/kernel/tracing; mount tracefs there";
    return;
  }
  perf_event_attr what{};
  what.type = PERF_TYPE_TRACEPOINT;
  what.size = sizeof what;
  what.config = *id;
  what.inherit = 1;
  std::error_code gone;
  const std::string who = process == 0 ? "self" : std::to_string(process);
  for (const auto& thread : std::filesystem::directory_iterator("/proc/" + who + "/task", gone)) {
    const pid_t number = std::atoi(thread.path().filename().c_str());
    Fd counter(static_cast<int>(::syscall(SYS_perf_event_open, &what, number, -1, -1, PERF_FLAG_FD_CLOEXEC)));
    if (!counter && errno == ESRCH) continue;  // it has just ended
    if (!counter) {
      why_not_ = fmt::format("perf_event_open: {}; it needs CAP_PERFMON, or kernel.perf_event_paranoid at -1",
                             std::strerror(errno));
      counters_.clear();
      return;
    }
    counters_.push_back(std::move(counter));
  }
  if (counters_.empty()) why_not_ = fmt::format("process {} has ended", who);
  calls_before_ = calls();
}

// 0 where the process has gone.
double Usage::cpu() const {
  clockid_t clock{};
  timespec time{};
  if (::clock_getcpuclockid(process_, &clock) != 0 || ::clock_gettime(clock, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

std::uint64_t Usage::calls() const {
  std::uint64_t all = 0, count = 0;
  for (const auto& counter : counters_)
    if (::read(counter.get(), &count, sizeof count) == sizeof count) all += count;
  return all;
}

Used Usage::now() const {
  return {
      .cpu_seconds = cpu() - cpu_before_, .system_calls = calls() - calls_before_, .counted = counts_system_calls()};
}

}  // namespace rejoin::bench
