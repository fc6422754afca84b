// How a job starts, and starts again when nobody is left who holds its state.
#include <algorithm>

#include "membership/coordinator.h"

namespace rejoin::membership {

// Nobody contributes: a fresh job, or everybody was lost. It goes on from the most advanced state there is, but below
// the last committed step only if an operator says so.
void Coordinator::try_start(TimePoint now) {
  wants_roll_back_.reset();
  if (has_contributors() || finished() || (recovering_until_ && !members_.empty())) return;
  const auto ready = ready_to_start(now);
  if (ready.empty()) return;
  const Step from(*newest(ready));
  if (from < committed_) {
    if (!roll_back_to_ || from < *roll_back_to_) {
      wants_roll_back_ = from;
      return say_once(rollback_needed(from));
    }
    roll_back_to_.reset();
  }
  start_with(ready, from);
}

// All that are configured; of a job that had started before also fewer, when the others have not come for long.
std::vector<ReplicaId> Coordinator::ready_to_start(TimePoint now) {
  std::vector<ReplicaId> there;
  std::set<std::uint64_t> incarnations;
  for (const auto& [id, replica] : replicas_) {
    if (!present(id, replica.incarnation)) continue;
    there.push_back(id);
    incarnations.insert(replica.incarnation.value);
  }
  if (there.size() < config_.replicas) {
    if (!started() || there.empty()) {
      incomplete_since_.reset();
      return {};
    }
    if (!incomplete_since_) incomplete_since_ = now;
    if (now - *incomplete_since_ < start_patience()) return {};
  }
  for (auto id : there)
    if (!linked(replicas_.at(id), incarnations)) return {};
  return there;
}

Duration Coordinator::start_patience() const {
  return config_.start_patience > Duration{} ? config_.start_patience : 15 * config_.silence;
}

// The version of the most advanced of them: that of its rank that is furthest behind.
std::optional<std::uint64_t> Coordinator::newest(const std::vector<ReplicaId>& replicas) const {
  std::optional<std::uint64_t> newest;
  for (auto id : replicas) {
    std::uint64_t version = ~std::uint64_t{0};
    for (const auto& rank : replicas_.at(id).ranks) version = std::min(version, rank.version);
    newest = std::max(newest.value_or(0), version);
  }
  return newest;
}

std::string Coordinator::rollback_needed(Step from) const {
  return fmt::format(
      "step {} is committed, and the most advanced state that has come is that of step {}: bring a later checkpoint, "
      "or start the coordinator with --roll-back-to {} to give up {} steps",
      committed_, from, from, committed_.value - from.value);
}

void Coordinator::start_with(const std::vector<ReplicaId>& replicas, Step from) {
  using Fingerprint = std::vector<std::pair<std::uint64_t, std::uint64_t>>;  // version and digest of each rank
  const auto fingerprint = [&](ReplicaId id) {
    Fingerprint print;
    for (const auto& rank : replicas_.at(id).ranks) print.emplace_back(rank.version, rank.digest);
    return print;
  };
  std::map<Fingerprint, int> votes;
  for (auto id : replicas) {
    const auto print = fingerprint(id);
    if (std::all_of(print.begin(), print.end(), [&](const auto& p) { return p.first == from.value; })) ++votes[print];
  }
  // Nobody has one version on all of its ranks: such a state is of no step.
  if (votes.empty()) return say_once("no replica has the state of one step on all of its ranks");
  const auto chosen = std::max_element(votes.begin(), votes.end(), [](const auto& a, const auto& b) {
                        return a.second < b.second;
                      })->first;
  if (committed_ != from) {
    proto::LogRecord record;
    record.mutable_rolled_back()->set_version(from.value);
    record.mutable_rolled_back()->set_from(committed_.value);
    note("the job goes on from step {}; step {} was committed", from, committed_);
    actions_.append.push_back(record);
    REJOIN_CHECK(replay(record));
  }
  incomplete_since_.reset();
  members_.clear();
  for (auto id : replicas)
    members_.push_back(
        {.replica = id, .incarnation = replicas_.at(id).incarnation, .catching_up = fingerprint(id) != chosen});
  next_epoch("start");
}

}  // namespace rejoin::membership
