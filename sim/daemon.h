// A node's daemon: what NodeServer and its stream's thread do around membership::Node and catchup::Service.
#pragma once

#include "daemon/streams.h"
#include "sim/uplink.h"

namespace rejoin::sim {

class Trainer;
class World;

class Daemon final : public Process {
 public:
  Daemon(World& world, std::uint32_t node);
  ~Daemon() override;
  void run() override;  // the stream's thread
  void tick() override;
  Duration until_run() override;
  void on_hello(std::uint64_t trainer, membership::RankConnection connection, const proto::RankUp& up);
  void on_report(membership::RankConnection rank, const proto::FromNode& report);
  void on_leave(membership::RankConnection rank);
  void drop(membership::RankConnection rank, const std::string& reason, membership::Node::Gone how);
  bool knows(membership::RankConnection rank) const { return ranks_.contains(rank) || silent_.contains(rank); }
  bool hears_who_decides() const { return machine_.coordinator_up(); }
  Uplink& uplink() { return uplink_; }
  void lie(TimePoint until);  // it passes on what is not proven
  void stop_stream(TimePoint until);
  bool stream_stands() const;
  std::string describe(catchup::RankKey key) const;
  std::size_t ranks() const { return ranks_.size(); }

  const std::uint32_t node;
  std::unique_ptr<transport::Engine> engine;  // over its rails

 private:
  struct LocalRank {
    std::uint64_t trainer = 0;  // its instance
    catchup::RankKey key;
    std::shared_ptr<TimePoint> delivered = std::make_shared<TimePoint>();  // when the last message to it arrives
    bool catching_up = false;
    std::optional<Incarnation> serves;
    std::uint64_t job = 0;
  };
  using Command = std::function<void(catchup::Service&, TimePoint)>;
  bool clear_place(Trainer& newcomer, const catchup::RankKey& key, const proto::RankUp& up);
  void look_after(const proto::Inquiry& inquiry);
  void post(Command command);  // to the stream's thread
  void on_caught_up(const catchup::Service::CompletedRank& completed);
  void on_coordinator_up();
  void on_coordinator_message(const proto::ToNode& message);
  void to_trainer(const LocalRank& rank, Duration most, std::function<void(Trainer&)> message);
  void carry_out(const membership::Node::Actions& actions);
  void follow_plan(bool other_peers);
  void serve(const LocalRank& rank);
  bool lies() const;
  TimePoint local_now() const;

  World& world_;
  std::string address_;
  membership::Node machine_;
  daemon::Streams streams_;
  std::unique_ptr<catchup::Service> service_;
  std::map<membership::RankConnection, LocalRank> ranks_;
  std::set<membership::RankConnection> silent_;  // whose processes may live
  std::vector<Command> commands_;
  Uplink uplink_;
  TimePoint reported_{}, lies_until_{};
  TimePoint stream_stands_until_{};  // by the world's clock
  std::uint64_t passed_on_ = 0;      // bytes, as they were counted last
};

}  // namespace rejoin::sim
