// rejoin_allreduce_perf's parts: what it is told, what one rank's process does, and what is said of it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bench/meeting.h"
#include "bench/memory_limit.h"
#include "ftar/communicator.h"

namespace rejoin::bench {

struct AllReduceSettings {
  std::uint64_t least = 8, most = 64 * MiB;
  double factor = 2;
  int iterations = 20, warmups = 5;
  std::string type = "float32", op = "sum", transport = "shm", json;
  std::uint32_t ranks = 2;
  bool check = true;
  bool limits = true;
  std::optional<int> cuda;  // on this device
  ftar::Options ftar;
  std::optional<std::uint64_t> direct;
  std::string coding = "off";
  std::vector<std::string> hosts;  // where each rank runs: network namespaces
};

// Operations come in turns, one after the other, with the measurements of the limit between them. Two figures of each:
// the mean over the turns, and the best turn. Only like is compared with like.
struct Times {
  double mean = 0, best = 0;  // seconds
};

struct Row {
  std::uint64_t bytes = 0;
  int operations = 0, turns = 0;
  Times times;  // of an operation, of the slowest rank; the best: over the operations of one turn
  std::uint64_t wrong = 0;
  std::optional<Times> limit;
  std::vector<Rate> rates;                                       // that it comes of, where it is the memory's
  std::size_t ring_chunk_bytes = 0;                              // of the ring of sockets that it comes of
  double cpu_seconds_per_gib = 0;                                // of all ranks together, of the buffer reduced
  std::optional<double> system_calls_per_operation;              // of one rank
  double bytes_sent_per_operation = 0, coded_per_operation = 0;  // chunks of one rank, as they travel
};

struct AllReduceResults {
  std::vector<Row> rows;
  std::string system_calls_not_counted;  // why; empty: they are
};

// The sizes that are measured.
std::vector<std::uint64_t> sizes_of(const AllReduceSettings& settings, std::size_t element);
// Whether the limit is a ring of sockets, not the memory's.
bool limited_by_sockets(const AllReduceSettings& settings);

// Starts all ranks as processes, this one among them.
Result<AllReduceResults> run_all_reduce(const AllReduceSettings& settings);

void print(const AllReduceSettings& settings, const AllReduceResults& results);
Result<> write_json(const AllReduceSettings& settings, const AllReduceResults& results);

}  // namespace rejoin::bench
