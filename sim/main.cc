// rejoin-sim: plays seeds of the simulated cluster and says what it found.
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "base/command_line.h"
#include "base/fail.h"
#include "base/log.h"
#include "sim/long_job.h"
#include "sim/scale.h"
#include "sim/world.h"

namespace rejoin::sim {
namespace {

struct Settings {
  std::uint64_t seeds = 100, from = 0;
  std::optional<std::uint64_t> seed, long_steps;
  unsigned jobs = std::max(1u, std::thread::hardware_concurrency());
  bool trace = false, minimise = true, scale = false, stalls = false;
  std::uint32_t scale_replicas = 0;
  std::string plant = "none", often;
  Options options;
};

// A job of chosen faults ends as that of drawn ones.
Options with_its_end(Options options) {
  if (!options.steps && options.plant == Plant::none) options.steps = Shape::of(options.seed).steps;
  return options;
}

// Leaves faults out as long as the same invariant still breaks: halves, quarters, … and at last one by one.
std::vector<Fault> minimised(const Options& options, std::vector<Fault> faults, const std::string& invariant) {
  const auto breaks = [&](const std::vector<Fault>& some) {
    Options again = options;
    again.faults = some;
    const auto outcome = play(again);
    return outcome.violation && outcome.violation->invariant == invariant;
  };
  for (std::size_t chunk = std::max<std::size_t>(1, faults.size() / 2);; chunk /= 2) {
    for (std::size_t at = 0; at < faults.size();) {
      std::vector<Fault> fewer = faults;
      fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(at),
                  fewer.begin() + static_cast<std::ptrdiff_t>(std::min(at + chunk, faults.size())));
      if (breaks(fewer)) faults = std::move(fewer);
      else at += chunk;
    }
    if (chunk <= 1) return faults;
  }
}

void show_failure(const Options& options, const Outcome& outcome, bool minimise) {
  fmt::print("seed {} breaks {}: {}\n", options.seed, outcome.violation->invariant, outcome.violation->what);
  Options again = with_its_end(options);
  again.trace = true;
  if (minimise) {
    again.faults = minimised(again, outcome.faults, outcome.violation->invariant);
    fmt::print("of its {} faults these are enough:\n", outcome.faults.size());
    for (const auto& fault : *again.faults) fmt::print("  {}\n", to_string(fault));
  }
  const auto replay = play(again);
  const std::size_t shown = std::min<std::size_t>(60, replay.trace.size());
  fmt::print("the end of what happened then (all of it: rejoin-sim --seed {} --trace{}):\n", options.seed,
             options.plant == Plant::none ? "" : fmt::format(" --plant {}", to_string(options.plant)));
  for (std::size_t i = replay.trace.size() - shown; i < replay.trace.size(); ++i) fmt::print("  {}\n", replay.trace[i]);
}

int one(const Settings& settings) {
  Options options = settings.options;
  options.seed = *settings.seed;
  options.trace = settings.trace;
  const Outcome outcome = play(options);
  if (settings.trace) {
    for (const auto& fault : outcome.faults) fmt::print("{}\n", to_string(fault));
    for (const auto& line : outcome.trace) fmt::print("{}\n", line);
  }
  for (const auto& [what, count] : outcome.counts)
    if (!what.starts_with("pair: ")) fmt::print("{:>8}  {}\n", count, what);
  fmt::print("seed {}: {:.1f} virtual seconds, {} events, trace {:016x}\n", options.seed, outcome.virtual_seconds,
             outcome.events, outcome.trace_hash);
  if (!outcome.violation) return 0;
  if (settings.trace) fmt::print("{}: {}\n", outcome.violation->invariant, outcome.violation->what);
  else show_failure(options, outcome, settings.minimise);
  return 1;
}

// What the workers, one process each, tell the first one. A process that dies leaves the seed that it was at.
struct Shared {
  std::atomic<std::uint64_t> next, played, events, virtual_ms, violations;
  std::atomic<std::uint64_t> first_bad;
  std::atomic<std::uint64_t> at[64];
  struct Count {
    char name[48];
    std::uint64_t count;
  } counts[64][4096];  // each job's own
  char what[256];
};

void add(std::span<Shared::Count> places, const std::map<std::string, std::uint64_t>& counts) {
  for (const auto& [name, count] : counts) {
    const auto place = std::ranges::find_if(places, [&name = name](const auto& one) {
      return one.name[0] == 0 || name.compare(0, sizeof one.name - 1, one.name) == 0;
    });
    REJOIN_CHECK(place != places.end(), "there are more than {} counts", places.size());
    if (place->name[0] == 0) std::snprintf(place->name, sizeof place->name, "%s", name.c_str());
    place->count += count;
  }
}

void work(const Settings& settings, Shared& shared, unsigned job) {
  for (;;) {
    const std::uint64_t i = shared.next++;
    if (i >= settings.seeds || shared.violations > 0) return;
    Options options = settings.options;
    options.seed = settings.from + i;
    shared.at[job] = options.seed;
    const Outcome outcome = play(options);
    ++shared.played;
    shared.events += outcome.events;
    shared.virtual_ms += static_cast<std::uint64_t>(outcome.virtual_seconds * 1000);
    add(shared.counts[job], outcome.counts);
    if (!outcome.violation) continue;
    std::uint64_t worst = shared.first_bad;
    while (options.seed < worst && !shared.first_bad.compare_exchange_weak(worst, options.seed)) {
    }
    if (shared.violations++ == 0)
      std::snprintf(shared.what, sizeof shared.what, "%s: %s", outcome.violation->invariant.c_str(),
                    outcome.violation->what.c_str());
  }
}

int many(const Settings& settings) {
  void* memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return std::perror("mmap"), 1;
  auto& shared = *new (memory) Shared{};
  shared.first_bad = ~std::uint64_t{0};
  const auto start = std::chrono::steady_clock::now();
  std::map<pid_t, unsigned> workers;
  for (unsigned job = 0; job < settings.jobs; ++job) {
    const pid_t pid = ::fork();
    if (pid < 0) return std::perror("fork"), 1;
    if (pid == 0) {
      work(settings, shared, job);
      std::_Exit(0);
    }
    workers[pid] = job;
  }
  bool crashed = false;
  for (int status = 0; !workers.empty();) {
    const pid_t pid = ::wait(&status);
    if (pid < 0) break;
    const unsigned job = workers.extract(pid).mapped();
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    crashed = true;
    fmt::print("seed {} ended the process itself ({}); replay it with --seed {} --trace\n", shared.at[job].load(),
               WIFSIGNALED(status) ? ::strsignal(WTERMSIG(status)) : "an exit", shared.at[job].load());
  }
  const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::map<std::string, std::uint64_t> counts;
  for (const auto& places : shared.counts)
    for (const auto& place : places)
      if (place.name[0] != 0) counts[place.name] += place.count;
  std::uint64_t faults = 0, kinds = 0, pairs = 0;
  for (const auto& [name, count] : counts) {
    if (name.starts_with("pair: ") && ++pairs > 0) continue;
    fmt::print("{:>10}  {}\n", count, name);
    if (name.starts_with("fault: ")) faults += count, ++kinds;
  }
  fmt::print(
      "{} seeds in {:.1f} s ({:.0f} a minute, {} jobs): {:.1f} hours of virtual time, {:.0f} events/s, {} faults "
      "({:.0f}/s) of {} kinds out of {}; {} of {} pairs of values of two dimensions of the cluster\n",
      shared.played.load(), took, static_cast<double>(shared.played) * 60 / took, settings.jobs,
      static_cast<double>(shared.virtual_ms) / 3.6e6, static_cast<double>(shared.events) / took, faults,
      static_cast<double>(faults) / took, kinds, kFaultKinds, pairs, pairs_of_values());
  if (shared.violations > 0) {
    Options options = settings.options;
    options.seed = shared.first_bad;
    const Outcome again = play(options);
    if (again.violation) show_failure(options, again, settings.minimise);
    else
      fmt::print(
          "seed {} broke an invariant ({}), and played again it does not: something in it does not follow from the "
          "seed\n",
          options.seed, shared.what);
  }
  return shared.violations > 0 || crashed ? 1 : 0;
}

int scale(std::uint32_t replicas) {
  fmt::print(
      "The control plane's machines with 8 ranks a node; for each step, messages and bytes in and out. The "
      "coordinator's processor time for a new epoch, and for the start of a job and of a replica; the largest message "
      "of all; with how many others a rank is connected.\n"
      "{:>8} {:>8} {:>5} {:>7} | {:>9} {:>8} {:>10} {:>9} | {:>9} {:>8} | {:>9} {:>8} | {:>9} {:>9} {:>9} {:>9} {:>9} "
      "{:>11} {:>6}\n",
      "replicas", "ranks", "rails", "through", "coord. ms", "messages", "bytes", "B a rank", "relay ms", "messages",
      "node ms", "messages", "epoch ms", "messages", "start ms", "start MiB", "replica", "largest KiB", "links");
  const ScaleOptions all[] = {{.ranks = 42},
                              {.ranks = 416},
                              {},
                              {.rails = 4},
                              {.rails = 8},
                              {.ranks = 42, .relays = false},
                              {.ranks = 416, .relays = false},
                              {.relays = false},
                              {.replicas = 128, .ranks = 8, .rails = 8},
                              {.replicas = 256, .ranks = 8, .rails = 8},
                              {.replicas = 1024, .ranks = 8, .rails = 8, .steps = 5},
                              {.replicas = 1024, .ranks = 8, .rails = 8, .steps = 5, .full_mesh_members = 1024}};
  for (const auto& o : all) {
    if (replicas != 0 && o.replicas != replicas) continue;
    const ScaleResult r = measure_scale(o);
    fmt::print(
        "{:>8} {:>8} {:>5} {:>7} | {:>9.3f} {:>8.0f} {:>10.0f} {:>9.0f} | {:>9.3f} {:>8.0f} | {:>9.3f} {:>8.0f} | "
        "{:>9.3f} {:>9} {:>9.0f} {:>9.1f} {:>9.0f} {:>11.1f} {:>6.0f}\n",
        o.replicas, r.ranks, o.rails, o.relays ? "relays" : "nodes", r.coordinator.cpu_ms, r.coordinator.messages,
        r.coordinator.bytes, r.coordinator_bytes_per_rank, r.relay.cpu_ms, r.relay.messages, r.node.cpu_ms,
        r.node.messages, r.epoch_change_ms, r.epoch_change_messages, r.start_ms,
        static_cast<double>(r.start_bytes) / (1 << 20), r.replica_ms,
        static_cast<double>(r.largest_message) / (1 << 10), r.links);
    std::fflush(stdout);
  }
  return 0;
}

// What a job of 1,024 replicas leaves behind that runs for so many steps.
int long_job(std::uint64_t steps) {
  std::string directory = (std::filesystem::temp_directory_path() / "rejoin-sim-XXXXXX").string();
  if (::mkdtemp(directory.data()) == nullptr) return std::perror("rejoin-sim: a directory for the log"), 1;
  fmt::print("{:>9} {:>12} {:>12} {:>12} {:>12} {:>12}\n", "steps", "log MiB", "snapshot KiB", "recovery ms",
             "memory MiB", "heap MiB");
  const auto ran = run_long_job({.steps = steps, .directory = directory}, [](const LongJobState& state) {
    fmt::print("{:>9} {:>12.1f} {:>12.1f} {:>12.1f} {:>12.1f} {:>12.1f}\n", state.steps,
               static_cast<double>(state.log_bytes) / (1 << 20), static_cast<double>(state.snapshot_bytes) / 1024,
               state.recovery_ms, static_cast<double>(state.memory_bytes) / (1 << 20),
               static_cast<double>(state.heap_bytes) / (1 << 20));
    std::fflush(stdout);
  });
  std::error_code ignored;
  std::filesystem::remove_all(directory, ignored);
  if (!ran) return fmt::print(stderr, "rejoin-sim: {}\n", ran.error().message), 1;
  return 0;
}

// What one failure of each kind costs those who live on, as JSON: beyond a step without failures, until the next
// commit (`stall_ms`), and in all, until the lost replica contributes again (`lost_ms`); virtual time, means over
// seeds. For sim/effective_time.py.
int stalls(const Settings& settings) {
  fmt::print("[");
  for (std::size_t kind = 0; kind < kFaultKinds; ++kind) {
    const auto fault = static_cast<FaultKind>(kind);
    // Nobody lives on; all stand still; an operator decides.
    if (fault == FaultKind::kill_all || fault == FaultKind::pause || fault == FaultKind::older_log) continue;
    double stall = 0, lost = 0, step = 0, back = 0;
    for (std::uint64_t seed = settings.from; seed < settings.from + settings.seeds; ++seed) {
      constexpr double at = 1.0;  // virtual seconds from the start, which is at 1 s
      Options options = settings.options;
      options.seed = seed;
      if (options.replicas == 0) options.replicas = 3;
      if (options.ranks == 0) options.ranks = 2;
      options.faults = {{.at = std::chrono::milliseconds(1000 + seed % 7),
                         .kind = fault,
                         .replica = static_cast<std::uint32_t>(seed % options.replicas),
                         .rank = static_cast<std::uint32_t>(seed / options.replicas % options.ranks),
                         .lasting = std::chrono::milliseconds(600)}};
      const Outcome outcome = play(options);
      const double failed = 1.0 + at + static_cast<double>(seed % 7) * 1e-3;
      std::vector<double> before, after;
      for (const auto& commit : outcome.committed) (commit.at <= failed ? before : after).push_back(commit.at);
      if (outcome.violation || before.size() < 2 || after.empty())
        return fmt::print(stderr, "rejoin-sim: seed {} with one fault of kind {} ended badly\n", seed,
                          to_string(fault)),
               1;
      const double mean = (before.back() - before.front()) / static_cast<double>(before.size() - 1);
      step += mean;
      stall += std::max(0.0, after.front() - before.back() - mean);
      lost += after.back() - before.back() - mean * static_cast<double>(after.size());
      back += static_cast<double>(after.size());
    }
    const double ms = 1e3 / static_cast<double>(settings.seeds);
    fmt::print(R"({}{{"kind": "{}", "step_ms": {:.3f}, "stall_ms": {:.3f}, "lost_ms": {:.3f}, "steps": {:.1f}}})",
               kind == 0 ? "" : ",\n ", to_string(fault), step * ms, stall * ms, lost * ms,
               back / static_cast<double>(settings.seeds));
  }
  fmt::print("]\n");
  return 0;
}

}  // namespace
}  // namespace rejoin::sim

int main(int argc, char** argv) {
  using namespace rejoin;
  sim::Settings settings;
  CommandLine line(
      "Plays a whole Rejoin cluster (coordinator, daemons, ranks, trainers: the code that ships) under virtual time, "
      "with faults drawn from a seed, and checks the invariants.");
  line.add("--seeds", settings.seeds, "how many").show_default();
  line.add("--from", settings.from, "the first one").show_default();
  line.add("--seed", settings.seed, "this one only");
  line.add("--jobs", settings.jobs, "processes").range(1, 64).show_default();
  line.add("--replicas", settings.options.replicas, "of the job; otherwise as each seed has it").range(1, 16);
  line.add("--ranks", settings.options.ranks, "of a replica; otherwise as each seed has it").range(1, 16);
  line.add("--coordinators", settings.options.coordinators,
           "1: one with a log file; more: with a store that they share; otherwise as each seed has it")
      .range(1, 7);
  line.flag("--trace", settings.trace, "with --seed: everything that happened");
  line.flag("!--no-minimise", settings.minimise, "of a failure: don't look for the faults that are enough");
  line.add("--often", settings.often, "this kind of fault as often as all others together");
  line.add("--steps", settings.options.steps, "after so many the job is finished; otherwise as each seed has it");
  line.add("--plant", settings.plant, "a bug built in on purpose, to see it found").show_default();
  line.add("--ignore", settings.options.ignore, "an invariant not to check, to see what else breaks");
  line.flag("--stalls", settings.stalls, "instead: what one failure of each kind costs the others, as JSON");
  line.flag("--scale", settings.scale, "instead: what the control plane costs with 1,000, 10,000 and 100,000 ranks");
  line.add("--scale-replicas", settings.scale_replicas, "of these only jobs of so many replicas").range(1, 1024);
  line.add("--long", settings.long_steps,
           "instead: what the log of 1,024 replicas weighs after so many steps, compacted as it grows");
  if (const auto status = line.parse(argc, argv)) return *status;
  init_logging("sim", "off");
  auto plant = sim::parse_plant(settings.plant);
  if (!plant) return fmt::print(stderr, "rejoin-sim: --plant: {}\n", plant.error().message), 1;
  settings.options.plant = *plant;
  if (!settings.often.empty()) {
    auto often = sim::parse_fault(settings.often);
    if (!often) return fmt::print(stderr, "rejoin-sim: --often: {}\n", often.error().message), 1;
    settings.options.often = *often;
  }
  if (settings.long_steps) return sim::long_job(*settings.long_steps);
  if (settings.scale) return sim::scale(settings.scale_replicas);
  if (settings.stalls) return sim::stalls(settings);
  return settings.seed ? sim::one(settings) : sim::many(settings);
}
