// Who is waited for, or has been lost, and what the coordinator is told of that.
#include <algorithm>

#include "base/events.h"
#include "base/fail.h"
#include "base/log.h"
#include "rejoin/driver.h"

namespace rejoin {

namespace {

constexpr Duration kStallWorthTelling = std::chrono::seconds(1);  // of a wait

}  // namespace

proto::Accusation& Driver::accuse(const ftar::Member& suspect, const std::string& what) {
  auto& accusation = *reports_.emplace_back().mutable_accusation();
  accusation.set_replica(config_.replica.value);
  accusation.set_rank(config_.rank);
  accusation.set_epoch(machine_.epoch().value);
  accusation.set_suspect(suspect.replica.value);
  accusation.set_what(what);
  return accusation;
}

proto::Accusation& Driver::accuse_of_loss(ReplicaId suspect, const Broken& broken) {
  auto& accusation = accuse({.replica = suspect, .incarnation = {}}, broken.why);
  accusation.set_lost(true);
  accusation.set_found(broken.found);
  return accusation;
}

void Driver::accuse_of_wait(const ftar::Wait& wait) {
  const Duration patience = wait.on_trainers ? patience_with_compute() : silence_;
  auto& accusation = accuse(*wait.on, wait.what);
  accusation.set_only_waiting(wait.since <= patience);
  accusation.set_waited_ms(static_cast<std::uint64_t>(milliseconds(wait.since)));
  accusation.set_unconnected(wait.unconnected);
  accusation.set_tells_connections(true);
  record(accusation);
}

// Repeated as it is, an accusation is recorded once.
void Driver::record(const proto::Accusation& accusation) {
  const std::pair which(accusation.epoch(), accusation.lost());
  if (accusation.only_waiting() || std::exchange(accused_[accusation.suspect()], which) == which) return;
  events::record(events::Kind::accused,
                 {.epoch = accusation.epoch(),
                  .step = machine_.step().value,
                  .replica = accusation.suspect(),
                  .a = accusation.waited_ms(),
                  .b = accusation.lost()},
                 accusation.what());
}

// Over a slow link what is on its way when an epoch begins lands for long. The others, who wait for this rank alone,
// see nothing of that.
void Driver::excuse_flush(const std::vector<ftar::Wait>& waits, TimePoint now) {
  if (waits.empty() || !waits.front().to_land) {
    landing_since_ = {};
    return;
  }
  if (landing_since_ == TimePoint{}) landing_since_ = now;
  const Duration taken = now - landing_since_;
  const bool lands = waits.front().since <= silence_ / 4;
  if (!lands || taken < silence_ / 4 || taken > config_.patience || now - excused_at_ < silence_ / 8) return;
  excuse(fmt::format("{}, which land one by one", waits.front().what), true, landing_since_, now);
}

// To be changed, if at all, before the next report.
proto::Accusation& Driver::excuse(std::string why, bool excused, TimePoint since, TimePoint now) {
  excused_at_ = now;
  auto& excuse = accuse({.replica = config_.replica, .incarnation = {}}, std::move(why));
  excuse.set_only_waiting(true);
  excuse.set_excused(excused);
  excuse.set_waited_ms(static_cast<std::uint64_t>(milliseconds(now - since)));
  return excuse;
}

// Nothing waits in silence: after a second the log says for whom, and the coordinator's status then or after a quarter
// of the silence, whichever is sooner; what lasts too long is for the coordinator to judge.
void Driver::look_for_stalls(TimePoint now) {
  if (now - stall_checked_ < silence_ / 16) return;
  stall_checked_ = now;
  if (finished_ || !machine_.member() || !machine_.has_contributors()) return;
  // Said once, it may have been lost with a coordinator or a daemon that was away.
  if (now - broken_reported_ >= silence_ / 4) {
    broken_reported_ = now;
    for (const auto& [replica, broken] : broken_) accuse_of_loss(replica, broken);
  }
  excuse_digests(now);
  // Also by whom nobody is waited for any more: what it has sent, others may wait for.
  ring_->drop_unanswered(deadlines::kUnanswered.of(silence_), now);
  if (machine_.reduced()) return;
  excuse_trainer(now);
  const auto waits = ring_->waits(now);
  excuse_flush(waits, now);
  // Who has no connection with one member can't do its part towards the others, and they wait for that, as it does for
  // theirs. So it accuses all whom it has no connection with, and nobody else.
  const bool unconnected = std::ranges::any_of(waits, [](const auto& wait) { return wait.unconnected; });
  // A word of another wait takes that back: at once, since the coordinator may be about to judge.
  const bool connected = said_unconnected_ && !unconnected;
  for (const auto& wait : waits) {
    if (wait.since > kStallWorthTelling && stall_reported_for_ != machine_.step().value) {
      stall_reported_for_ = machine_.step().value;
      events::record(events::Kind::waits,
                     {.step = machine_.step().value,
                      .replica = wait.on ? wait.on->replica.value : config_.replica.value,
                      .a = static_cast<std::uint64_t>(milliseconds(wait.since))},
                     wait.what);
      logger().warn("step {} waits for replica {} rank {}: {} ({:.0f} ms)", machine_.step(),
                    wait.on ? wait.on->replica : config_.replica, config_.rank, wait.what, milliseconds(wait.since));
    }
    const bool counts = wait.on && (connected || wait.since > std::min(kStallWorthTelling, silence_ / 4));
    if (!counts || (unconnected && !wait.unconnected)) continue;
    accuse_of_wait(wait);
    said_unconnected_ = unconnected;
    if (!unconnected) break;
  }
}

}  // namespace rejoin
