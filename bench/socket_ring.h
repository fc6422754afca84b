// An all-reduce over bare TCP sockets of the loopback: what the machine's sockets and additions cost where nothing else
// is done. It follows the same schedule as ours (ftar/schedule.h), so that whatever must wait there waits here: the
// reduce-scatter's chunks first, each sent on when it has arrived whole and been added to, then the all-gather's. Both
// ends know the order, so nothing but the buffer's bytes goes over the sockets, and a rank may be one operation ahead.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/types.h"
#include "bench/meeting.h"
#include "ftar/schedule.h"

namespace rejoin::bench {

// Connected TCP loopback sockets for a ring: pairs[i].first is of rank i, pairs[i].second of the next rank. Both ways
// are used.
Result<std::vector<std::pair<Fd, Fd>>> tcp_pairs(std::uint32_t count);

class SocketRing {
 public:
  // `pairs`: of tcp_pairs(), which outlive this. Between two ranks only one is used, as one connection would be: its
  // acknowledgements travel with what goes the other way.
  SocketRing(Meeting& meeting, std::uint32_t rank, std::uint32_t ranks, const std::vector<std::pair<Fd, Fd>>& pairs);

  struct Operation {
    DataType type = DataType::float32;
    std::uint32_t divisor = 0;  // as ftar::add()'s
    std::size_t chunk_bytes = 0;
    bool both_ways = true;
    std::span<const std::byte> input;
    std::span<std::byte> output;
  };
  // One all-reduce. Returns the bytes that were received.
  Result<std::uint64_t> all_reduce(const Operation& operation);

 private:
  void wait_for(std::size_t socket, std::size_t missing, bool last);
  Meeting& meeting_;
  const std::uint32_t rank_, ranks_;
  const int right_, left_;
  std::array<int, 2> low_water_{1, 1};  // of the right socket and the left one
  Mapping staging_;
};

// The same as a limit: the fastest of several chunk sizes, with the all-gather in one direction and in both.
class SocketLimit {
 public:
  SocketLimit(SocketRing& ring, std::uint32_t ranks, const SocketRing::Operation& operation, std::size_t chunk_bytes);
  // Measures each variant once more, as means over so many operations. Collective.
  Result<> turn(Meeting& meeting, std::uint32_t rank, int operations);
  double mean_seconds() const;      // of the fastest variant, over the turns
  double best_seconds() const;      // of the fastest turn of any variant
  std::size_t chunk_bytes() const;  // of the variant that is fastest in the mean

 private:
  struct Variant {
    SocketRing::Operation operation;
    std::vector<double> seconds;  // of each turn, of the slowest rank
    double mean() const;
  };
  const Variant& fastest() const;
  SocketRing& ring_;
  const std::uint32_t ranks_;
  std::vector<Variant> variants_;
};

}  // namespace rejoin::bench
