// Stands in for two of the C library's functions, in libraries too: what a program exports comes first. Who waits for a
// time of the system's clock with a futex of his own, as gRPC's timers do through Abseil, waits for that of this one.
#include "daemon/tests/wall_clock.h"

#include <dlfcn.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>

namespace {

constexpr std::int64_t kSecond = 1'000'000'000, kSlice = 20'000'000;
std::atomic<std::int64_t> back_by = 0;  // ns

// The C library's own. Without a lock: what guards a static variable calls syscall() itself.
template <typename Function>
Function* next(std::atomic<Function*>& known, const char* name) {
  if (!known) known = reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
  return known;
}
using ClockGettime = int(clockid_t, timespec*);
using Syscall = long(long, ...);
std::atomic<ClockGettime*> next_clock_gettime = nullptr;
std::atomic<Syscall*> next_syscall = nullptr;

std::int64_t real_now() {
  timespec now{};
  next(next_clock_gettime, "clock_gettime")(CLOCK_REALTIME, &now);
  return now.tv_sec * kSecond + now.tv_nsec;
}

timespec timespec_of(std::int64_t ns) { return {.tv_sec = ns / kSecond, .tv_nsec = ns % kSecond}; }

// In short waits, since the clock may be set meanwhile.
long wait_until(std::int64_t until, std::array<long, 6> a) {
  for (;;) {
    const std::int64_t now = real_now(), left = until - (now - back_by);
    const timespec slice = timespec_of(now + std::clamp<std::int64_t>(left, 0, kSlice));
    a[3] = reinterpret_cast<long>(&slice);
    const long woken = next(next_syscall, "syscall")(SYS_futex, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (woken == 0 || errno != ETIMEDOUT || left <= kSlice) return woken;
  }
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const int result = next(next_clock_gettime, "clock_gettime")(clock, time);
  if (result == 0 && clock == CLOCK_REALTIME) *time = timespec_of(time->tv_sec * kSecond + time->tv_nsec - back_by);
  return result;
}

long syscall(long number, ...) noexcept {
  va_list list;
  va_start(list, number);
  std::array<long, 6> a{};
  for (long& each : a) each = va_arg(list, long);
  va_end(list);
  const auto* until = reinterpret_cast<const timespec*>(a[3]);
  if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) != 0 && until != nullptr)
    return wait_until(until->tv_sec * kSecond + until->tv_nsec, a);
  return next(next_syscall, "syscall")(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

}  // extern "C"

namespace rejoin::test {

ClockSetBack::ClockSetBack(std::chrono::seconds by) { back_by = by / std::chrono::nanoseconds(1); }
ClockSetBack::~ClockSetBack() { back_by = 0; }

}  // namespace rejoin::test
