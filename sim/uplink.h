// A daemon's or a relay's connections to all coordinators, or a daemon's to its relay: what daemon/coordinators.h and
// daemon/upstream.h do around membership::LeaderTracker.
#pragma once

#include <functional>
#include <vector>

#include "membership/leader_tracker.h"
#include "sim/process.h"

namespace rejoin::sim {

class World;

// Who listens to nodes: a coordinator, or a relay.
struct Station {
  virtual ~Station() = default;
  virtual void on_message(std::uint64_t link, const proto::FromNode& message) = 0;
  virtual void on_link_lost(std::uint64_t link) = 0;
};

class Uplink {
 public:
  struct Handlers {
    std::function<void()> up, down;  // of the leader
    std::function<void(const proto::ToNode&)> message;
    std::function<void(proto::LeaderView&)> hosts;
    std::function<proto::FromNode(proto::FromNode)> said;  // as this one says it
  };
  // `caller` and the stations by their numbers (world.h).
  Uplink(World& world, Process& of, std::uint32_t caller, std::vector<std::uint32_t> stations, std::string name,
         Handlers handlers);

  void on_link_up(std::uint64_t link);
  void on_link_down(std::uint64_t link);
  void on_control_message(std::uint64_t link, const proto::ToNode& message);
  void send(const proto::FromNode& message);  // to the leader, if there is one
  void tick();
  void check(TimePoint heard);  // the leader, last
  void call_all();
  void end();                                                   // its process ends: so do its connections
  bool hears(std::uint32_t coordinator, Duration since) const;  // that one as the leader, for so long at least
  std::uint64_t any_link(Random& chance) const;                 // as a rule the leader's; 0: none

 private:
  struct Connection {              // to a station
    std::uint64_t link = 0;        // 0: none
    std::uint64_t connecting = 0;  // and not answered yet; also beside one that is not heard
    TimePoint connect_at{}, heard{};
  };
  std::size_t connection_of(std::uint64_t link) const;
  void lose(std::size_t station);
  void call(std::size_t station);
  void tell(std::uint64_t link, const proto::FromNode& message);
  void hang_up(std::uint64_t link);
  void act(const membership::LeaderTracker::Actions& actions);
  TimePoint local_now() const;

  World& world_;
  Process& process_;
  const std::uint32_t caller_;
  const std::vector<std::uint32_t> stations_;
  const std::string name_;
  const Handlers handlers_;
  membership::LeaderTracker tracker_;
  std::vector<Connection> connections_;
  TimePoint hears_since_{};
};

}  // namespace rejoin::sim
