// How fast this machine's memory moves the buffers of an all-reduce, and so what no all-reduce within it can beat.
//
// Of n ranks with S bytes each, every input has to be read once and every output to be written once: 2·n·S bytes,
// whatever the algorithm. (A rank that pulls reads all n inputs of its share, writes that share, and reads the others'
// shares into its output: (3n−1)·S bytes over all ranks. One that stages what it is sent moves more.) The rate is that
// of STREAM's copy and add over the very buffers of the ranks, so that caches count for the limit as they do for the
// result, by 1 to n processes at once, with plain and with streaming (non-temporal) stores: the best of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bench/meeting.h"

namespace rejoin::bench {

constexpr std::uint64_t least_bytes(std::uint64_t ranks, std::uint64_t bytes) { return 2 * ranks * bytes; }

enum class MemoryKernel : std::uint8_t { copy, copy_streaming, add, add_streaming };
inline constexpr std::array kMemoryKernels{MemoryKernel::copy, MemoryKernel::copy_streaming, MemoryKernel::add,
                                           MemoryKernel::add_streaming};
std::string_view to_string(MemoryKernel kernel);

// Fills `out` from `in`, of equal sizes, multiples of 128 bytes, at multiples of 64: a copy; or, of float32, each half
// of `in` plus the other half. Returns how many bytes it has read and written.
std::uint64_t run_kernel(MemoryKernel kernel, std::span<std::byte> out, std::span<const std::byte> in);

// A rate by one kernel and so many processes at once.
struct Rate {
  MemoryKernel kernel{};
  std::uint32_t processes = 1;
  double bytes = 0, seconds = 0;  // over all turns
  double best = 0;                // bytes/s, of one turn
  double mean() const { return bytes / seconds; }
};

class MemoryLimit {
 public:
  // Of ranks whose buffers these are; `out` is overwritten.
  MemoryLimit(std::uint32_t ranks, std::span<const std::byte> in, std::span<std::byte> out);
  // Measures each rate once more. False when another process has failed. Collective.
  bool turn(Meeting& meeting, std::uint32_t rank);
  // Seconds that the all-reduce takes at least, at the mean rate over the turns and at the best one of any turn.
  double mean_seconds() const;
  double best_seconds() const;
  const std::vector<Rate>& rates() const { return rates_; }

 private:
  const std::uint32_t ranks_;
  const std::span<const std::byte> in_;
  const std::span<std::byte> out_;
  std::vector<Rate> rates_;
};

}  // namespace rejoin::bench
