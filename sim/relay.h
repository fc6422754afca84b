// A relay's process: what RelayServer does around membership::Relay.
#pragma once

#include "membership/relay.h"
#include "sim/uplink.h"

namespace rejoin::sim {

class Relay final : public Process, public Station {
 public:
  Relay(World& world, std::uint32_t number, std::uint32_t machine);
  void tick() override;
  void on_message(std::uint64_t link, const proto::FromNode& message) override;
  void on_link_lost(std::uint64_t link) override;
  Uplink& uplink() { return uplink_; }

  const std::uint32_t number;  // among the relays

 private:
  void carry_out(const membership::Relay::Actions& actions);
  TimePoint local_now() const;

  World& world_;
  membership::Relay machine_;
  Uplink uplink_;
};

}  // namespace rejoin::sim
