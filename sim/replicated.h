// One of several coordinators: what ReplicatedServer does around membership::ReplicatedCoordinator.
#pragma once

#include <deque>

#include "membership/replicated_coordinator.h"
#include "sim/coordinator.h"

namespace rejoin::sim {

class ReplicatedCoordinator final : public CoordinatorProcess {
 public:
  ReplicatedCoordinator(World& world, std::uint32_t number, std::uint32_t machine);
  void tick() override;
  void on_message(std::uint64_t link, const proto::FromNode& message) override;
  void on_link_lost(std::uint64_t link) override;
  const membership::Coordinator* decisions() const override { return machine_->leading(); }
  void on_answer(const membership::StoreAnswer& answer) override;
  std::string describe() const;

 private:
  // What it had decided as the leader of this term when it heard of later decisions than the store has.
  struct Outdated {
    std::uint64_t term = 0;
    Epoch epoch;
    Step committed;
  };
  void carry_out(membership::ReplicatedCoordinator::Actions actions);
  void check_store(const membership::ReplicatedCoordinator::Actions& actions);

  World& world_;
  std::unique_ptr<membership::ReplicatedCoordinator> machine_;
  std::optional<Outdated> outdated_;
  std::deque<TimePoint> claims_, lines_;  // the last ones: claims of the lead, and lines about the store
};

}  // namespace rejoin::sim
