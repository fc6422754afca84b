// rejoin_allreduce_perf: all-reduce time and bandwidth over message sizes, in the manner of nccl-tests'
// all_reduce_perf. One command starts all ranks as processes of this machine.
#include <cstdio>

#include "base/command_line.h"
#include "base/log.h"
#include "bench/allreduce.h"
#include "bench/host.h"
#include "bench/results_file.h"

namespace rejoin::bench {
namespace {

int run(const AllReduceSettings& settings) {
  const auto writable = check_results(settings.json);
  const auto results = writable ? run_all_reduce(settings) : tl::unexpected(writable.error());
  if (!results) {
    std::fprintf(stderr, "rejoin_allreduce_perf: %s\n", results.error().message.c_str());
    return 1;
  }
  bool good = true;
  print(settings, *results);
  for (const auto& row : results->rows) good = good && row.wrong == 0;
  if (!settings.json.empty())
    if (auto written = write_json(settings, *results); !written) {
      std::fprintf(stderr, "rejoin_allreduce_perf: %s\n", written.error().message.c_str());
      return 1;
    }
  return good ? 0 : 1;
}

}  // namespace
}  // namespace rejoin::bench

int main(int argc, char** argv) {
  using namespace rejoin;
  bench::AllReduceSettings s;
  CommandLine line("All-reduce time and bandwidth; columns and options as in nccl-tests' all_reduce_perf.");
  line.add("-b,--minbytes", s.least, "smallest size, e.g. 8, 4K, 1M").sized().show_default();
  line.add("-e,--maxbytes", s.most, "largest size; each rank needs twice as much memory").sized().show_default();
  line.add("-f,--stepfactor", s.factor, "factor between sizes").real_range(1.01, 1e6).show_default();
  line.add("-n,--iters", s.iterations, "timed iterations (20 times as many up to 64 KiB)")
      .range(1, 1000000)
      .show_default();
  line.add("-w,--warmup_iters", s.warmups, "warm-up iterations").range(0, 1000000).show_default();
  line.add("-d,--datatype", s.type, "element type")
      .one_of({"float32", "float64", "bfloat16", "float16", "int32", "int64"})
      .show_default();
  line.add("-o,--op", s.op, "operation").one_of({"sum", "mean"}).show_default();
  line.add("-c,--check", s.check, "check every element").show_default();
  line.add("--ranks", s.ranks, "processes to start").range(1, 64).show_default();
  line.add("--transport", s.transport, "shm, tcp, tcp+aes or ucx:LIST").show_default();
  line.add("--chunk-bytes", s.ftar.chunk_bytes, "largest chunk").sized().show_default();
  line.add("--chunks-in-flight", s.ftar.chunks_in_flight, "chunks in flight per neighbour").show_default();
  line.add("--direct", s.direct, "largest size that skips the ring; else 32K, or 256K with --use_cuda").sized();
  line.add("--both-ways", s.ftar.both_ways, "all-gather in both directions").show_default();
  line.add("--pull", s.ftar.pull, "with shm, look into the other ranks' memory; else a ring").show_default();
  line.add("--coding", s.coding, "chunks of floats travel coded: by what is measured, or in so many bits")
      .one_of({"off", "auto", "8", "4"})
      .show_default();
  line.add("--coding-error", s.ftar.coding_error, "auto: 4 bits where they lose no more than this, otherwise 8")
      .show_default();
  line.add("--hosts", s.hosts,
           "network namespaces, one for each rank, which has the first address there that is none of "
           "loopback's; for tcp")
      .separated_by(',');
  line.add("--limits", s.limits, "measure this machine's limit beside").show_default();
  line.add("--use_cuda", s.cuda, "buffers in this CUDA device's memory, which all ranks share");
  line.add("--reduce-blocks", s.ftar.reducer.blocks, "… added by so many blocks").show_default();
  line.add("--reduce-threads", s.ftar.reducer.threads, "… of so many threads").show_default();
  line.add("--json", s.json, "write the results to this file");
  if (const auto status = line.parse(argc, argv)) return *status;
  if (s.least > s.most || s.least == 0) {
    std::fprintf(stderr, "rejoin_allreduce_perf: --minbytes %lu is not between 1 and --maxbytes %lu\n", s.least,
                 s.most);
    return 2;
  }
  auto fit = bench::check_hosts(s.hosts, s.ranks, "rank", s.transport);
  if (fit && !s.cuda) fit = bench::check_memory(2 * s.ranks, s.most);
  if (!fit) {
    std::fprintf(stderr, "rejoin_allreduce_perf: %s\n", fit.error().message.c_str());
    return 2;
  }
  s.ftar.coding = *ftar::coding_named(s.coding);
  if (s.cuda || !s.hosts.empty()) s.limits = false;  // they are the host's
  init_logging("allreduce_perf", "warn");
  return bench::run(s);
}
