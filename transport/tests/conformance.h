// What the conformance tests stand on. Each backend brings a Bench: engines in this process that can reach each other.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/sanitized.h"
#include "device/tests/library.h"
#include "transport/factory.h"
#include "transport/sim/fabric.h"
#include "transport/staged/factory.h"
#include "transport/striped/factory.h"
#include "transport/tests/any_access.h"
#include "transport/threaded/factory.h"

namespace rejoin::transport {

struct Bench {
  virtual ~Bench() = default;
  virtual std::unique_ptr<Engine> engine() = 0;
  virtual void progress() {}
  virtual Address anywhere() const { return {"127.0.0.1:0"}; }
};

struct SimBench : Bench {
  VirtualClock clock;
  sim::Fabric fabric{{.seed = 7}, clock};
  std::unique_ptr<Engine> engine() override { return fabric.make_engine(); }
  void progress() override { fabric.step(); }
};

struct StripedSimBench : SimBench {
  std::unique_ptr<Engine> engine() override {
    std::vector<std::unique_ptr<Engine>> rails;
    for (int i = 0; i < 3; ++i) rails.push_back(fabric.make_engine());
    return *striped::make_engine(std::move(rails), {}, clock);
  }
};

// Over any of the others: what is registered is taken for a GPU's, which that one can't reach, and staged.
struct StagedBench : Bench {
  explicit StagedBench(std::unique_ptr<Bench> b) : below(std::move(b)) {}
  std::unique_ptr<Bench> below;
  std::unique_ptr<Engine> engine() override {
    return *staged::make_engine(below->engine(), device::test_gpu(),
                                {.slot_bytes = 64 * KiB, .slots = 4, .direct = false});
  }
  void progress() override { below->progress(); }
  Address anywhere() const override { return below->anywhere(); }
};

struct RealBench : Bench {
  explicit RealBench(std::string t) : transport(std::move(t)) {}
  std::string transport;
  std::unique_ptr<Engine> engine() override {
    auto made = make_engine(transport);
    if (!made) throw std::runtime_error(made.error().message);
    return std::move(*made);
  }
};

// Each engine on a thread of its own.
struct ThreadedBench : RealBench {
  using RealBench::RealBench;
  std::unique_ptr<Engine> engine() override { return *threaded::make_engine(RealBench::engine()); }
};

// An engine with what has happened to it, counted.
struct Node {
  std::unique_ptr<Engine> engine;
  Address address;
  std::vector<Event> events;
  std::vector<std::string> messages;
  std::map<std::uint64_t, int> completions;  // context → how often
  std::map<std::uint64_t, std::optional<Error>> outcome;
  std::vector<std::uint64_t> written;
  std::vector<EndpointId> connected, accepted, closed;
  std::string hello;
  std::function<void(const Event&)> on_event = [](const Event&) {};

  void poll() {
    for (const auto& event : engine->poll()) {
      switch (event.kind) {
        case EventKind::connected: connected.push_back(event.endpoint); break;
        case EventKind::accepted:
          accepted.push_back(event.endpoint);
          hello = as_text(event.message);
          break;
        case EventKind::message: messages.emplace_back(as_text(event.message)); break;
        case EventKind::written: written.push_back(event.value); break;
        case EventKind::completed:
          ++completions[event.value];
          outcome[event.value] = event.error;
          break;
        case EventKind::closed: closed.push_back(event.endpoint); break;
      }
      on_event(event);
    }
  }
};

struct Conformance : testing::TestWithParam<std::string> {
  std::unique_ptr<Bench> bench;
  std::vector<std::unique_ptr<Node>> nodes;

  MemoryKind kind = MemoryKind::host;

  static std::unique_ptr<Bench> bench_of(const std::string& backend) {
    if (backend.starts_with("staged_")) return std::make_unique<StagedBench>(bench_of(backend.substr(7)));
    if (backend.starts_with("threaded_")) return std::make_unique<ThreadedBench>(backend.substr(9));
    if (backend == "sim") return std::make_unique<SimBench>();
    if (backend == "striped_sim") return std::make_unique<StripedSimBench>();
    return std::make_unique<RealBench>(backend);
  }
  void SetUp() override {
    bench = bench_of(GetParam());
    if (GetParam().starts_with("staged_")) kind = MemoryKind::cuda;
  }

  Node& node() {
    nodes.push_back(std::make_unique<Node>());
    nodes.back()->engine = bench->engine();
    nodes.back()->address = *nodes.back()->engine->listen(bench->anywhere());
    return *nodes.back();
  }

  // Progress until `done`; fails after a deadline that only a broken backend meets.
  [[nodiscard]] bool until(const std::function<bool()>& done, std::chrono::seconds limit = std::chrono::seconds(30)) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    while (!done()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      bench->progress();
      for (auto& n : nodes) n->poll();
    }
    return true;
  }
  static constexpr int kLooks = kSanitized ? 500 : 2000;  // each takes several times as long there
  void settle() {
    for (int i = 0; i < kLooks; ++i) {
      bench->progress();
      for (auto& n : nodes) n->poll();
    }
  }
  void settle(Node& alone) {  // as if the others' progress threads stood still
    for (int i = 0; i < kLooks; ++i) {
      bench->progress();
      alone.poll();
    }
  }

  struct Pair {
    Node &a, &b;
    EndpointId at_a, at_b;
  };
  Pair pair() {
    Node &a = node(), &b = node();
    const EndpointId at_a = *a.engine->connect(b.address, as_bytes("hello there"));
    EXPECT_TRUE(until([&] { return !a.connected.empty() && !b.accepted.empty(); }));
    return {a, b, at_a, b.accepted.at(0)};
  }
};

}  // namespace rejoin::transport
