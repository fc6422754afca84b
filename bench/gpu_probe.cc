// rejoin_gpu_probe: what a GPU's driver does that "No driver between hand-over and flag" (docs/design-notes.md) rests
// on: which calls don't return while a stream waits for a flag, which streams stop with one that waits, and what it
// costs a trainer that fills the card when its daemon is served memory. Each probe is a process of its own with a time
// limit, so that one that hangs costs the others nothing.
#include <fmt/format.h>

#include <iostream>
#include <nlohmann/json.hpp>

#include "base/command_line.h"
#include "base/log.h"
#include "bench/probe/probes.h"
#include "bench/probe/process.h"

namespace rejoin::bench {
namespace {

int run(const Settings& s) {
  nlohmann::json out;
  const Duration limit = 4 * s.wait + std::chrono::seconds(20);
  const auto named = text_of_a_process(limit, [&] { return name_of_gpu(s); });  // the driver is for children only
  if (!named) {
    std::cerr << "rejoin_gpu_probe: " << named.error().message << "\n";
    return 1;
  }
  const std::string& name = *named;
  out["device"] = name;
  const auto print = [&](const std::string& text) {
    if (!s.json) std::cout << text << std::flush;
  };
  print(fmt::format(
      "# {}\n\nA stream waits {:.0f} ms for a flag; the trainer's thread is in …, and another thread's call takes "
      "(ms; * as long as the stream waits):\n{:52}",
      name, milliseconds(s.wait), ""));
  for (const auto* call : kCalls) print(fmt::format(" {:>9}", call));
  bool failed = false;
  for (const auto& [does, what] : kDoes) {
    print(fmt::format("\n{:52}", what));
    for (std::size_t call = 0; call < kCalls.size(); ++call) {
      if (does == Does::first_launch && call == 2) {  // it is what the other thread is in
        print(fmt::format(" {:>9}", "-"));
        continue;
      }
      const Outcome outcome = in_a_process(limit, [&, does = does] { return std::vector{stands(s, does, call)}; });
      nlohmann::json row{{"does", what}, {"call", kCalls[call]}};
      if (outcome.failure.empty() && outcome.values.size() == 1) {
        const bool stood = outcome.values[0] > milliseconds(s.wait) / 2;
        row["ms"] = outcome.values[0];
        row["stands"] = stood;
        print(fmt::format(" {:>9}", fmt::format("{:.1f}{}", outcome.values[0], stood ? "*" : "")));
      } else {
        failed = true;
        row["failure"] = outcome.failure;
        print(fmt::format(" {:>9}", outcome.failure));
      }
      out["stands_still"].push_back(row);
    }
  }
  print("\n\nOf streams that don't wait, these stop while others do, by CUDA_DEVICE_MAX_CONNECTIONS:\n");
  for (const auto& queues : kQueues) {
    const Outcome outcome = in_a_process(limit, [&] { return std::vector{stopped_streams(s, queues)}; });
    nlohmann::json row{{"connections", queues.connections}, {"streams", queues.streams}, {"waiting", queues.waiting}};
    std::string text = outcome.failure;
    if (outcome.values.size() == 1) {
      row["stopped"] = outcome.values[0];
      text = fmt::format("{:.0f} of {}", outcome.values[0], queues.streams - queues.waiting);
    } else {
      failed = true;
      row["failure"] = outcome.failure;
    }
    out["queues"].push_back(row);
    print(fmt::format("{:>4}: {} of {} wait, {} stop\n", queues.connections, queues.waiting, queues.streams, text));
  }
  const Outcome outcome = in_a_process(limit + 6 * s.wait, [&] { return beside(s); });
  if (outcome.values.size() == 4) {
    const auto& v = outcome.values;
    out["served"] = {{"trainer_alone", v[0]},
                     {"daemon_alone", v[1]},
                     {"trainer", v[2]},
                     {"daemon", v[3]},
                     {"trainer_time_ratio", v[0] / v[2]},
                     {"daemon_rate_ratio", v[3] / v[1]}};
    print(fmt::format(
        "\nA trainer that adds with {} blocks, and a daemon that its memory is served to, GB/s:\n  alone {:.3g} and "
        "{:.3g}; beside each other {:.3g} ({:.3g} × the time) and {:.3g} ({:.3g} of the rate)\n",
        s.blocks, v[0], v[1], v[2], v[0] / v[2], v[3], v[3] / v[1]));
  } else {
    failed = true;
    out["served"] = {{"failure", outcome.failure}};
    print(fmt::format("\nA daemon beside a trainer: {}\n", outcome.failure));
  }
  if (s.json) std::cout << out.dump(2) << "\n";
  return failed ? 1 : 0;
}

}  // namespace
}  // namespace rejoin::bench

int main(int argc, char** argv) {
  using namespace rejoin;
  bench::Settings s;
  CommandLine line(
      "Asks a GPU's driver what \"No driver between hand-over and flag\" rests on: which calls stand still while a "
      "stream waits for a flag, which streams stop with it, and what a daemon that is served memory costs a busy "
      "trainer.");
  int wait_ms = 1000;
  line.add("--use_cuda", s.cuda, "the device's number").show_default();
  line.add("--wait-ms", wait_ms, "how long streams wait, and each rate is measured").range(20, 60000).show_default();
  line.add("-s,--size", s.bytes, "bytes of the served state").sized().range(1 * MiB, 64 * GiB).show_default();
  line.add("--blocks", s.blocks, "of 512 threads, of the trainer that fills the card").range(1u, 4096u).show_default();
  line.flag("--json", s.json, "JSON instead of tables");
  if (const auto status = line.parse(argc, argv)) return *status;
  s.wait = std::chrono::milliseconds(wait_ms);
  init_logging("gpu_probe", "warn");
  return bench::run(s);
}
