// What this machine can do at best, measured by the benchmarks beside their own results.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/fd.h"

namespace rejoin::bench {

// Shared by the processes of one benchmark: mapped before they fork.
struct Meeting {
  std::atomic<std::uint32_t> arrived, round;
  std::atomic<std::uint32_t> failed;
  char addresses[64][2048];
  std::atomic<std::uint32_t> wrong;
  std::atomic<double> seconds[64];
};

// All `count` processes meet; false when one of them has failed.
bool meet(Meeting& meeting, std::uint32_t count);

// Seconds of one float32 sum of `floats` elements by `count` processes through shared memory, done simply: each copies
// its private input into its part of `shared` (count + 1 times the buffer), adds its share of all parts, copies the
// result out. Collective.
double shared_memory_all_reduce(Meeting& meeting, std::uint32_t rank, std::uint32_t count, std::span<std::byte> shared,
                                std::span<const float> input, std::span<float> output);

// Seconds for every process to send `bytes` to the next and receive as much from the one before over plain loopback
// sockets: `to` and `from` are connected. Collective.
double socket_ring(Meeting& meeting, std::uint32_t count, int to, int from, std::span<const std::byte> source,
                   std::span<std::byte> target, std::size_t bytes);

// Connected TCP loopback sockets for a ring: pairs[i].first sends to pairs[i].second.
Result<std::vector<std::pair<Fd, Fd>>> tcp_pairs(std::uint32_t count);

}  // namespace rejoin::bench
