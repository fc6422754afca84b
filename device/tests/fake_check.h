// What the software driver (fake_cuda.cc) refuses and counts, and how tests set it.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <mutex>

#include "device/tests/fake_control.h"

namespace rejoin::device::fake {

// REJOIN_FAKE_CUDA, or what a test has set: words with blanks between them.
Options options();

// Flags that streams wait for.
struct Awaited {
  const std::uint64_t* flag = nullptr;
  std::uint64_t value = 0;
  bool written() const {
    const auto now = std::atomic_ref(*const_cast<std::uint64_t*>(flag)).load(std::memory_order_acquire);
    return static_cast<std::int64_t>(now - value) >= 0;
  }
};
inline std::mutex awaited_mutex;
inline std::list<Awaited>& awaited = *new std::list<Awaited>;
inline thread_local bool hands_over = false;  // this thread has let a stream wait for a flag

inline bool is_called(const char* name) {
  char its[16] = {};
  (void)::pthread_getname_np(::pthread_self(), its, sizeof its);
  return std::strcmp(its, name) == 0;
}
// The calling thread is a device::MemoryServer's or a SideThread: nobody waits for it who has to turn.
inline bool may_stand_still() { return is_called("rejoin-memory") || is_called("rejoin-audit"); }
// … or a KernelLauncher's, which looks whether its kernel has died.
inline bool may_look() { return is_called("rejoin-launch"); }

// Flags that streams have written, ever. Who has seen one, perhaps by another address of the same memory, sees all that
// its stream has done before: with his next call of the driver, TSan knows it, too.
inline std::atomic<std::uint64_t> flags_written{0};

inline std::atomic<bool> dead{false};  // Options::dead, for kernels that run
inline Counters& counters = *new Counters;
inline std::atomic<Hook> hook{nullptr};
inline std::atomic<bool> counts_only{false};  // what is refused

inline void refuse(const char* call, const char* when) {
  ++counters.refused;
  if (counts_only) return;
  std::fprintf(stderr, "fake CUDA driver: %s %s: a deadlock on a real one\n", call, when);
  std::abort();
}

inline bool a_stream_waits() {
  std::scoped_lock lock(awaited_mutex);
  for (const auto& wait : awaited)
    if (!wait.written()) return true;
  return false;
}

// Of a call that the driver may make wait for others.
inline void check(const char* call) {
  (void)flags_written.load(std::memory_order_acquire);
  if (const auto told = hook.load()) told(call);
  if (hands_over || may_stand_still() || !a_stream_waits()) return;
  refuse(call, "while a stream waits for a flag");
}

// Of a call that is about to wait for all that is queued on the device, for which others wait meanwhile: a stream may
// be given a flag to wait for at any time.
inline void check_wait() {
  ++counters.waits_for_device;
  if (const auto told = hook.load()) told(kWaitsForDevice);
  if (may_stand_still()) refuse("a wait for the device", "by a thread that serves memory or audits");
}

// A call that queues something: one at a time, the time that it waits for the device included.
inline std::mutex queueing;
class Queueing {
 public:
  explicit Queueing(const char* call) {
    check(call);
    held_.lock();
  }

 private:
  std::unique_lock<std::mutex> held_{queueing, std::defer_lock};
};

}  // namespace rejoin::device::fake
