// What a cluster may cost: time until it is complete again, time without a decision, epochs, and what it may still
// hold.
#include <fmt/format.h>

#include <algorithm>

#include "sim/world.h"

namespace rejoin::sim {

namespace {

constexpr int kSettled = 30;  // silences from the last fault until it is complete again and has committed some steps
constexpr std::uint64_t kStepsAfter = 5;
constexpr int kStall = 5;           // silences between two decisions where nothing is going wrong
constexpr std::size_t kEpochs = 4;  // begun for each fault
constexpr std::size_t kEpochsFree = 16;
constexpr std::size_t kUnheard = 64 * KiB;  // bytes of messages on their way to one peer; seen: 28

}  // namespace

bool World::settled() const {
  if (deciding() == nullptr) return false;
  const auto& members = deciding()->members();
  return rivals_.empty() && members.size() == shape.replicas &&
         std::none_of(members.begin(), members.end(), [](const auto& member) { return member.catching_up; });
}

// What somebody has more of than a cluster of this shape needs while all contribute and nobody catches up.
std::optional<std::string> World::leaked() const {
  const auto held = [&](const Process& process) {
    transport::sim::Fabric::Held all;
    for (const auto* rail : process.rails) {
      const auto one = fabric_.held(*rail);
      all.endpoints = std::max(all.endpoints, one.endpoints);
      all.regions += one.regions;
    }
    return all;
  };
  std::uint32_t buckets = 0;
  for (const auto& tensor : model().tensors()) buckets = std::max(buckets, tensor.bucket + 1);
  const auto& members = deciding()->members();
  const std::size_t of_trainer = 2 * buckets + 1;  // inputs, outputs and staging
  for (const auto& ranks : trainers_)
    for (const auto& trainer : ranks) {
      if (!trainer) continue;  // it has just been killed
      const auto of = held(*trainer);
      const auto place = std::ranges::find(members, ReplicaId(trainer->replica), &membership::MemberState::replica);
      const auto links =
          links_of(job.links, static_cast<std::uint32_t>(place - members.begin()), shape.replicas, shape.replicas)
              .size();
      if (of.endpoints > links || (job.links.full_mesh_members && of.endpoints < links))
        return fmt::format("replica {} rank {} has {} connections on a rail, and should have {}", trainer->replica,
                           trainer->rank, of.endpoints, links);
      const bool coded = coding_of(*trainer) != ftar::Coding::off;  // they have a room of their own
      if (of.regions > shape.rails * (of_trainer + coded))
        return fmt::format("replica {} rank {} has {} regions", trainer->replica, trainer->rank, of.regions);
      if (const auto pins = trainer->pins_in_use(); pins > 0)
        return fmt::format("{} pins of replica {} rank {} are in use", pins, trainer->replica, trainer->rank);
    }
  for (const auto& daemon : daemons_) {
    if (!daemon) continue;
    const auto of = held(*daemon);
    if (of.endpoints > 0) return fmt::format("node {} has {} connections of streams", daemon->node, of.endpoints);
    if (of.regions > 2 * shape.rails * daemon->ranks())  // the state, and the shadow buffer
      return fmt::format("node {} has {} regions", daemon->node, of.regions);
  }
  return std::nullopt;
}

// What waits for one peer, who may stand still: no protocol says more before it is answered.
void World::check_queues(const Process& process) {
  for (const auto* rail : process.rails)
    if (const auto unheard = fabric_.held(*rail).unheard; unheard > kUnheard)
      checker().violate("bounded-memory", fmt::format("process {} has sent {} bytes of messages to one peer, which has "
                                                      "yet to hear them",
                                                      process.instance, unheard));
}

// Where nothing has gone wrong for a while there is a decision every now and then.
void World::on_decision() {
  const TimePoint from = std::max(decided_at_, disturbed_until_);
  decided_at_ = now();
  if (decided_at_ > from + kStall * job.silence)
    checker().violate("progress", fmt::format("nothing was decided for {:.0f} ms, and nothing had gone wrong",
                                              milliseconds(decided_at_ - from)));
}

// After the last fault. `target`: committed steps that prove that it goes on; 0: not all are back.
bool World::recovered_again(std::uint64_t& target) {
  std::optional<std::string> leak;
  if (!settled()) {
    target = 0;
  } else if (options_.run_for) {
    faults_end_ = now();  // it is complete: no limit until the next failure
  } else if (const std::uint64_t committed = deciding()->committed().value; target == 0) {
    target = committed + kStepsAfter;
  } else if (committed >= target) {
    leak = leaked();
    if (!leak) return true;
  }
  const Duration budget = kSettled * job.silence;
  if (deciding() != nullptr) faults_end_ = std::max(faults_end_, deciding()->held_back_until());
  if (now() <= faults_end_ + budget) return false;
  if (leak) checker().violate("bounded-memory", *leak);
  else
    checker().violate("progress", fmt::format("{:.0f} s after the last fault: {}", seconds(budget),
                                              deciding() != nullptr
                                                  ? fmt::format("step {} is committed, {} members",
                                                                deciding()->committed(), deciding()->members().size())
                                                  : "no coordinator decides"));
  return false;
}

// Where several replicas are killed or cut off at once, each goes, comes and is promoted by itself.
void World::check_epochs() {
  std::uint64_t losses = 0;
  const auto concerns_all = [](FaultKind kind) {
    return kind == FaultKind::kill_some || kind == FaultKind::kill_all || kind == FaultKind::older_log ||
           kind == FaultKind::cut_replica;
  };
  for (const auto& fault : outcome_.faults) losses += concerns_all(fault.kind) ? shape.replicas : 1;
  if (const auto epochs = outcome_.counts["epoch begun"]; epochs > kEpochs * losses + kEpochsFree && !options_.run_for)
    checker().violate("progress", fmt::format("{} epochs were begun for {} faults", epochs, outcome_.faults.size()));
}

}  // namespace rejoin::sim
