// How tests set the software driver (fake_cuda.cc), and what it has counted.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>

namespace rejoin::device::fake {

// Called on a caller's thread as its call begins, and as one begins to wait for the device.
using Hook = void (*)(const char* call);
constexpr const char* kWaitsForDevice = "waits for the device";

struct Counters {
  std::atomic<std::uint64_t> refused{0};           // calls that may end in a deadlock
  std::atomic<std::uint64_t> waits_for_device{0};  // calls that have waited for all that is queued
  std::atomic<std::uint64_t> waits_for_flags{0};   // that streams were given
  std::atomic<int> streams{0}, high_streams{0};    // that are there; … of the higher priority
};

// What can be chosen in the environment as well: REJOIN_FAKE_CUDA="unordered slow_digest=4000".
struct Options {
  bool unordered = false;  // nothing orders a NIC's writes, nor flushes them
  bool ordered = false;    // the device orders them itself, as Hopper's do; else the driver flushes them
  bool no_flags = false;   // streams wait for no flags of 64 bits
  bool exclusive = false;  // compute mode EXCLUSIVE_PROCESS, and another process has the device
  bool no_launch = false;  // no kernel is launched any more
  bool full = false;       // nothing can be allocated any more
  unsigned multiprocessors = 132;
  bool dead = false;      // its context is: an illegal access, or an assertion of a kernel's
  bool blocking = false;  // a launch returns when its kernel has ended, as with CUDA_LAUNCH_BLOCKING=1
  // The first digest of a thread that hands nothing over, once any has, stands in the driver for so long.
  std::chrono::milliseconds slow_digest{0};
};

// The calls, by their names in the library. Each is null in a real one.
struct Control {
  Counters& (*counters)() = nullptr;
  void (*set_hook)(Hook) = nullptr;
  void (*count_only)(bool) = nullptr;             // refused calls don't end the program
  void (*set_options)(Options) = nullptr;         // instead of the environment's
  void (*set_dma_buf)(bool) = nullptr;            // whether the driver gives its memory out
  void (*hands_over)() = nullptr;                 // the calling thread is one of the trainer's
  void (*forget_kernels)() = nullptr;             // each kernel's next launch loads it
  void (*begin_capture)(void* stream) = nullptr;  // of a graph, in the default mode
  bool (*end_capture)(void* stream) = nullptr;    // false: somebody's call has spoilt it
  explicit Control(const char* library) {
    void* driver = ::dlopen(library, RTLD_NOW);
    if (driver == nullptr) throw std::runtime_error(::dlerror());
    const auto find = [&](auto& call, const char* name) {
      call = reinterpret_cast<std::decay_t<decltype(call)>>(::dlsym(driver, name));
    };
    find(counters, "fake_cuda_counters");
    find(set_hook, "fake_cuda_set_hook");
    find(count_only, "fake_cuda_count_only");
    find(set_options, "fake_cuda_set_options");
    find(set_dma_buf, "fake_cuda_set_dma_buf");
    find(hands_over, "fake_cuda_hands_over");
    find(forget_kernels, "fake_cuda_forget_kernels");
    find(begin_capture, "fake_cuda_begin_capture");
    find(end_capture, "fake_cuda_end_capture");
  }
};

}  // namespace rejoin::device::fake
