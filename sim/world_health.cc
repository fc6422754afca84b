// Which replicas are healthy, and what that promises: they stay, and go on soon.
#include <fmt/format.h>

#include <algorithm>

#include "sim/world.h"

namespace rejoin::sim {

namespace {

// Whoever stands still for less is to be heard again in time.
Duration short_of(Duration silence) { return silence * 3 / 4; }

enum class Harm { nobody, one, all };

// Whom it harms. What is not known to harm one replica alone may harm all.
Harm harm_of(FaultKind kind) {
  switch (kind) {
    case FaultKind::kill_coordinator:
    case FaultKind::crash_in_append:
    case FaultKind::disk_full:
    case FaultKind::slow_disk:
    case FaultKind::stop_coordinator:
    case FaultKind::store_away:
    case FaultKind::store_cut_off:
    case FaultKind::store_read_only:
    case FaultKind::store_set_back:
    case FaultKind::damage:
    case FaultKind::damage_at_rest:
    case FaultKind::lying_joiner:
    case FaultKind::stop_stream:
    case FaultKind::pause:
    case FaultKind::stop_all: return Harm::nobody;
    case FaultKind::kill_trainer:
    case FaultKind::kill_replica:
    case FaultKind::stay_away:
    case FaultKind::hang_trainer:
    case FaultKind::slow_trainer:
    case FaultKind::busy_trainer:
    case FaultKind::slow_digest:
    case FaultKind::slow_memory:
    case FaultKind::refuse_memory:
    case FaultKind::kill_daemon:
    case FaultKind::stop_daemon:
    case FaultKind::power_loss:
    case FaultKind::second_process: return Harm::one;
    default: return Harm::all;
  }
}

// After which a healthy replica goes on soon: somebody ends or hangs, and whoever decides finds that.
bool is_found_soon(FaultKind kind) {
  switch (kind) {
    case FaultKind::kill_trainer:
    case FaultKind::kill_replica:
    case FaultKind::stay_away:
    case FaultKind::hang_trainer:
    case FaultKind::kill_daemon:
    case FaultKind::stop_daemon:
    case FaultKind::power_loss:
    case FaultKind::kill_coordinator: return true;
    default: return false;
  }
}

}  // namespace

// Before what the fault does is felt.
void World::see_whom_it_harms(const Fault& fault) {
  const TimePoint until = now() + fault.lasting + 4 * job.silence;
  health_.on_fault(now());
  const bool stalls = fault.kind == FaultKind::hang_trainer || fault.kind == FaultKind::stop_daemon;
  if (stalls && is_calm() && fault.lasting <= short_of(job.silence)) {
    count("stall of less than a silence");
    return health_.stall(fault.replica, until);
  }
  const Harm harm = harm_of(fault.kind);
  if (harm == Harm::all) health_.harm_all(until);
  if (harm == Harm::one) health_.harm(fault.replica, until);
  // A second process of another replica may be on its node.
  if (harm == Harm::one)
    for (const Trainer* one : trainers_on(node_of(fault.replica, fault.rank))) health_.harm(one->replica, until);
  if (is_found_soon(fault.kind) && !shared()) {
    if (!promptness_.watched() && !is_calm()) return;
    if (!promptness_.watched()) count("commits are due soon");
    promptness_.begin(now());
  } else {
    promptness_.end();
  }
}

// Nothing that has gone wrong is felt any more.
bool World::is_calm() const {
  return now() > disturbed_until_ && settled() && !finished() && interruptions_.empty() && checkers_.size() == 1 &&
         !bits_damaged_ && waiting_faults_.empty();
}

void World::see_who_is_healthy() {
  if (deciding() == nullptr) return;
  if (settled() && interruptions_.empty()) health_.see_all_whole(now());
  for (const auto& member : deciding()->members()) {
    const auto& ranks = trainers_[member.replica.value];
    const bool whole = rivals_.empty() && !member.catching_up && std::ranges::all_of(ranks, [&](const auto& one) {
                         return one && !one->ended && !one->stopped && one->incarnation() == member.incarnation;
                       });
    if (whole) health_.see_whole(member.replica.value, now());
  }
}

void World::check_health(const Trainer& trainer, const std::string& why) {
  if (health_.healthy(trainer.replica) && !bits_damaged_ && checkers_.size() == 1 && is_of_the_job(trainer))
    checker().violate("healthy-stays", fmt::format("replica {} rank {} is put out, and nothing is wrong with it: {}",
                                                   trainer.replica, trainer.rank, why));
}

void World::check_promptness() {
  const CoordinatorProcess* leads = leader();
  const std::uint64_t decides = leads != nullptr ? leads->instance : 0;
  // Where somebody else decides, or nobody does, all have to come back first; one that is healthy has to go on.
  bool goes_on = std::exchange(decided_by_, decides) == decides && decides != 0 && !leads->stopped;
  goes_on = goes_on && std::ranges::any_of(deciding()->members(), [&](const auto& member) {
              return !member.catching_up && health_.healthy(member.replica.value);
            });
  if (finished() || shape.evaluates || shape.long_updates) promptness_.end();
  if (!goes_on) promptness_.put_off(now());
  if (const auto late = promptness_.late(now(), job.silence))
    checker().violate("prompt", fmt::format("nothing was committed for {:.0f} ms, and a healthy replica was there",
                                            milliseconds(*late)));
}

}  // namespace rejoin::sim
