// In place of device/kernels/ptx.h, where the CPU runs the kernels.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace rejoin::device::kernels::ptx {

inline std::uint64_t nanoseconds() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}
inline std::uint64_t acquire(const std::uint64_t& from) {
  return std::atomic_ref(const_cast<std::uint64_t&>(from)).load(std::memory_order_acquire);
}
inline void release(std::uint64_t& to, std::uint64_t value) {
  std::atomic_ref(to).store(value, std::memory_order_release);
}

}  // namespace rejoin::device::kernels::ptx
