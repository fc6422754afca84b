// As much of CUDA's language as kernels.cu uses, for the CPU: a thread for each of a block's, blocks one after the
// other. A warp's threads meet to shuffle. Under TSan a barrier that the kernels lack is a race.
#pragma once

#include <algorithm>
#include <array>
#include <barrier>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct uint4 {
  std::uint32_t x, y, z, w;
};
inline uint4 make_uint4(std::uint32_t x, std::uint32_t y, std::uint32_t z, std::uint32_t w) { return {x, y, z, w}; }
struct ulonglong2 {
  std::uint64_t x, y;
};
struct Dimension {
  unsigned x = 0;
};
inline thread_local Dimension threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_language {

constexpr unsigned kWarp = 32;
struct Warp {
  std::barrier<> meeting{kWarp};
  std::array<std::uint64_t, kWarp> shuffled{};
};
struct Block {
  std::vector<Warp> warps;
  explicit Block(unsigned threads) : warps(threads / kWarp) {}
};
inline thread_local Block* block = nullptr;

// Runs the kernel; `threads` is a multiple of a warp's.
template <typename Arguments>
void launch(void (*kernel)(Arguments), unsigned blocks, unsigned threads, const Arguments& arguments) {
  for (unsigned b = 0; b < blocks; ++b) {
    Block here(threads);
    std::vector<std::jthread> running;
    for (unsigned t = 0; t < threads; ++t)
      running.emplace_back([&, t] {
        block = &here;
        threadIdx.x = t, blockIdx.x = b, blockDim.x = threads, gridDim.x = blocks;
        kernel(arguments);
      });
  }
}

}  // namespace cuda_language

inline cuda_language::Warp& this_warp() { return cuda_language::block->warps[threadIdx.x / cuda_language::kWarp]; }
inline void __syncwarp() { this_warp().meeting.arrive_and_wait(); }
inline void __nanosleep(unsigned) { std::this_thread::yield(); }
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
// What the warp's lanes bring, as `take` makes of it what each gets.
template <typename Take>
auto exchanged(std::uint64_t value, Take take) {
  auto& warp = this_warp();
  const unsigned lane = threadIdx.x % cuda_language::kWarp;
  warp.shuffled[lane] = value;
  warp.meeting.arrive_and_wait();
  const auto got = take(warp.shuffled, lane);
  warp.meeting.arrive_and_wait();
  return got;
}
template <typename T>
void __stcg(T* to, T value) {
  *to = value;
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, unsigned mask) {
  return exchanged(value, [&](const auto& all, unsigned lane) { return static_cast<T>(all[lane ^ mask]); });
}
inline std::uint64_t __shfl_sync(unsigned, std::uint64_t value, unsigned from) {
  return exchanged(value, [&](const auto& all, unsigned) { return all[from]; });
}
inline std::uint32_t __reduce_min_sync(unsigned, std::uint32_t value) {
  return exchanged(value, [&](const auto& all, unsigned) {
    return static_cast<std::uint32_t>(*std::min_element(all.begin(), all.end()));
  });
}
inline std::uint32_t __reduce_max_sync(unsigned, std::uint32_t value) {
  return exchanged(value, [&](const auto& all, unsigned) {
    return static_cast<std::uint32_t>(*std::max_element(all.begin(), all.end()));
  });
}
