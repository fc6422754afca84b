#include "bench/memory_limit.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/streamed_copy.h"
#include "ftar/reduce.h"

namespace rejoin::bench {

namespace {

// A plain copy goes by blocks: of more than a part of the cache, libc's would be a streaming one.
constexpr std::size_t kBlock = 64 * KiB;
// Of small buffers one measurement takes so many bytes.
constexpr std::size_t kLeast = 4 * MiB;

void copy_streaming_16(std::byte* out, const std::byte* in, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 32) store_streamed(out + i, load_lanes(in + i), load_lanes(in + i + 16));
}

void add_streaming_16(std::byte* out, const std::byte* a, const std::byte* b, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 32)
    store_streamed(out + i, load_lanes(a + i) + load_lanes(b + i), load_lanes(a + i + 16) + load_lanes(b + i + 16));
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] void copy_streaming_32(std::byte* out, const std::byte* in, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 64) {
    const auto first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
    const auto second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i), first);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i + 32), second);
  }
}

[[gnu::target("avx2")]] void add_streaming_32(std::byte* out, const std::byte* a, const std::byte* b,
                                              std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 64)
    for (const std::size_t j : {i, i + 32})
      _mm256_stream_ps(reinterpret_cast<float*>(out + j),
                       _mm256_add_ps(_mm256_loadu_ps(reinterpret_cast<const float*>(a + j)),
                                     _mm256_loadu_ps(reinterpret_cast<const float*>(b + j))));
}

const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
const auto copy_streaming = has_avx2 ? copy_streaming_32 : copy_streaming_16;
const auto add_streaming = has_avx2 ? add_streaming_32 : add_streaming_16;
#else
constexpr auto copy_streaming = copy_streaming_16;
constexpr auto add_streaming = add_streaming_16;
#endif

// 1, 2, 4, … of them, all of them, and as many as there are cores.
std::vector<std::uint32_t> crowds(std::uint32_t ranks) {
  std::vector<std::uint32_t> all{ranks, std::min(ranks, cores())};
  for (std::uint32_t some = 1; some < ranks; some *= 2) all.push_back(some);
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

std::string_view to_string(MemoryKernel kernel) {
  switch (kernel) {
    case MemoryKernel::copy: return "copy";
    case MemoryKernel::copy_streaming: return "copy with non-temporal stores";
    case MemoryKernel::add: return "add";
    case MemoryKernel::add_streaming: return "add with non-temporal stores";
  }
  return "";
}

std::uint64_t run_kernel(MemoryKernel kernel, std::span<std::byte> out, std::span<const std::byte> in) {
  const std::size_t half = in.size() / 2;
  switch (kernel) {
    case MemoryKernel::copy:
      for (std::size_t at = 0; at < in.size(); at += kBlock)
        std::memcpy(out.data() + at, in.data() + at, std::min(kBlock, in.size() - at));
      return 2 * in.size();
    case MemoryKernel::copy_streaming:
      copy_streaming(out.data(), in.data(), in.size());
      order_streamed();
      return 2 * in.size();
    case MemoryKernel::add:
      ftar::add(DataType::float32, out.data(), in.data(), in.data() + half, half / 4);
      ftar::add(DataType::float32, out.data() + half, in.data() + half, in.data(), half / 4);
      return 3 * in.size();
    case MemoryKernel::add_streaming:
      add_streaming(out.data(), in.data(), in.data() + half, half);
      add_streaming(out.data() + half, in.data() + half, in.data(), half);
      order_streamed();
      return 3 * in.size();
  }
  return 0;
}

MemoryLimit::MemoryLimit(std::uint32_t ranks, std::span<const std::byte> in, std::span<std::byte> out)
    : ranks_(ranks), in_(in.first(in.size() / 128 * 128)), out_(out.first(in_.size())) {
  for (const auto processes : crowds(ranks))
    for (const auto kernel : kMemoryKernels) rates_.push_back({.kernel = kernel, .processes = processes});
}

bool MemoryLimit::turn(Meeting& meeting, std::uint32_t rank) {
  for (auto& rate : rates_) {
    if (!meet(meeting, ranks_)) return false;
    std::uint64_t moved = 0;
    const double begun = now();
    if (rank < rate.processes)
      for (std::size_t done = 0; done < std::max(kLeast, in_.size()); done += in_.size())
        moved += run_kernel(rate.kernel, out_, in_);
    const double ended = now();
    const auto bytes = gather(meeting, rank, ranks_, static_cast<double>(moved));
    const auto begins = gather(meeting, rank, ranks_, begun), ends = gather(meeting, rank, ranks_, ended);
    if (bytes.empty() || begins.empty() || ends.empty()) return false;
    double all = 0;
    for (const double each : bytes) all += each;
    const double took = *std::max_element(ends.begin(), ends.begin() + rate.processes) -
                        *std::min_element(begins.begin(), begins.begin() + rate.processes);
    rate.bytes += all, rate.seconds += took;
    rate.best = std::max(rate.best, all / took);
  }
  return true;
}

double MemoryLimit::mean_seconds() const {
  double fastest = 0;
  for (const auto& rate : rates_) fastest = std::max(fastest, rate.mean());
  return static_cast<double>(least_bytes(ranks_, in_.size())) / fastest;
}

double MemoryLimit::best_seconds() const {
  double fastest = 0;
  for (const auto& rate : rates_) fastest = std::max(fastest, rate.best);
  return static_cast<double>(least_bytes(ranks_, in_.size())) / fastest;
}

}  // namespace rejoin::bench
