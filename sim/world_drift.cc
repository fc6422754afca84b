// Faults that make replicas differ, and the operator who says which of two is wrong.
#include <fmt/format.h>

#include "sim/world.h"

namespace rejoin::sim {

bool World::is_of_bits(FaultKind kind) {
  return kind == FaultKind::drift || kind == FaultKind::flip_reduced || kind == FaultKind::flip_state;
}

void World::damage_bits(const Fault& fault) {
  Trainer* trainer = trainers_[fault.replica][fault.rank].get();
  if (trainer == nullptr) return;
  bits_damaged_ = true;
  if (fault.kind == FaultKind::flip_reduced) {
    // Where all replicas have the same bit flipped in one step, as while it stands still, nobody can tell; in doubling,
    // which takes the place of all to all where not all are connected, where two have that give each other their sums.
    const bool doubles = shape.doubling || shape.links.full_mesh_members;
    auto& [step, those] = flipped_[fault.rank];
    if (std::exchange(step, trainer->next_step()) != trainer->next_step()) those.clear();
    if (those.insert(fault.replica); those.size() < (doubles ? 2 : shape.replicas)) trainer->flip_a_bit();
    return;
  }
  // Only while all others are right and nothing else is going on, so that there is somebody to say who is wrong.
  if (shape.replicas < 2 || !settled() || now() < disturbed_until_ || somebody_is_wrong() || deciding()->stopped())
    return;
  if (fault.kind == FaultKind::drift) trainer->drift();
  else if (!trainer->flip_state()) return;
  count(fmt::format("made wrong by {}", to_string(fault.kind)));
}

void World::went_wrong(const Trainer& trainer, std::uint64_t version) {
  if (checker().wrong(trainer.rank_instance) || !is_of_the_job(trainer)) return;
  // Within the period; a joiner's finding may make it begin anew once.
  checker().on_wrong(trainer.rank_instance, version, 2 * job.audit.period + 1);
  note("replica {} rank {} has another state than its peers from version {} on", trainer.replica, trainer.rank,
       version);
}

bool World::somebody_is_wrong() const {
  for (const auto& ranks : trainers_)
    for (const auto& trainer : ranks)
      if (trainer && (trainer->drifts() || checker().wrong(trainer->rank_instance))) return true;
  return false;
}

// The operator knows who is wrong; where it was only bits on their way, any will do.
void World::drop_who_is_wrong() {
  std::optional<ReplicaId> wrong;
  const auto& decisions = *deciding();
  for (const auto& member : decisions.members()) {
    if (!wrong && !member.catching_up) wrong = member.replica;
    for (const auto& trainer : trainers_[member.replica.value])
      if (trainer && checker().wrong(trainer->rank_instance)) wrong = member.replica;
  }
  if (!wrong) return;
  count("operator: drop a replica");
  give_word({.roll_back_to = {}, .drop = membership::JobConfig::Drop{*wrong, decisions.committed()}},
            fmt::format("its operator says that replica {} is wrong", *wrong));
}

}  // namespace rejoin::sim
