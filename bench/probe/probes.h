// What rejoin_gpu_probe asks a GPU's driver. All throw what has failed.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/clock.h"

namespace rejoin::bench {

struct Settings {
  int cuda = 0;
  Duration wait = std::chrono::milliseconds(1000);  // of a stream for its flag
  std::uint64_t bytes = 256 * MiB;                  // that a served state has
  unsigned blocks = 264;                            // of a trainer that fills the card
  bool json = false;
};

std::string name_of_gpu(const Settings& s);

// ---- which calls don't return

// What the trainer's thread does behind a stream that waits.
enum class Does { nothing, small_copy, large_copy, many_launches, events, frees, first_launch, synchronize };
inline const std::vector<std::pair<Does, const char*>> kDoes{
    {Does::nothing, "nothing"},
    {Does::small_copy, "4 bytes to pageable memory"},
    {Does::large_copy, "64 MiB to pageable memory"},
    {Does::many_launches, "5,000 works on it"},
    {Does::events, "200 × an event on it, a host function elsewhere"},
    {Does::frees, "a free"},
    {Does::first_launch, "a kernel's first launch"},
    {Does::synchronize, "waits for it"}};
inline const std::vector<const char*> kCalls{"event", "copy", "launch", "allocate", "pin"};

// Milliseconds that this call took another thread meanwhile.
double stands(const Settings& s, Does does, std::size_t call);

// ---- which streams stop

struct Queues {
  int connections = 0, streams = 0, waiting = 0;
};
inline const std::vector<Queues> kQueues{{1, 10, 2}, {2, 10, 2}, {8, 10, 2}, {8, 20, 5}, {8, 40, 8}, {32, 40, 8}};

// How many.
double stopped_streams(const Settings& s, const Queues& queues);

// ---- a served daemon beside a trainer

// Rates in GB/s: the trainer's alone, the daemon's alone, the trainer's and the daemon's beside each other.
std::vector<double> beside(const Settings& s);

}  // namespace rejoin::bench
