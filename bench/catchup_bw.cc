// rejoin_catchup_bw: how fast a joiner's state arrives (checked, and verified against a source), beside the transport's
// own bulk rate for the same bytes in the same pattern. Every replica is a process of this machine.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <iostream>
#include <nlohmann/json.hpp>

#include "base/command_line.h"
#include "base/fail.h"
#include "base/log.h"
#include "bench/catchup_replica.h"
#include "bench/host.h"
#include "bench/results_file.h"

namespace rejoin::bench {
namespace {

// In one piece: several processes may have something to say.
void complain(const std::string& what) { std::cerr << "rejoin_catchup_bw: " + what + "\n"; }

int run(const CatchUpSettings& s) {
  const auto page = MeetingPage::make();
  if (!page) return complain(page.error().message), 1;
  Meeting& meeting = **page;
  std::vector<pid_t> children;
  for (std::uint32_t number = 1; number <= s.sources; ++number) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      auto done = run_replica(s, meeting, number);
      if (!done) meeting.failed.store(1), complain(fmt::format("source {}: {}", number, done.error().message));
      ::_exit(done ? 0 : 1);
    }
    children.push_back(pid);
  }
  auto measured = run_replica(s, meeting, 0);
  if (!measured) meeting.failed.store(1), complain("joiner: " + measured.error().message);
  for (auto pid : children) ::waitpid(pid, nullptr, 0);
  if (!measured) return 1;
  std::printf("# rejoin_catchup_bw: %s from %u sources, transport %s; every replica a process of this machine\n",
              human_bytes(s.bytes).c_str(), s.sources, s.transport.c_str());
  if (s.cuda) std::printf("# in the memory of CUDA device %d\n", *s.cuda);
  std::printf("# bulk: the same bytes written by the same sources in writes of the same size, nothing checked\n");
  const std::string& why_not = measured->front().calls_not_counted;
  std::printf(
      "# the last line: mean times of all runs, and ratios of means. cpu: seconds for each GiB; calls: "
      "system calls for each MiB%s%s\n",
      why_not.empty() ? "" : ": not countable here: ", why_not.c_str());
  std::printf("#%10s %14s %16s %16s %8s %8s %10s %11s %12s %13s\n", "run", "bulk (GB/s)", "arrived (GB/s)",
              "verified (GB/s)", "arrived", "verified", "joiner cpu", "sources cpu", "joiner calls", "sources calls");
  const double gib = static_cast<double>(s.bytes) / static_cast<double>(GiB);
  const auto rate = [&](double seconds_taken) { return static_cast<double>(s.bytes) / seconds_taken * 1e-9; };
  const auto calls = [&](double all) { return why_not.empty() ? fmt::format("{:.2f}", all / gib / 1024) : "n/a"; };
  const auto line = [&](const std::string& run, const CatchUpMeasured& m) {
    std::printf(" %10s %14.2f %16.2f %16.2f %8.2f %8.2f %10.3f %11.3f %12s %13s\n", run.c_str(), rate(m.bulk_seconds),
                rate(m.arrived_seconds), rate(m.verified_seconds), m.bulk_seconds / m.arrived_seconds,
                m.bulk_seconds / m.verified_seconds, m.joiner_cpu / gib, m.sources_cpu / gib,
                calls(m.joiner_calls).c_str(), calls(m.sources_calls).c_str());
  };
  nlohmann::json rows = nlohmann::json::array();
  CatchUpMeasured mean;
  for (const auto& m : *measured) {
    line(std::to_string(rows.size() + 1), m);
    for (const auto of :
         {&CatchUpMeasured::bulk_seconds, &CatchUpMeasured::arrived_seconds, &CatchUpMeasured::verified_seconds,
          &CatchUpMeasured::joiner_cpu, &CatchUpMeasured::sources_cpu, &CatchUpMeasured::joiner_calls,
          &CatchUpMeasured::sources_calls})
      mean.*of += m.*of / static_cast<double>(measured->size());
    rows.push_back({{"bulk_gbps", rate(m.bulk_seconds)},
                    {"arrived_gbps", rate(m.arrived_seconds)},
                    {"verified_gbps", rate(m.verified_seconds)},
                    {"shares", m.shares},
                    {"ratio", m.bulk_seconds / m.arrived_seconds},
                    {"joiner_cpu_seconds_per_gib", m.joiner_cpu / gib},
                    {"sources_cpu_seconds_per_gib", m.sources_cpu / gib}});
    if (why_not.empty())
      rows.back().update({{"joiner_system_calls_per_mib", m.joiner_calls / gib / 1024},
                          {"sources_system_calls_per_mib", m.sources_calls / gib / 1024}});
  }
  line("mean", mean);
  for (std::uint32_t i = 0; i < s.sources && s.sources > 1; ++i) {
    double share = 0;
    for (const auto& m : *measured) share += m.shares[i] / static_cast<double>(measured->size());
    std::printf("# source %u has sent %.1f %% of all bytes (mean)\n", i + 1, 100 * share);
  }
  const nlohmann::json json{{"bytes", s.bytes}, {"sources", s.sources}, {"transport", s.transport}, {"runs", rows}};
  const auto written = write_results(s.json, json.dump(2));
  if (!written) return complain(written.error().message), 1;
  return 0;
}

}  // namespace
}  // namespace rejoin::bench

int main(int argc, char** argv) {
  using namespace rejoin;
  bench::CatchUpSettings s;
  CommandLine line("Catch-up rate beside the transport's own bulk rate.");
  line.add("-s,--size", s.bytes, "state of the joiner, e.g. 1G").sized().show_default();
  line.add("--sources", s.sources, "replicas that serve it").range(1, 16).show_default();
  line.add("-n,--iters", s.repeats, "repetitions").range(1, 1000).show_default();
  line.add("--transport", s.transport, "shm, tcp, tcp+aes or ucx:LIST").show_default();
  line.add("--compression", s.compression_name, "of the stream: off, auto (zstd while it pays) or always")
      .show_default();
  line.add("--limit", s.limit, "each source sends at most this many MB/s; 0: no limit")
      .real_range(0, 1e9)
      .show_default();
  line.flag("--weights", s.real_data, "fill the state with values like a trained model's, not with a constant");
  line.add("--use_cuda", s.cuda, "states in this CUDA device's memory, which all replicas share");
  line.add(
          "--hosts", s.hosts,
          "network namespaces, one for each replica, the joiner's first; each has the first IPv4 address there that is "
          "none of loopback's; for tcp")
      .separated_by(',');
  line.add("--json", s.json, "write the results to this file");
  if (const auto status = line.parse(argc, argv)) return *status;
  s.limit *= 1e6;
  auto compression = catchup::parse_compression(s.compression_name);
  if (!compression) return bench::complain(compression.error().message), 2;
  s.compression = *compression;
  if (auto fit = bench::check_hosts(s.hosts, s.sources + 1, "replica, the joiner first", s.transport); !fit)
    return bench::complain(fit.error().message), 2;
  if (auto fit = s.cuda ? Result<>{} : bench::check_memory(s.sources + 1, s.bytes); !fit)
    return bench::complain(fit.error().message), 2;
  if (s.bytes < 1024) return bench::complain("--size must be at least 1 KiB"), 2;
  if (auto writable = bench::check_results(s.json); !writable) return bench::complain(writable.error().message), 1;
  init_logging("catchup_bw", "warn");
  return bench::run(s);
}
