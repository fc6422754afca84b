#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/fail.h"
#include "bench/allreduce.h"
#include "bench/results_file.h"
#include "ftar/reduce.h"

namespace rejoin::bench {

namespace {

double gigabytes(double bytes_per_second) { return bytes_per_second * 1e-9; }

std::string limit_of(const AllReduceSettings& s) {
  if (limited_by_sockets(s))
    return std::string("a ring of bare loopback sockets with the same schedule and additions: a program, no law") +
           (s.transport == "tcp" ? "" : ", not encrypted");
  return fmt::format(
      "2·{0}·size bytes (each input is read once, each output written once; ranks that pull move {1}·size, {2:.2f} "
      "times as much) at the memory's best rate for these buffers: STREAM's copy and add, plain and non-temporal "
      "stores, by 1 to {0} processes at once",
      s.ranks, 3 * s.ranks - 1, (3.0 * s.ranks - 1) / (2 * s.ranks));
}

const Rate& fastest(const std::vector<Rate>& rates) {
  return *std::max_element(rates.begin(), rates.end(),
                           [](const Rate& a, const Rate& b) { return a.mean() < b.mean(); });
}

}  // namespace

void print(const AllReduceSettings& s, const AllReduceResults& results) {
  std::printf(
      "# rejoin_allreduce_perf: %u ranks as processes of this machine, transport %s, %s %s, %d iterations, %d "
      "warm-ups\n",
      s.ranks, s.transport.c_str(), s.type.c_str(), s.op.c_str(), s.iterations, s.warmups);
  std::printf("# chunks of at most %s, %u in flight; vector instructions: %s\n",
              human_bytes(s.ftar.chunk_bytes).c_str(), s.ftar.chunks_in_flight,
              std::string(ftar::instruction_set()).c_str());
  if (s.coding != "off")
    std::printf(
        "# coding %s: chunks of floats travel with a bounded error, by which #wrong counts; see docs/design-notes.md\n",
        s.coding.c_str());
  if (s.cuda)
    std::printf("# in the memory of CUDA device %d, added by %u blocks of %u threads\n", *s.cuda, s.ftar.reducer.blocks,
                s.ftar.reducer.threads);
  else if (s.limits) std::printf("# limit: %s\n", limit_of(s).c_str());
  std::printf(
      "# in turns, with the limit's measurements between them. time, limit and ratio: the mean over all turns, of the "
      "slowest rank. best, its limit and its ratio: the best turn's mean\n");
  std::printf(
      "# cpu: seconds of all ranks for each GiB reduced. calls: system calls of a rank for each operation%s%s\n",
      results.system_calls_not_counted.empty() ? "" : ": not countable here: ",
      results.system_calls_not_counted.c_str());
  std::printf("#%12s %12s %9s %6s %11s %8s %8s %7s %11s %7s %11s %11s %7s %8s %8s\n", "size", "count", "type", "redop",
              "time", "algbw", "busbw", "#wrong", "limit", "ratio", "best", "its limit", "ratio", "cpu", "calls");
  std::printf("#%12s %12s %9s %6s %11s %8s %8s %7s %11s %7s %11s %11s %7s %8s %8s\n", "(B)", "(elements)", "", "",
              "(us)", "(GB/s)", "(GB/s)", "", "(us)", "", "(us)", "(us)", "", "(s/GiB)", "");
  for (const auto& row : results.rows) {
    const double algbw = gigabytes(static_cast<double>(row.bytes) / row.times.mean);
    std::printf(" %12lu %12lu %9s %6s %11.2f %8.3f %8.3f %7s", row.bytes, row.bytes / size_of(*data_type_named(s.type)),
                s.type.c_str(), s.op.c_str(), row.times.mean * 1e6, algbw, algbw * 2 * (s.ranks - 1) / s.ranks,
                s.check ? std::to_string(row.wrong).c_str() : "n/a");
    const auto beside = [&](double time, double limit) {
      return row.limit ? fmt::format("{:11.2f} {:7.2f}", limit * 1e6, time / limit)
                       : fmt::format("{:>11} {:>7}", "-", "-");
    };
    const Times limit = row.limit.value_or(Times{});
    std::printf(
        " %s %11.2f %s %8.3f %8s\n", beside(row.times.mean, limit.mean).c_str(), row.times.best * 1e6,
        beside(row.times.best, limit.best).c_str(), row.cpu_seconds_per_gib,
        row.system_calls_per_operation ? fmt::format("{:.1f}", *row.system_calls_per_operation).c_str() : "n/a");
  }
  for (const auto& row : results.rows)
    if (s.coding != "off")
      std::printf("# sent, %s: %.0f bytes of chunks a rank and operation, %.1f chunks coded\n",
                  human_bytes(row.bytes).c_str(), row.bytes_sent_per_operation, row.coded_per_operation);
  for (const auto& row : results.rows)
    if (!row.rates.empty()) {
      const Rate& rate = fastest(row.rates);
      std::printf("# memory, %s: %.1f GB/s in the mean: %s by %u at once\n", human_bytes(row.bytes).c_str(),
                  gigabytes(rate.mean()), std::string(to_string(rate.kernel)).c_str(), rate.processes);
    } else if (row.limit) {
      std::printf("# sockets, %s: fastest with chunks of %s\n", human_bytes(row.bytes).c_str(),
                  human_bytes(row.ring_chunk_bytes).c_str());
    }
}

Result<> write_json(const AllReduceSettings& s, const AllReduceResults& results) {
  nlohmann::json json{
      {"ranks", s.ranks}, {"transport", s.transport}, {"type", s.type}, {"op", s.op}, {"coding", s.coding}};
  if (s.limits) json["limit"] = limit_of(s);
  if (!results.system_calls_not_counted.empty()) json["system_calls_not_counted"] = results.system_calls_not_counted;
  for (const auto& row : results.rows) {
    const Times limit = row.limit.value_or(Times{});
    auto& out =
        json["rows"].emplace_back(nlohmann::json{{"bytes", row.bytes},
                                                 {"turns", row.turns},
                                                 {"operations_per_turn", row.operations},
                                                 {"seconds", row.times.mean},
                                                 {"best_seconds", row.times.best},
                                                 {"wrong", row.wrong},
                                                 {"limit_seconds", limit.mean},
                                                 {"limit_best_seconds", limit.best},
                                                 {"ratio", row.limit ? row.times.mean / limit.mean : 0},
                                                 {"ratio_best", row.limit ? row.times.best / limit.best : 0},
                                                 {"cpu_seconds_per_gib", row.cpu_seconds_per_gib},
                                                 {"chunk_bytes_sent_per_operation", row.bytes_sent_per_operation},
                                                 {"coded_chunks_per_operation", row.coded_per_operation},
                                                 {"system_calls_per_operation", nullptr}});
    if (row.system_calls_per_operation) out["system_calls_per_operation"] = *row.system_calls_per_operation;
    for (const auto& rate : row.rates)
      out["memory"].push_back({{"what", to_string(rate.kernel)},
                               {"processes", rate.processes},
                               {"gbps", gigabytes(rate.mean())},
                               {"best_gbps", gigabytes(rate.best)}});
  }
  return write_results(s.json, json.dump(2));
}

}  // namespace rejoin::bench
