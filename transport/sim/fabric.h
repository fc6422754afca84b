// A deterministic network in one process: virtual time, delays from a seed, reordering of writes and between endpoints,
// links and processes that die at any moment. Everything happens in step(), one event at a time.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <random>
#include <unordered_map>

#include "base/clock.h"
#include "transport/transport.h"

namespace rejoin::transport::sim {

class SimEngine;

struct Options {
  std::uint64_t seed = 1;
  Duration min_delay = std::chrono::microseconds(1);
  Duration max_delay = std::chrono::microseconds(50);
  Duration detection = std::chrono::milliseconds(1);  // until a peer's death is seen by the transport
  Duration spread{};                                  // … and by some of its peers so much later, at most
  Duration between_rooms{};                           // what all takes longer from one room to another
  // A write's bytes leave when it is posted, and land although the poster's end has failed since, as on a real network.
  bool late_writes = false;
  // Writes land in the memory of a stopped process, as a NIC's do; it hears of them when it goes on. Otherwise, as over
  // TCP, they wait for it.
  bool lands_stopped = false;
  // Memory that is withdrawn from under a transfer costs its connection and what was said on it, as over TCP.
  bool withdrawal_breaks = false;
  // Processes can look into each other's memory, as within one machine.
  bool viewable = false;
  // A broken transport, to see whether that is noticed: closing an endpoint does not stop writes on their way.
  bool unfenced = false;
};

class Fabric {
 public:
  Fabric(Options options, VirtualClock& clock) : options_(options), clock_(clock), random_(options.seed) {}

  // The engine must not outlive the fabric. Its address is "sim:N", N counting from 0.
  std::unique_ptr<Engine> make_engine();

  // Lets the next event happen, moving the clock to it; false where nothing is under way.
  bool step();
  TimePoint next_event() const;  // TimePoint::max() where nothing is under way

  // All connections of this engine break, as when its cable is pulled: it sees `closed` now, its peers after
  // `detection`.
  void cut(const Engine& engine);
  // The process dies: what it has under way is lost from now on; its peers see `closed` after `detection`.
  void kill(const Engine& engine);
  // The process stops (SIGSTOP): nothing reaches or leaves it until resume(). Nobody is notified.
  void stop(const Engine& engine);
  void resume(const Engine& engine);
  // Where this engine is; at first all are in one room.
  void stand(const Engine& engine, std::uint32_t room);
  // Until then what it sends takes longer by `out`, and what is sent to it by `in`.
  void slow(const Engine& engine, Duration out, Duration in, TimePoint until);
  // Until then nothing of what is sent from one to the other arrives, and neither learns of it: a black hole, one way.
  void block(const Engine& from, const Engine& to, TimePoint until);
  // To which place this engine belongs; at first all are in one. And until then nothing arrives in one place of what is
  // sent from another, also from or to engines that come to them later.
  void belong(const Engine& engine, std::uint32_t place);
  void part(std::uint32_t from, std::uint32_t to, TimePoint until);
  // One of its connections (number `which` of them, as it were on a circle) is reset: the two see it, nobody else does.
  void reset(const Engine& engine, std::uint64_t which);
  // What lies between has forgotten the connections that this engine has now, as a firewall does of idle ones: nothing
  // that is sent on them arrives, their ends included, and neither side sees that until they have been dead for so
  // long.
  void forget(const Engine& engine, Duration until_found);
  // Its machine has another address from now on, which is returned. Calls to those of before get no answer at all.
  Address move(const Engine& engine);
  // Registering memory fails, so many times.
  void refuse_memory(const Engine& engine, std::uint64_t times);
  // The next registration takes this long: its caller, who can't wait in virtual time, asks for how long it stands now.
  void slow_memory(const Engine& engine, Duration takes);
  Duration take_registering(const Engine& engine);
  // The next write that lands at this engine arrives with one bit flipped.
  void damage_next_write(const Engine& engine);
  // What an engine has of each now.
  struct Held {
    std::size_t endpoints = 0, regions = 0;
    std::size_t unheard =
        0;  // bytes of messages that it has sent to one peer and that this one has yet to hear: the most
  };
  Held held(const Engine& engine) const;
  // Bytes of writes and reads from one room to another.
  std::uint64_t bytes_between_rooms() const { return bytes_between_rooms_; }
  // Writes that landed through endpoints that were closed; 0 but where `unfenced`.
  std::uint64_t stale_writes() const { return stale_writes_; }

 private:
  friend class SimEngine;
  void after(Duration delay, std::function<void()> action);
  // The engine's connection ends there now, and at its other end when that hears of it.
  void break_there(SimEngine& engine, EndpointId endpoint, Duration heard, const std::string& why);
  Duration pick(Duration least, Duration most);
  Duration delay() { return pick(options_.min_delay, options_.max_delay); }
  // Most are quick; one in sixteen comes after the poster's end may be known to have failed.
  Duration late_delay() { return random_() % 16 == 0 ? pick(options_.min_delay, options_.detection) : delay(); }
  SimEngine* engine(std::uint32_t number) const;
  std::uint32_t engine_at(std::uint32_t address) const;  // its number; nobody's, where nobody answers
  Duration slowness(std::uint32_t from, std::uint32_t to);
  Duration parted(std::uint32_t from, std::uint32_t to) const;  // for how long from now, by place
  bool far(std::uint32_t one, std::uint32_t other) const;       // in another room
  Duration least_latency(std::uint32_t from, std::uint32_t to) const;

  Options options_;
  VirtualClock& clock_;
  std::mt19937_64 random_;
  std::uint32_t engines_made_ = 0;
  std::uint64_t sequence_ = 0;
  std::uint64_t ids_made_ = 0, stale_writes_ = 0, bytes_between_rooms_ = 0;
  std::unordered_map<std::uint32_t, SimEngine*> engines_;
  static constexpr std::uint32_t kNobody = ~0u;
  std::unordered_map<std::uint32_t, std::uint32_t> moved_;  // by address: whose it is now, where that has changed
  std::map<std::pair<std::uint32_t, std::uint32_t>, TimePoint> blocked_;  // from, to: until then
  std::map<std::pair<std::uint32_t, std::uint32_t>, TimePoint> parted_;   // likewise, places
  std::map<std::pair<TimePoint, std::uint64_t>, std::function<void()>> agenda_;
  struct Moving {
    std::uint32_t from = 0, to = 0;
    EndpointId endpoint, peer;  // its ends
    RegionId local;
    std::uint64_t remote_key = 0;
  };
  std::map<std::uint64_t, Moving> moving_;  // writes and reads that have not landed, where withdrawal breaks them
};

}  // namespace rejoin::transport::sim
