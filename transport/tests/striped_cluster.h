// Two striped engines over simulated rails, for their tests.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
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

// A rail whose owner looks at its events when it is let: until then they lie there, as those of a NIC or of a thread.
// And one piece's completion may come long after those of others, as where one of a NIC's queue pairs waits for an
// acknowledgement: a write's of `late_length`, until it is let or its endpoint ends.
class Unread final : public Engine {
 public:
  explicit Unread(std::unique_ptr<Engine> rail) : rail_(std::move(rail)) {}
  bool is_read = true;
  std::uint64_t late_length = 0;
  std::optional<Event> late;
  std::uint64_t writes = 0;
  std::uint64_t unseen = 0;  // so many of the next links come up for the peer alone: here only their end is seen

  void let_late_complete() { due_.push_back(*std::exchange(late, {})); }

  Result<Address> listen(const Address& where) override { return rail_->listen(where); }
  Result<EndpointId> connect(const Address& peer, BytesView hello) override { return rail_->connect(peer, hello); }
  Result<RegionId> register_region(std::span<std::byte> memory, MemoryKind kind, Access access) override {
    return rail_->register_region(memory, kind, access);
  }
  void deregister(RegionId region) override { rail_->deregister(region); }
  RemoteRegion remote(RegionId region) const override { return rail_->remote(region); }
  std::uint64_t refused() const override { return rail_->refused(); }
  Result<> send(EndpointId endpoint, BytesView message) override { return rail_->send(endpoint, message); }
  Result<> write(EndpointId endpoint, std::span<const Write> posted) override {
    writes += posted.size();
    for (const auto& one : posted)
      if (late_length > 0 && one.length == late_length) of_late_ = one.context;
    return rail_->write(endpoint, posted);
  }
  Result<> read(EndpointId endpoint, std::span<const Read> reads) override { return rail_->read(endpoint, reads); }
  std::span<const Event> poll() override {
    if (!is_read) return {};
    events_ = std::exchange(due_, {});
    for (const auto& event : rail_->poll()) {
      if (is_up(event.kind) && unseen > 0) --unseen, unseen_.insert(event.endpoint.value);
      if (event.kind != EventKind::closed && unseen_.contains(event.endpoint.value)) continue;
      if (event.kind == EventKind::completed && event.value == of_late_ && !event.error) {
        late = event;
        continue;
      }
      if (event.kind == EventKind::closed) end_late(event.endpoint, events_);
      events_.push_back(event);
    }
    return events_;
  }
  bool arm() override { return rail_->arm(); }
  int event_fd() const override { return rail_->event_fd(); }
  void close(EndpointId endpoint) override {
    end_late(endpoint, due_);
    rail_->close(endpoint);
  }

 private:
  static bool is_up(EventKind kind) { return kind == EventKind::connected || kind == EventKind::accepted; }
  // Its owner never learns that it has landed.
  void end_late(EndpointId endpoint, std::vector<Event>& events) {
    if (!late || late->endpoint != endpoint) return;
    late->error = Error{ErrorCode::unavailable, "the peer is gone"};
    events.push_back(*std::exchange(late, {}));
  }

  std::unique_ptr<Engine> rail_;
  std::vector<Event> events_, due_;
  std::optional<std::uint64_t> of_late_;
  std::set<std::uint64_t> unseen_;
};

struct Cluster {
  VirtualClock clock;
  sim::Fabric fabric;
  Side a, b;
  // Each side looks at its events once in so many turns, on average: what has landed and been acknowledged by a NIC
  // lies there unread while rails end.
  std::uint64_t laziness = 1;
  std::mt19937_64 random{1};
  Unread *first_of_a = nullptr, *first_of_b = nullptr, *second_of_a = nullptr, *second_of_b = nullptr;  // their rails

  // The first rail is slow to come up by `slow`.
  explicit Cluster(std::uint64_t seed, int rails = 2, Duration slow = {}, const Options& options = kOptions)
      : fabric({.seed = seed, .detection = std::chrono::microseconds(500), .late_writes = true}, clock) {
    for (Side* side : {&a, &b}) {
      std::vector<std::unique_ptr<Engine>> engines;
      for (int i = 0; i < rails; ++i) {
        engines.push_back(fabric.make_engine());
        side->rails.push_back(engines.back().get());
        if (i > 1) continue;
        auto unread = std::make_unique<Unread>(std::move(engines.back()));
        (side == &a ? (i == 0 ? first_of_a : second_of_a) : (i == 0 ? first_of_b : second_of_b)) = unread.get();
        engines.back() = std::move(unread);
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
