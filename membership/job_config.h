// What a coordinator is told about its job when it starts.
#pragma once

#include <cstdint>
#include <numeric>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/deadlines.h"
#include "base/ids.h"
#include "base/ring_links.h"
#include "membership/audit_config.h"
#include "membership/ledger.h"

namespace rejoin::membership {

struct JobConfig {
  std::uint32_t replicas = 3;
  std::uint32_t ranks = 2;
  std::uint64_t batch = 1;                 // samples a contributor trains in a step
  bool constant_batch = false;             // … or they share `replicas` times as many, however few they are
  BalanceRule balance;                     // whether who is slower gets fewer of them
  std::uint64_t steps = 0;                 // then the job is finished; 0: never
  std::uint64_t id = 0;                    // of a job whose log begins now: random
  Duration silence = deadlines::kSilence;  // how long a peer may be silent
  // An operator's word: where every process that held the last committed step is gone, the job may go on from a state
  // as old as this one. It is for one loss: it ends with the next commit.
  struct RollBack {
    Step to;
    std::optional<std::uint64_t> said_at;  // Coordinator::steps_ever() of that loss; none: of the first that there is

    RollBack(Step step, std::optional<std::uint64_t> steps = {})
        : to(step), said_at(steps) {}  // NOLINT: as one says it
    std::string text() const;
  };
  std::optional<RollBack> roll_back_to;
  // A job that has lost everybody starts again without the replicas that have not come for so long; zero: 15 × silence.
  Duration start_patience{};
  AuditConfig audit;
  LinkRule links{.full_mesh_members = 64};  // with whom a member is connected
  bool round_trips = true;                  // the ring's order follows those that are measured
  // An operator's word where replicas differ and the job has stopped after step `at`: this one is wrong.
  struct Drop {
    ReplicaId replica;
    Step at;
  };
  std::optional<Drop> drop;

  Dealing dealing() const {
    return {.batch = batch,
            .together = constant_batch ? batch * replicas : 0,
            .unit = std::gcd(batch, std::uint64_t{ranks})};
  }
  // Of logs, and releases, that do not say theirs.
  static std::uint64_t unit_before(std::uint64_t batch, std::uint32_t ranks) { return batch % ranks == 0 ? ranks : 1; }
};

}  // namespace rejoin::membership
