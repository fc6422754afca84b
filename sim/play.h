// What a run of the simulated cluster is asked for, and what becomes of it.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "sim/checker.h"
#include "sim/fault.h"
#include "sim/model.h"

namespace rejoin::sim {

struct Options {
  std::uint64_t seed = 1;
  std::uint32_t replicas = 0, ranks = 0, coordinators = 0;  // 0: as the seed has it
  std::uint64_t batch = 4;
  Plant plant = Plant::none;
  std::string ignore;                        // an invariant that is not checked, to see what else breaks
  std::optional<std::vector<Fault>> faults;  // otherwise drawn from the seed
  std::optional<std::uint64_t> steps;        // otherwise as the seed has it, where its faults are drawn, too; 0: no end
  std::optional<FaultKind> often;            // … this kind as often as all others together
  bool trace = false;                        // keep all of it, not only the end
  const Model* model = nullptr;              // otherwise noise_model()
  std::optional<bool> balance;               // batches by speed; otherwise as the seed has it
  // From a time on a replica takes so many times as long for a sample as `sample`. None: drawn from the seed, where
  // batches are balanced.
  struct Speed {
    Duration from{};
    std::uint32_t replica = 0;
    double times = 1;
  };
  std::vector<Speed> speeds;
  Duration sample{};  // how long one is computed; zero: as long as the step's chance has it, however many there are
  // Instead of a few seconds with many faults at once: so many failures, each when all replicas contribute again, and
  // until so many samples are trained.
  struct Long {
    std::uint64_t failures = 0, samples = 0;
  };
  std::optional<Long> run_for;
};

struct Outcome {
  std::optional<Violation> violation;
  std::vector<Fault> faults;  // that were to happen
  std::vector<std::string> trace;
  std::map<std::string, std::uint64_t> counts;  // faults by kind, and what the protocols went through
  std::uint64_t events = 0;
  std::uint64_t trace_hash = 0;  // of every line, kept or not: two runs of one seed must agree
  double virtual_seconds = 0;
  struct Committed {
    double at = 0;  // virtual seconds
    std::uint64_t step = 0, samples = 0;
    double loss = 0;  // mean over its contributors
  };
  std::vector<Committed> committed;
};

Outcome play(const Options& options);

}  // namespace rejoin::sim
