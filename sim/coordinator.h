// The coordinator's process: what CoordinatorServer does around membership::Coordinator and its log.
#pragma once

#include "membership/coordinator.h"
#include "sim/process.h"

namespace rejoin::sim {

class World;

class Coordinator final : public Process {
 public:
  Coordinator(World& world, std::uint32_t machine, const std::vector<proto::LogRecord>& log);
  void tick() override;
  void on_resumed() override;
  void on_message(std::uint64_t link, const proto::FromNode& message);
  void on_link_lost(std::uint64_t link);
  const membership::Coordinator& decisions() const { return machine_; }

 private:
  void compare_with_log();
  void recover(const std::vector<proto::LogRecord>& log);
  void carry_out(membership::Actions actions);
  void send(const membership::Actions& actions);

  World& world_;
  membership::Coordinator machine_;
  std::optional<membership::Actions> in_append_;  // to be sent when its disk has answered
};

}  // namespace rejoin::sim
