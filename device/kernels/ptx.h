// What CUDA's language has no words for: the GPU's clock and conversions, and flags that others write meanwhile: the
// CPU ("system"), or other blocks ("device").
#pragma once

#include <cstdint>

namespace rejoin::device::kernels::ptx {

__device__ inline std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ inline float from_float16(std::uint16_t half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}
__device__ inline std::uint16_t to_float16(float value) {
  std::uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}

__device__ inline std::uint64_t acquire_system(const std::uint64_t& from) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(&from) : "memory");
  return value;
}

__device__ inline void release_system(std::uint64_t& to, std::uint64_t value) {
  asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(&to), "l"(value) : "memory");
}

__device__ inline std::uint64_t acquire_device(const std::uint64_t& from) {
  std::uint64_t value;
  asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(value) : "l"(&from) : "memory");
  return value;
}

__device__ inline void release_device(std::uint64_t& to, std::uint64_t value) {
  asm volatile("st.release.gpu.u64 [%0], %1;" ::"l"(&to), "l"(value) : "memory");
}

__device__ inline std::uint64_t peek(const std::uint64_t& from) {
  std::uint64_t value;
  asm volatile("ld.relaxed.gpu.u64 %0, [%1];" : "=l"(value) : "l"(&from) : "memory");
  return value;
}

__device__ inline void poke(std::uint64_t& to, std::uint64_t value) {
  asm volatile("st.relaxed.gpu.u64 [%0], %1;" ::"l"(&to), "l"(value) : "memory");
}

// What was there before. The first orders nothing.
__device__ inline std::uint64_t claim(std::uint64_t& from) {
  std::uint64_t value;
  asm volatile("atom.add.relaxed.gpu.u64 %0, [%1], 1;" : "=l"(value) : "l"(&from) : "memory");
  return value;
}

__device__ inline std::uint64_t add(std::uint64_t& to, std::uint64_t more) {
  std::uint64_t value;
  asm volatile("atom.add.acq_rel.gpu.u64 %0, [%1], %2;" : "=l"(value) : "l"(&to), "l"(more) : "memory");
  return value;
}

__device__ inline void accumulate(double& to, double more) {
  asm volatile("red.relaxed.gpu.add.f64 [%0], %1;" ::"l"(&to), "d"(more) : "memory");
}

}  // namespace rejoin::device::kernels::ptx
