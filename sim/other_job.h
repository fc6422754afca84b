// A coordinator of another job, at an address where one of this job's should be: the same code, with another log or
// another store.
#pragma once

#include "membership/replicated_coordinator.h"
#include "sim/coordinator.h"
#include "sim/store.h"

namespace rejoin::sim {

class OtherCoordinator final : public CoordinatorProcess {
 public:
  // Its log is a file's; or where there is a store, that has it.
  OtherCoordinator(World& world, std::uint32_t number, std::uint32_t machine, const membership::JobConfig& job,
                   std::vector<proto::LogRecord>& log, Store* store);
  void tick() override;
  void on_message(std::uint64_t link, const proto::FromNode& message) override;
  void on_link_lost(std::uint64_t link) override;
  void on_answer(const membership::StoreAnswer& answer) override;
  const membership::Coordinator* decisions() const override { return nullptr; }
  bool of_the_job() const override { return false; }

 private:
  using Replicated = membership::ReplicatedCoordinator;
  void carry_out(const membership::Actions& actions);
  void carry_out(const Replicated::Actions& actions);
  void send(const auto& actions);
  TimePoint local_now() const;

  World& world_;
  std::vector<proto::LogRecord>& log_;
  Store* store_;
  std::unique_ptr<membership::Coordinator> alone_;  // one of the two
  std::unique_ptr<Replicated> replicated_;
};

}  // namespace rejoin::sim
