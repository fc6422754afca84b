// A rank's driver by itself, without a thread: the time is passed in, so that what happens between two looks is decided
// by the test.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/log.h"
#include "rejoin/driver.h"
#include "rejoin/training_state.h"
#include "transport/sim/fabric.h"

namespace rejoin {

using namespace std::chrono_literals;

inline constexpr auto kSilence = 1000ms;

// The rank of the replica that came last.
struct Alone {
  VirtualClock clock;
  transport::sim::Fabric fabric;
  std::unique_ptr<transport::Engine> engine = fabric.make_engine();
  TrainingState state{1 << 22};
  std::optional<Driver> driver;
  TimePoint now{1h};

  explicit Alone(const ftar::Options& ring = {}, Duration between_rooms = {}, std::uint64_t elements = 64,
                 Duration first_steps = kSilence, const Position& from = {},
                 const std::function<void(std::function<void()>)>& aside = {})
      : fabric({.between_rooms = between_rooms}, clock) {
    spdlog::set_level(spdlog::level::off);
    const auto tensor = state.add({.name = "weights", .count = elements});
    EXPECT_TRUE(tensor && state.bucket({*tensor}) && state.allocate() && state.start(0));
    EXPECT_TRUE(engine->listen({}));
    driver.emplace(DriverConfig{.replica = ReplicaId(100),
                                .instance = 1,
                                .from = from,
                                .ring = ring,
                                .patience = kSilence,
                                .first_steps = first_steps,
                                .calls_at_once = 4,
                                .aside = aside},
                   *engine, state.owner(), state.buckets());
  }
  void register_it() {
    ASSERT_TRUE(driver->prepare());
    driver->on_welcome({}, kSilence);
    driver->notice(now);
    proto::ToNode message;
    message.mutable_registered()->set_incarnation(1000);
    driver->on_control_message(message, now);
    ASSERT_FALSE(driver->failure());
  }
  // Engines that take calls and say nothing: as those of processes do that stand still.
  std::vector<std::unique_ptr<transport::Engine>> hear_of_peers(std::uint32_t count) {
    std::vector<std::unique_ptr<transport::Engine>> peers;
    proto::ToNode message;
    for (std::uint32_t replica = 0; replica < count; ++replica) {
      auto& peer = *message.mutable_peers()->add_peers();
      peer.set_replica(replica);
      peer.set_incarnation(replica + 1);
      peers.push_back(fabric.make_engine());
      peer.set_address(peers.back()->listen({})->text);
    }
    driver->on_control_message(message, now);
    return peers;
  }
  // In a ring with so many peers, this rank between the first and the last of them.
  void plan_with_peers(std::uint32_t count, std::uint64_t epoch = 1, bool catching_up = false, bool audit = false) {
    proto::ToNode message;
    auto& plan = *message.mutable_plan();
    plan.set_epoch(epoch);
    plan.set_step(1);
    if (audit) plan.mutable_audit()->set_period(1);
    for (std::uint32_t replica = 0; replica < count; ++replica) {
      auto& member = *plan.add_members();
      member.set_replica(replica);
      member.set_incarnation(replica + 1);
    }
    auto& self = *plan.add_members();
    self.set_replica(100);
    self.set_incarnation(1000);
    self.set_catching_up(catching_up);
    driver->on_control_message(message, now);
    ASSERT_TRUE(driver->machine().member());
  }
  void pass(Duration time) {
    while (fabric.step()) {
    }
    driver->notice(now += time);
    driver->poll(now);
  }
  std::string put_out() {
    proto::ToNode message;
    message.mutable_evicted()->set_incarnation(1000);
    message.mutable_evicted()->set_reason("it was silent");
    driver->on_control_message(message, now);
    return driver->failure() ? driver->failure()->message : "";
  }
};

}  // namespace rejoin
