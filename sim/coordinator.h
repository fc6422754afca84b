// The coordinator's process: what CoordinatorServer does around membership::Coordinator and its log. Where there are
// several, see replicated.h.
#pragma once

#include "membership/coordinator.h"
#include "membership/store.h"
#include "sim/uplink.h"

namespace rejoin::sim {

class World;

class CoordinatorProcess : public Process, public Station {
 public:
  CoordinatorProcess(std::uint64_t process, std::uint32_t of, std::uint32_t at, Random chance, std::size_t of_history)
      : Process(process, at, chance), history(of_history), number(of) {}
  void welcome(World& world, std::uint64_t link, const proto::FromNode& message);  // as NodeListener does
  virtual const membership::Coordinator* decisions() const = 0;                    // null: it takes none
  virtual void on_answer(const membership::StoreAnswer&) {}                        // of its store
  virtual bool of_the_job() const { return true; }                                 // this one, and no other
  const std::size_t history;                                                       // of which its log is
  const std::uint32_t number;                                                      // among the coordinators
};

class Coordinator final : public CoordinatorProcess {
 public:
  Coordinator(World& world, std::uint32_t machine, const std::vector<proto::LogRecord>& log);
  void tick() override;
  void on_resumed() override;
  void on_message(std::uint64_t link, const proto::FromNode& message) override;
  void on_link_lost(std::uint64_t link) override;
  const membership::Coordinator* decisions() const override { return &machine_; }

 private:
  void recover(const std::vector<proto::LogRecord>& log);
  void carry_out(membership::Actions actions);
  void send(const membership::Actions& actions);

  World& world_;
  membership::Coordinator machine_;
  bool knows_of_later_decisions_ = false;         // than its log's
  std::optional<membership::Actions> in_append_;  // to be sent when its disk has answered
};

}  // namespace rejoin::sim
