// Two processes for one place.
#pragma once

#include "membership/tests/coordinator_bench.h"

namespace rejoin::membership {

// Replica 1 on node 1, and a second process for its rank 0 behind another daemon.
struct Rivals : Bench {
  Rivals() {
    for (std::uint32_t r : {0u, 2u}) up(r);
    for (std::uint32_t rank : {0u, 1u}) send(1, of(1, rank, 1, 501));
    link_all();
    EXPECT_EQ(contributors(), 3u);
    inbox.clear();
  }
  static proto::FromNode of(std::uint32_t replica, std::uint32_t rank, std::uint64_t instance, std::uint64_t daemon) {
    auto message = introduction(replica, rank, instance);
    auto& its = *message.mutable_rank_up();
    its.set_daemon(daemon);
    its.set_node("node" + std::to_string(daemon));
    its.set_pid(static_cast<std::int32_t>(daemon));
    return message;
  }
  void second() { send(9, of(1, 0, 2, 509)); }
  void alive() {
    proto::FromNode message;
    message.mutable_alive()->set_replica(1);
    message.mutable_alive()->set_instance(100);
    message.mutable_alive()->set_silent_ms(7);
    send(1, message);
  }
  bool asked() const {
    const auto told = inbox.find(1);
    return told != inbox.end() &&
           std::any_of(told->second.begin(), told->second.end(), [](const auto& sent) { return sent.has_inquiry(); });
  }
  std::string refusal() {
    for (const auto& sent : inbox[9])
      if (sent.has_refused()) return sent.refused().reason();
    return "";
  }
  bool registered() { return Bench::registered(9); }
};

}  // namespace rejoin::membership
