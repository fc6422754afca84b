// In place of device/kernels/ptx.h, where the CPU runs the kernels.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "base/arithmetic.h"

namespace rejoin::device::kernels::ptx {

inline std::uint64_t nanoseconds() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

inline float from_float16(std::uint16_t half) { return arithmetic::from_float16(half); }
inline std::uint16_t to_float16(float value) { return arithmetic::to_float16(value); }

inline std::uint64_t load(const std::uint64_t& from, std::memory_order order) {
  return std::atomic_ref(const_cast<std::uint64_t&>(from)).load(order);
}
inline std::uint64_t acquire_system(const std::uint64_t& from) { return load(from, std::memory_order_acquire); }
inline std::uint64_t acquire_device(const std::uint64_t& from) { return load(from, std::memory_order_acquire); }
inline std::uint64_t peek(const std::uint64_t& from) { return load(from, std::memory_order_relaxed); }

inline void release_system(std::uint64_t& to, std::uint64_t value) {
  std::atomic_ref(to).store(value, std::memory_order_release);
}
inline void release_device(std::uint64_t& to, std::uint64_t value) { release_system(to, value); }
inline void poke(std::uint64_t& to, std::uint64_t value) {
  std::atomic_ref(to).store(value, std::memory_order_relaxed);
}

inline std::uint64_t claim(std::uint64_t& from) {
  return std::atomic_ref(from).fetch_add(1, std::memory_order_relaxed);
}
inline std::uint64_t add(std::uint64_t& to, std::uint64_t more) {
  return std::atomic_ref(to).fetch_add(more, std::memory_order_acq_rel);
}
inline void accumulate(double& to, double more) { std::atomic_ref(to).fetch_add(more, std::memory_order_relaxed); }

}  // namespace rejoin::device::kernels::ptx
