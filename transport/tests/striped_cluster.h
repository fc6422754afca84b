// Two striped engines over simulated rails, for their tests.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "transport/sim/fabric.h"
#include "transport/striped/factory.h"
#include "transport/tests/any_access.h"

namespace rejoin::transport::striped {

constexpr Options kOptions{.largest_piece = 4 * KiB,
                           .smallest_piece = 1 * KiB,
                           .bytes_in_flight = 16 * KiB,
                           .stall = std::chrono::milliseconds(5),
                           .first_retry = std::chrono::microseconds(300),
                           .longest_retry = std::chrono::milliseconds(2)};

struct Side {
  std::vector<Engine*> rails;
  std::unique_ptr<Engine> engine;
  std::vector<std::string> messages;
  std::vector<std::uint64_t> written;
  std::map<std::uint64_t, std::optional<Error>> completed;
  EndpointId endpoint;
  bool up = false, closed = false;
  std::function<void(const Event&)> on_event = [](const Event&) {};

  void poll() {
    for (const auto& event : engine->poll()) {
      switch (event.kind) {
        case EventKind::connected: up = true; break;
        case EventKind::accepted:
          endpoint = event.endpoint;
          up = true;
          break;
        case EventKind::message: messages.emplace_back(as_text(event.message)); break;
        case EventKind::written: written.push_back(event.value); break;
        case EventKind::completed:
          EXPECT_FALSE(completed.contains(event.value)) << "completed twice: " << event.value;
          completed[event.value] = event.error;
          break;
        case EventKind::closed: closed = true; break;
      }
      on_event(event);
    }
  }
};

struct Cluster {
  VirtualClock clock;
  sim::Fabric fabric;
  Side a, b;
  // Each side looks at its events once in so many turns, on average: what has landed and been acknowledged by a NIC
  // lies there unread while rails end.
  std::uint64_t laziness = 1;
  std::mt19937_64 random{1};

  // The first rail is slow to come up by `slow`.
  explicit Cluster(std::uint64_t seed, int rails = 2, Duration slow = {}, const Options& options = kOptions)
      : fabric({.seed = seed, .detection = std::chrono::microseconds(500), .late_writes = true}, clock) {
    for (Side* side : {&a, &b}) {
      std::vector<std::unique_ptr<Engine>> engines;
      for (int i = 0; i < rails; ++i) {
        engines.push_back(fabric.make_engine());
        side->rails.push_back(engines.back().get());
      }
      side->engine = *make_engine(std::move(engines), options, clock);
    }
    if (slow > Duration{}) fabric.slow(*b.rails[0], slow, slow, clock.now() + std::chrono::seconds(1));
    const Address address = *b.engine->listen({"sim"});
    a.endpoint = *a.engine->connect(address, as_bytes("hi"));
  }

  void turn() {
    if (!fabric.step() || fabric.next_event() > clock.now() + std::chrono::milliseconds(1))
      clock.advance(std::chrono::microseconds(100));
    for (Side* side : {&a, &b})
      if (laziness == 1 || random() % laziness == 0) side->poll();
  }
  [[nodiscard]] bool until(const std::function<bool()>& done) {
    for (int i = 0; i < 400000; ++i) {
      if (done()) return true;
      turn();
    }
    return false;
  }
};

}  // namespace rejoin::transport::striped
