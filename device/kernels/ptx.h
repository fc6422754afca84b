// What CUDA's language has no words for: the GPU's clock, and looks at memory that the CPU writes meanwhile.
#pragma once

#include <cstdint>

namespace rejoin::device::kernels::ptx {

__device__ inline std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ inline std::uint64_t acquire(const std::uint64_t& from) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(&from) : "memory");
  return value;
}

__device__ inline void release(std::uint64_t& to, std::uint64_t value) {
  asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(&to), "l"(value) : "memory");
}

}  // namespace rejoin::device::kernels::ptx
