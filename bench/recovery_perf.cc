// rejoin_recovery_perf: how soon the survivors of a member that is killed, or stopped, go on. The job is real: it
// all-reduces and commits in a loop, and coordinator, daemons and trainers are processes of this machine.
#include <poll.h>
#include <signal.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>

#include "base/command_line.h"
#include "base/fail.h"
#include "base/log.h"
#include "bench/gloo.h"
#include "bench/job.h"
#include "bench/job_times.h"
#include "bench/results_file.h"

namespace rejoin::bench {
namespace {

struct RecoverySettings {
  std::vector<std::uint64_t> sizes{1 * MiB, 64 * MiB};
  std::uint32_t replicas = 3;
  int kills = 20, stops = 5;
  std::uint64_t silence_ms = 500, seed = 1;
  std::string transport = "shm", python, json;
};

constexpr auto kLimit = std::chrono::seconds(120);

struct RecoveryRow {
  std::string what;  // is done to the member
  std::uint64_t bytes = 0;
  Distribution epoch, all_reduce, commit;  // ms, of the last survivor
};

class Rounds {
 public:
  Rounds(const RecoverySettings& settings, std::uint64_t bytes) : s_(settings), bytes_(bytes), random_(settings.seed) {}

  Result<std::vector<RecoveryRow>> run() {
    auto job = Job::start({.replicas = s_.replicas,
                           .bytes = bytes_,
                           .transport = s_.transport,
                           .silence_ms = s_.silence_ms,
                           .python = ""});
    if (!job) return tl::unexpected(job.error());
    job_ = std::move(*job);
    std::vector<RecoveryRow> rows;
    for (const bool stops : {false, true}) {
      std::vector<double> epoch, all_reduce, commit;
      for (int round = 0; round < (stops ? s_.stops : s_.kills); ++round) {
        auto went_on = lose_one(stops ? SIGSTOP : SIGKILL);
        if (!went_on) return tl::unexpected(went_on.error());
        epoch.push_back(*went_on->epoch * 1e-6);
        all_reduce.push_back(*went_on->all_reduce * 1e-6);
        commit.push_back(*went_on->commit * 1e-6);
      }
      if (!commit.empty())
        rows.push_back({.what = stops ? "stop" : "kill",
                        .bytes = bytes_,
                        .epoch = Distribution(std::move(epoch)),
                        .all_reduce = Distribution(std::move(all_reduce)),
                        .commit = Distribution(std::move(commit))});
    }
    return rows;
  }

 private:
  bool all_contribute() const {
    for (std::uint32_t r = 0; r < s_.replicas; ++r)
      if (job_->contributors(r) != s_.replicas) return false;
    return true;
  }

  // All survivors' latest.
  Result<GoingOn> lose_one(int signal) {
    if (auto ready = job_->wait_until([&] { return all_contribute(); }, kLimit, "all replicas to contribute"); !ready)
      return tl::unexpected(ready.error());
    const std::uint64_t settled = job_->step(0) + 3;
    if (auto on = job_->wait_until([&] { return job_->step(0) >= settled; }, kLimit, "three steps"); !on)
      return tl::unexpected(on.error());
    // At some point of some step.
    (void)::poll(nullptr, 0, static_cast<int>(std::uniform_int_distribution(0, 20)(random_)));
    const auto victim =
        static_cast<std::uint32_t>(std::uniform_int_distribution(0, static_cast<int>(s_.replicas) - 1)(random_));
    const TimePoint since = SteadyClock().now();
    if (::kill(job_->trainer(victim), signal) != 0) return fail_errno("kill");
    if (signal == SIGKILL) job_->kill_trainer(victim);  // its end is no surprise
    const auto gone_on = [&] {
      for (std::uint32_t r = 0; r < s_.replicas; ++r)
        if (r != victim && job_->contributors(r) != s_.replicas - 1) return false;
      return true;
    };
    if (auto on = job_->wait_until(gone_on, kLimit, "the survivors' next step"); !on) return tl::unexpected(on.error());
    GoingOn last{.epoch = 0, .all_reduce = 0, .commit = 0};
    for (std::uint32_t r = 0; r < s_.replicas; ++r) {
      if (r == victim) continue;
      const auto recording = job_->recording_of(job_->trainer(r));
      if (!recording) return tl::unexpected(recording.error());
      const auto one = going_on(*recording, since);
      if (!one.epoch || !one.all_reduce || !one.commit)
        return fail(ErrorCode::not_found, "{} has not recorded how it went on", recording->name());
      last.epoch = std::max(*last.epoch, *one.epoch);
      last.all_reduce = std::max(*last.all_reduce, *one.all_reduce);
      last.commit = std::max(*last.commit, *one.commit);
    }
    if (signal != SIGKILL) job_->kill_trainer(victim);
    if (auto started = job_->start_trainer(victim); !started) return tl::unexpected(started.error());
    return last;
  }

  const RecoverySettings& s_;
  const std::uint64_t bytes_;
  std::mt19937_64 random_;
  std::unique_ptr<Job> job_;
};

void print(const RecoveryRow& row) {
  const auto stage = [&](const char* name, const Distribution& times) {
    std::printf(" %12lu %9s %14s %6zu %10.1f %10.1f %10.1f %10.1f\n", row.bytes, row.what.c_str(), name, times.size(),
                times.mean(), times.at(0.5), times.at(0.99), times.most());
  };
  stage("new epoch", row.epoch);
  stage("all-reduce", row.all_reduce);
  stage("commit", row.commit);
}

nlohmann::json json_of(const Distribution& times) {
  return {{"rounds", times.size()},
          {"mean_ms", times.mean()},
          {"p50_ms", times.at(0.5)},
          {"p99_ms", times.at(0.99)},
          {"max_ms", times.most()}};
}

Result<> run(const RecoverySettings& s) {
  std::printf(
      "# rejoin_recovery_perf: %u replicas that all-reduce and commit in a loop, transport %s; a member is killed "
      "(SIGKILL) %d times, stopped (SIGSTOP) %d times, and comes back after each\n",
      s.replicas, s.transport.c_str(), s.kills, s.stops);
  std::printf(
      "# silence: %lu ms; a member that is stopped is only noticed by it, so that the times of a stop have it in "
      "them\n",
      s.silence_ms);
  std::printf(
      "# from the signal until the last survivor has heard of the new epoch; has finished its next all-reduce; has "
      "heard of the next commit. ms\n");
  std::printf("#%12s %9s %14s %6s %10s %10s %10s %10s\n", "size (B)", "member", "until", "rounds", "mean", "p50", "p99",
              "max");
  nlohmann::json json{{"replicas", s.replicas}, {"transport", s.transport}, {"silence_ms", s.silence_ms}};
  std::string missing = s.python.empty() ? "not asked for: --torch PYTHON" : "";
  for (const auto bytes : s.sizes) {
    const auto rows = Rounds(s, bytes).run();
    if (!rows) return tl::unexpected(rows.error());
    for (const auto& row : *rows) {
      print(row);
      json["rows"].push_back({{"bytes", row.bytes},
                              {"member", row.what},
                              {"epoch", json_of(row.epoch)},
                              {"all_reduce", json_of(row.all_reduce)},
                              {"commit", json_of(row.commit)}});
    }
    std::fflush(stdout);
    if (!missing.empty() || s.kills == 0) continue;
    const auto gloo = gloo_recovery(s.python, s.replicas, bytes, s.kills);
    if (!gloo) {
      missing = gloo.error().message;
      continue;
    }
    const Distribution times(*gloo);
    std::printf(" %12lu %9s %14s %6zu %10.1f %10.1f %10.1f %10.1f\n", bytes, "kill", "Gloo's next", times.size(),
                times.mean(), times.at(0.5), times.at(0.99), times.most());
    json["rows"].push_back({{"bytes", bytes}, {"member", "kill"}, {"gloo_all_reduce", json_of(times)}});
  }
  std::printf(
      "# Gloo's next: the survivors' next finished all-reduce by torch's Gloo with enable_reconfigure, over TCP, "
      "members known beforehand; it has no commit, and notices a stop by its time-out only\n");
  if (!missing.empty()) {
    std::printf("# torch's Gloo was not measured: %s\n", missing.c_str());
    json["gloo_missing"] = missing;
  }
  return write_results(s.json, json.dump(2));
}

}  // namespace
}  // namespace rejoin::bench

int main(int argc, char** argv) {
  using namespace rejoin;
  bench::RecoverySettings s;
  CommandLine line("How soon survivors go on when a member is killed or stopped.");
  line.add("-s,--sizes", s.sizes, "bytes that are all-reduced, e.g. 1M,64M, each in turn")
      .separated_by(',')
      .sized()
      .range(64, std::int64_t{1} << 33);
  line.add("--replicas", s.replicas, "replicas of one rank each").range(2, 16).show_default();
  line.add("--kills", s.kills, "members to kill, of each size").range(0, 100000).show_default();
  line.add("--stops", s.stops, "members to stop, of each size").range(0, 100000).show_default();
  line.add("--silence-ms", s.silence_ms, "how long a member may be silent").range(100, 3600000).show_default();
  line.add("--transport", s.transport, "shm, tcp, tcp+aes or ucx:LIST").show_default();
  line.add("--seed", s.seed, "of who is lost, and when in a step").show_default();
  line.add("--torch", s.python, "a Python interpreter whose torch is measured beside: 2.14 or later");
  line.add("--json", s.json, "write the results to this file");
  if (const auto status = line.parse(argc, argv)) return *status;
  for (const auto bytes : s.sizes)
    if (bytes % 4 != 0)
      return std::fprintf(stderr, "rejoin_recovery_perf: --sizes must be multiples of 4, and %lu is none\n", bytes), 2;
  init_logging("recovery_perf", "warn");
  if (const auto done = bench::check_results(s.json).and_then([&] { return bench::run(s); }); !done)
    return std::fprintf(stderr, "rejoin_recovery_perf: %s\n", done.error().message.c_str()), 1;
  return 0;
}
