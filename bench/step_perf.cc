// rejoin_step_perf: what a training step costs through the session beyond the bare all-reduce, named part by part. The
// job is real: coordinator, daemons and trainers are processes of this machine.
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/command_line.h"
#include "base/fail.h"
#include "base/log.h"
#include "bench/allreduce.h"
#include "bench/job.h"
#include "bench/job_times.h"
#include "bench/results_file.h"
#include "bench/usage.h"
#include "bench/wake_up.h"

namespace rejoin::bench {
namespace {

struct StepSettings {
  std::vector<std::uint64_t> sizes{4 * KiB, 64 * KiB, 64 * MiB};
  std::vector<std::uint32_t> replicas{2, 3};
  int iterations = 300, warmups = 50;
  std::uint64_t silence_ms = 2000;
  std::string transport = "shm", python, json;
  std::optional<int> cuda;
};

// Of one process, for each step.
struct Cost {
  std::string who;
  double cpu_us = 0, system_calls = 0;
  bool counted = true;
};

struct StepRow {
  std::uint64_t bytes = 0;
  std::uint32_t replicas = 0;
  double bare_us = 0;
  std::size_t steps = 0;
  std::array<Distribution, kParts.size()> parts;
  Distribution whole;
  std::vector<Cost> costs;
  std::string calls_not_counted;
};

// Microseconds, on average, of a bare all-reduce. By a process of its own: one that has used a GPU can't be forked to
// others that are to, as this one will be to trainers.
Result<double> bare_us(const StepSettings& s, std::uint64_t bytes, std::uint32_t replicas) {
  AllReduceSettings bare;
  bare.least = bare.most = bytes;
  bare.ranks = replicas, bare.transport = s.transport, bare.op = "mean";
  bare.limits = bare.check = false;
  bare.cuda = s.cuda;
  bare.iterations = bytes <= 64 * KiB ? std::max(1, s.iterations / 20) : std::max(5, s.iterations / 10);
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return fail_errno("pipe2");
  const Fd reads(ends[0]);
  Fd writes(ends[1]);
  std::fflush(nullptr);
  const pid_t parent = ::getpid(), pid = ::fork();
  if (pid < 0) return fail_errno("fork");
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);
    const auto alone = run_all_reduce(bare);
    if (!alone) std::fprintf(stderr, "rejoin_step_perf: the bare all-reduce: %s\n", alone.error().message.c_str());
    const double mean = alone ? alone->rows.front().times.mean * 1e6 : 0;
    ::_exit(alone && ::write(writes.get(), &mean, sizeof mean) == sizeof mean ? 0 : 1);
  }
  writes = {};
  double mean = 0;
  const bool told = ::read(reads.get(), &mean, sizeof mean) == sizeof mean;
  if (!told) ::kill(pid, SIGKILL);  // this one was interrupted
  ::waitpid(pid, nullptr, 0);
  if (!told) return fail(ErrorCode::unavailable, "the bare all-reduce has failed");
  return mean;
}

Result<StepRow> measure(const StepSettings& s, std::uint64_t bytes, std::uint32_t replicas) {
  StepRow row{.bytes = bytes, .replicas = replicas};
  const auto bare = bare_us(s, bytes, replicas);
  if (!bare) return tl::unexpected(bare.error());
  row.bare_us = *bare;

  auto job = Job::start({.replicas = replicas,
                         .bytes = bytes,
                         .transport = s.transport,
                         .silence_ms = s.silence_ms,
                         .python = s.python,
                         .cuda = s.cuda});
  if (!job) return tl::unexpected(job.error());
  const auto reached = [&](std::uint64_t step) {
    for (std::uint32_t r = 0; r < replicas; ++r)
      if ((*job)->step(r) < step) return false;
    return true;
  };
  constexpr auto limit = std::chrono::seconds(300);
  if (auto warm = (*job)->wait_until([&] { return reached(static_cast<std::uint64_t>(s.warmups)); }, limit, "warm-up");
      !warm)
    return tl::unexpected(warm.error());
  struct Watched {
    std::string who;
    std::uint32_t processes = 0;
    std::vector<Usage> usage;
  };
  std::vector<Watched> watched;
  const auto watch = [&](const std::string& who, const std::vector<pid_t>& pids) {
    Watched& one =
        watched.emplace_back(Watched{.who = who, .processes = static_cast<std::uint32_t>(pids.size()), .usage = {}});
    for (const pid_t pid : pids) one.usage.emplace_back(pid);
  };
  std::vector<pid_t> trainers, daemons;
  for (std::uint32_t r = 0; r < replicas; ++r)
    trainers.push_back((*job)->trainer(r)), daemons.push_back((*job)->daemon(r));
  watch("a trainer", trainers), watch("a daemon", daemons), watch("coordinator", {(*job)->coordinator()});
  const std::uint64_t first = (*job)->step(0) + 1, end = first + static_cast<std::uint64_t>(s.iterations);
  if (auto done = (*job)->wait_until([&] { return reached(end); }, limit, "the steps"); !done)
    return tl::unexpected(done.error());
  const auto steps = static_cast<double>((*job)->step(0) + 1 - first);
  for (const auto& one : watched) {
    Used all;
    for (const auto& usage : one.usage) all += usage.now();
    row.costs.push_back({.who = one.who,
                         .cpu_us = all.cpu_seconds * 1e6 / steps / one.processes,
                         .system_calls = static_cast<double>(all.system_calls) / steps / one.processes,
                         .counted = all.counted});
    row.calls_not_counted = one.usage.front().why_not();
  }
  std::vector<daemon::Recording> recordings;
  for (const pid_t pid : trainers) {
    auto recording = (*job)->recording_of(pid);
    if (!recording) return tl::unexpected(recording.error());
    recordings.push_back(std::move(*recording));
  }
  const auto coordinator = (*job)->recording_of((*job)->coordinator());
  if (!coordinator) return tl::unexpected(coordinator.error());
  auto found = steps_of(recordings, *coordinator, first, end);
  if (found.whole.empty())
    return fail(ErrorCode::not_found, "the flight recordings have none of the steps {} to {}", first, end);
  row.steps = found.whole.size() / replicas;
  for (std::size_t part = 0; part < kParts.size(); ++part) row.parts[part] = Distribution(std::move(found.parts[part]));
  row.whole = Distribution(std::move(found.whole));
  return row;
}

void print(const StepRow& row) {
  std::printf("#\n# %s, %u replicas: %zu steps of %u trainers; a bare all-reduce takes %.1f us here (mean)\n",
              human_bytes(row.bytes).c_str(), row.replicas, row.steps, row.replicas, row.bare_us);
  std::printf("#%11s %10s %10s %10s  %s\n", "", "mean (us)", "p50 (us)", "p99 (us)", "");
  double sum = 0;
  for (std::size_t part = 0; part < kParts.size(); ++part) {
    const auto& times = row.parts[part];
    sum += times.mean();
    std::printf(" %11s %10.1f %10.1f %10.1f  %s\n", std::string(kParts[part].name).c_str(), times.mean(), times.at(0.5),
                times.at(0.99), std::string(kParts[part].what).c_str());
  }
  std::printf(" %11s %10.1f %10s %10s  sum of the parts' means; %.2f %% of the step's\n", "sum", sum, "", "",
              100 * sum / row.whole.mean());
  std::printf(" %11s %10.1f %10.1f %10.1f  from one begin_step()'s return to the next one's\n", "step",
              row.whole.mean(), row.whole.at(0.5), row.whole.at(0.99));
  std::printf(" %11s %10.1f %10s %10s  the step's mean less the bare all-reduce's\n", "beyond",
              row.whole.mean() - row.bare_us, "", "");
  for (const auto& cost : row.costs)
    std::printf("# %s, for each step: %.1f us of CPU time, %s system calls\n", cost.who.c_str(), cost.cpu_us,
                cost.counted ? fmt::format("{:.1f}", cost.system_calls).c_str() : "n/a");
}

nlohmann::json json_of(const StepRow& row) {
  nlohmann::json json{{"bytes", row.bytes},
                      {"replicas", row.replicas},
                      {"steps", row.steps},
                      {"bare_us", row.bare_us},
                      {"step_us", row.whole.mean()},
                      {"step_p50_us", row.whole.at(0.5)},
                      {"step_p99_us", row.whole.at(0.99)},
                      {"beyond_us", row.whole.mean() - row.bare_us}};
  for (std::size_t part = 0; part < kParts.size(); ++part)
    json["parts"].push_back({{"name", kParts[part].name},
                             {"what", kParts[part].what},
                             {"us", row.parts[part].mean()},
                             {"p50_us", row.parts[part].at(0.5)},
                             {"p99_us", row.parts[part].at(0.99)}});
  for (const auto& cost : row.costs) {
    auto& out = json["costs"].emplace_back(nlohmann::json{{"who", cost.who}, {"cpu_us", cost.cpu_us}});
    if (cost.counted) out["system_calls"] = cost.system_calls;
  }
  return json;
}

Result<> run(const StepSettings& s) {
  std::printf(
      "# rejoin_step_perf: a step is one bucket, reduced and committed, with an empty update; transport %s; trainers "
      "%s\n",
      s.transport.c_str(), s.python.empty() ? "in C++" : ("in Python, by " + s.python).c_str());
  std::printf(
      "# times are of the processes' flight recordings; each part begins where the one before ends, so the parts sum "
      "to the step\n");
  nlohmann::json json{{"transport", s.transport}, {"trainers", s.python.empty() ? "C++" : s.python}};
  if (s.cuda) {
    std::printf("# in the memory of CUDA device %d, on a stream\n", *s.cuda);
    json["cuda"] = *s.cuda;
  }
  const auto wake_up = wake_up_us();
  if (!wake_up) return tl::unexpected(wake_up.error());
  std::printf(
      "# by itself: one process wakes another in %.1f us (median). There is one such wake-up in 'wake-up' and in "
      "'update', and there are two in 'gather' and in 'plan'\n",
      *wake_up);
  json["wake_up_us"] = *wake_up;
  bool warned = false;
  for (const auto bytes : s.sizes)
    for (const auto replicas : s.replicas) {
      const auto row = measure(s, bytes, replicas);
      if (!row) return tl::unexpected(row.error());
      if (!std::exchange(warned, true) && !row->calls_not_counted.empty())
        std::printf("# system calls: not countable here: %s\n", row->calls_not_counted.c_str());
      print(*row);
      std::fflush(stdout);
      json["rows"].push_back(json_of(*row));
    }
  return write_results(s.json, json.dump(2));
}

}  // namespace
}  // namespace rejoin::bench

int main(int argc, char** argv) {
  using namespace rejoin;
  bench::StepSettings s;
  CommandLine line("What a step costs through the session, part by part, beside the bare all-reduce.");
  line.add("-s,--sizes", s.sizes, "bytes of the bucket, e.g. 4K,64K,64M, each in turn")
      .separated_by(',')
      .sized()
      .range(64, std::int64_t{1} << 33);
  line.add("--replicas", s.replicas, "replicas, each number in turn").separated_by(',').range(1, 16).show_default();
  line.add("-n,--iters", s.iterations, "measured steps; flight recordings keep no more than 4000 for sure")
      .range(1, 4000)
      .show_default();
  line.add("-w,--warmup_iters", s.warmups, "steps before them").range(1, 1000000).show_default();
  line.add("--transport", s.transport, "shm, tcp, tcp+aes or ucx:LIST").show_default();
  line.add("--silence-ms", s.silence_ms, "of the job").range(100, 3600000).show_default();
  line.add("--python", s.python, "trainers are run by this Python interpreter, which has the package");
  line.add("--use_cuda", s.cuda, "the bucket is in this CUDA device's memory, handed over and updated on a stream");
  line.add("--json", s.json, "write the results to this file");
  if (const auto status = line.parse(argc, argv)) return *status;
  for (const auto bytes : s.sizes)
    if (bytes % 4 != 0)
      return std::fprintf(stderr, "rejoin_step_perf: --sizes must be multiples of 4, and %lu is none\n", bytes), 2;
  if (s.cuda && !s.python.empty())
    return std::fprintf(stderr, "rejoin_step_perf: --use_cuda is for trainers in C++: leave out --python\n"), 2;
  init_logging("step_perf", "warn");
  if (const auto done = bench::check_results(s.json).and_then([&] { return bench::run(s); }); !done)
    return std::fprintf(stderr, "rejoin_step_perf: %s\n", done.error().message.c_str()), 1;
  return 0;
}
