// rejoin-demo: a training job on this machine that loses a replica, goes on, and gets it back. Real processes, real
// kills.
#include <signal.h>
#include <stdlib.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>

#include "base/command_line.h"
#include "base/fail.h"
#include "base/log.h"
#include "examples/demo_leads.h"
#include "examples/demo_run.h"
#include "examples/demo_trace.h"
#include "examples/demo_view.h"
#include "examples/interrupt.h"

namespace rejoin::demo {
namespace {

// Before the run, which may take long.
Result<> check_output(const char* flag, const std::string& path) {
  if (path.empty()) return {};
  const bool there = ::access(path.c_str(), F_OK) == 0;
  const auto folder = std::filesystem::absolute(path).parent_path();
  if (::access(there ? path.c_str() : folder.c_str(), W_OK) != 0)
    return fail_errno(fmt::format("{} {}: it could not be written", flag, path));
  std::error_code error;
  if (std::filesystem::is_directory(there ? path : folder.string(), error) == there)
    return fail(ErrorCode::invalid_argument, "{} {}: {} is {}", flag, path, there ? path : folder.string(),
                there ? "a directory; give a file in it" : "no directory");
  return {};
}

Result<std::string> fresh_directory() {
  std::error_code error;
  std::string name = std::filesystem::temp_directory_path(error).string() + "/rejoin-demo-XXXXXX";
  if (error) return fail(ErrorCode::io, "the directory for temporary files: {}; set TMPDIR to one", error.message());
  constexpr std::size_t most = sizeof(sockaddr_un::sun_path) - 1;
  if (const std::size_t longest = name.size() + sizeof "/calm/node63.sock"; longest > most)
    return fail(
        ErrorCode::invalid_argument,
        "{}: sockets in it would have names of {} characters, and the system takes {}; set TMPDIR to a shorter one",
        name, longest, most);
  if (::mkdtemp(name.data()) == nullptr)
    return fail(ErrorCode::io, "{}: {}; set TMPDIR to a directory that can be written to", name, std::strerror(errno));
  return name;
}

Result<int> demo(Settings& s, const Plan& plan) {
  auto fresh = fresh_directory();
  if (!fresh) return tl::unexpected(fresh.error());
  s.directory = *fresh;
  struct Cleanup {
    const Settings& s;
    ~Cleanup() {
      std::error_code ignored;
      if (!s.keep) std::filesystem::remove_all(s.directory, ignored);
    }
  } cleanup{s};
  if (!s.quiet)
    std::printf("%u replicas × %u ranks learn %s: %lu parameters a rank, %lu steps; all in %s\n", s.job.replicas,
                s.job.ranks, s.job.data.c_str(), s.job.parameters, s.job.steps, s.directory.c_str());
  Run run(s, plan, s.directory + "/run");
  if (auto gone = run.go(); !gone) {
    if (interrupted() != 0 || !run.has_started()) return tl::unexpected(gone.error());  // which says all that there is
    s.keep = true;
    return fail(gone.error().code, "{}\n(everything of this run is kept in {})", gone.error().message, s.directory);
  }
  auto report = run.report();
  if (!s.no_baseline) {
    Settings calm = s;
    static_cast<Faults&>(calm) = {};
    calm.quiet = true;
    calm.job.store = "file";
    if (!s.quiet) std::printf("the same run without a failure, for comparison ...\n");
    Run baseline(calm, {}, s.directory + "/calm");
    if (auto gone = baseline.go(); !gone) return tl::unexpected(gone.error());
    report["loss"]["last_without_failure"] = baseline.report()["loss"]["last"];
  }
  if (!s.quiet) std::printf("\n%s%s", loss_curve(run.story(), 72, 12).c_str(), summary(report).c_str());
  std::fputs(run.left_out().c_str(), stderr);
  if (!s.json.empty()) {
    std::ofstream out(s.json);
    out << report.dump(2) << "\n";
    if (!out.flush()) return fail(ErrorCode::io, "can't write {}", s.json);
  }
  if (!s.trace.empty())
    if (auto written = write_trace(s.trace, run.story().events(), run.story().deeds()); !written)
      return tl::unexpected(written.error());
  const bool good = sound(report) && report.at("same_bits").get<bool>() && !report.at("ledger").contains("error") &&
                    report.at("ledger").at("repeated") == 0 && report.at("ledger").at("lost") == 0 &&
                    (report.at("rolled_back_steps") == 0 || s.lose_all(s.job));
  return good ? 0 : 1;
}

}  // namespace
}  // namespace rejoin::demo

int main(int argc, char** argv) {
  using namespace rejoin::demo;
  Settings s;
  std::error_code error;
  s.job.binaries = std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  if (error) {
    std::cerr << "rejoin-demo: /proc/self/exe: " << error.message() << "\n";
    return 1;
  }
  rejoin::CommandLine line(
      "A training job that loses a replica, goes on, and gets it back; with the proof that nothing was lost.");
  // What is installed has its text beside its programs.
  s.job.data = std::filesystem::path(s.job.binaries).parent_path() / "share/rejoin/shakespeare.txt";
  auto data = line.add("--data", s.job.data, "text to learn").existing_file();
  if (::access(s.job.data.c_str(), R_OK) == 0) data.show_default();
  else data.required();
  line.add("--replicas", s.job.replicas, "copies of the model").range(1, 64).show_default();
  line.add("--ranks", s.job.ranks, "processes of a replica, each with its tower").range(1, 16).show_default();
  line.add("--steps", s.job.steps, "optimizer steps").range(2, 1000000).show_default();
  line.add("--params", s.job.parameters, "parameters of a rank").range(10000, 500000000).show_default();
  line.add("--batch", s.job.batch, "samples a replica trains in a step").range(1, 4096).show_default();
  line.add("--kill", s.kills, "REPLICA.RANK@STEP[,…]: kill -9 in the middle of that step (default: 1.0 at a quarter)")
      .separated_by(',');
  line.add("--hang", s.hangs, "REPLICA.RANK@STEP[,…]: stop the process (SIGSTOP) in the middle of that step")
      .separated_by(',');
  line.flag("--no-kill", s.no_kill, "nothing is killed");
  line.add("--kill-daemon", s.kill_daemon,
           "REPLICA@STEP: kill -9 that replica's daemon at that step; it is started again");
  line.add("--kill-coordinator", s.kill_coordinator, "STEP: kill -9 the coordinator at that step; it is started again")
      .range(1, 1000000);
  line.add("--pause-coordinator", s.pause_coordinator,
           "STEP: stop the coordinator (SIGSTOP) at that step, for --pause-ms")
      .range(1, 1000000);
  line.add("--pause-all", s.pause_all, "STEP: stop all processes at that step, for --pause-ms: a suspended machine")
      .range(1, 1000000);
  line.add("--store", s.job.store,
           "where decisions are kept: file; or etcd, in three members of the demo's own that three coordinators share")
      .one_of({"file", "etcd"})
      .show_default();
  line.add("--kill-leader", s.kill_leader,
           "STEP: kill -9 the coordinator that leads at that step; it is started again (with --store etcd, as are the "
           "next ones)")
      .range(1, 1000000);
  line.add("--pause-leader", s.pause_leader,
           "STEP: stop the coordinator that leads at that step (SIGSTOP), for --pause-ms")
      .range(1, 1000000);
  line.add("--kill-etcd", s.kill_etcd,
           "STEP: kill -9 members of etcd at that step; they are started again after --pause-ms")
      .range(1, 1000000);
  line.add("--pause-etcd", s.pause_etcd, "STEP: stop members of etcd at that step (SIGSTOP), for --pause-ms")
      .range(1, 1000000);
  line.add("--etcd-members", s.etcd_members, "which ones: etcd's own leader, a follower, or all")
      .one_of({"leader", "follower", "all"})
      .show_default();
  line.add("--pause-ms", s.pause_ms, "how long these pauses last; 0: two and a half times the silence")
      .range(0, 3600000)
      .show_default();
  line.add("--drift", s.drift, "REPLICA@STEP: from that step on the replica's optimizer gets a bit wrong");
  line.add("--flip-bit", s.flip_bit, "STEP: a bit of a reduced gradient flips on one rank of the last replica")
      .range(1, 1000000);
  line.flag("--kill-source", s.kill_source, "kill a source of the running catch-up");
  line.flag("--kill-joiner", s.kill_joiner, "kill the joiner of the running catch-up");
  line.add("--silence-ms", s.job.silence_ms, "how long a peer may be silent").range(100, 60000).show_default();
  line.add("--transport", s.job.transport, "shm, tcp or tcp+aes").show_default();
  line.add("--device", s.job.device, "where state and gradients are: host, or cuda:NUMBER, which all ranks share")
      .show_default();
  line.add("--state", s.job.state,
           "who allocates them: session; pool (a framework, in large blocks) or expandable (mapped in segments)")
      .one_of({"session", "pool", "expandable"})
      .show_default();
  line.add("--seed", s.job.seed, "seed of the initial weights").range(0, 1000000000).show_default();
  line.flag("--no-baseline", s.no_baseline, "without the comparison run");
  line.flag("--quiet", s.quiet, "print nothing");
  line.add("--json", s.json, "write what happened to this file");
  line.add("--trace", s.trace, "write a Chrome/Perfetto trace to this file");
  line.flag("--keep", s.keep, "keep the directory with logs, events and outputs");
  line.add("--log-level", s.job.log_level, "of the trainers")
      .one_of({rejoin::kLogLevels.begin(), rejoin::kLogLevels.end()})
      .show_default();
  line.add("--limit-seconds", s.limit_seconds, "give up after this long").range(1, 1000000).show_default();
  if (const auto status = line.parse(argc, argv)) return *status;
  if (s.pause_ms == 0) s.pause_ms = s.job.silence_ms * 5 / 2;
  if (s.none() && !s.no_kill && s.job.replicas > 1)
    s.kills.push_back(fmt::format("1.0@{}", std::max<std::uint64_t>(2, s.job.steps / 4)));
  const auto plan =
      check_output("--json", s.json).and_then([&] { return check_output("--trace", s.trace); }).and_then([&] {
        return plan_of(s, s.job);
      });
  const auto etcd = s.job.several() && plan ? Etcd::check() : rejoin::Result<>();
  if (!plan) {
    std::cerr << "rejoin-demo: " << plan.error().message << "\n";
    return 2;
  }
  if (!etcd) {
    std::cerr << "rejoin-demo: " << etcd.error().message << "\n";
    return 2;
  }
  ::signal(SIGPIPE, SIG_IGN);
  catch_interrupts();
  auto done = demo(s, *plan);
  if (const auto on = unless_interrupted(); !done && !on) {
    std::cerr << fmt::format("rejoin-demo: {}; its processes are ended, and {} is {}\n", on.error().message,
                             s.directory, s.keep ? "kept" : "removed");
    return 128 + interrupted();
  }
  if (!done) {
    std::cerr << "rejoin-demo: " << done.error().message << "\n";
    return 1;
  }
  return *done;
}
