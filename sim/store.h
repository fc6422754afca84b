// The store that several simulated coordinators share, as etcd is: linearizable, and at times slow, away, or without an
// answer. A request may be done although its sender never hears of it, and long after the sender has given it up.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>

#include "control.pb.h"
#include "membership/store.h"
#include "sim/random.h"

namespace rejoin::sim {

class World;

class Store {
 public:
  enum class Judged : std::uint8_t { no, yes };  // what is written there is the job's
  explicit Store(World& world, Judged judged = Judged::yes);
  // Of the coordinator of this number, whose process is `instance`; the answer goes to it.
  void submit(std::uint32_t coordinator, std::uint64_t instance, const membership::StoreRequest& request);
  void begin_with(const std::vector<proto::LogRecord>& records);
  void clear();

  // Faults:
  void go_away(TimePoint until);                             // it answers nobody
  void cut_off(std::uint32_t coordinator, TimePoint until);  // this one can't reach it
  // It answers who reads, and does nothing else: it is full, or this one's role there may only read.
  void take_nothing(TimePoint until, std::optional<std::uint32_t> from);
  // To an older copy of what this leader has written, with fewer records than this; false: there is none.
  bool set_back(Random& random, std::uint64_t below);
  bool lacks_records() const { return lacks_records_; }  // since then, and what the leader knows has not replaced them
  bool lacked_records() const;                           // by what somebody may hear now

  const proto::Leader& leader() const { return leader_; }
  // Whether this instance is the leader, or was a short time ago: an answer to it may be on its way.
  bool has_led(std::uint64_t instance) const;

 private:
  // What is readable, and was at the time of a write.
  struct State {
    std::uint64_t leader_revision = 0, alive_revision = 0, snapshot_position = 0;
    std::uint64_t revision = 0, snapshot_revision = 0;
    std::uint64_t begin = 0, end = 0;  // of the log, in records
    std::string leader;
    std::shared_ptr<const std::string> snapshot;
    std::map<std::uint64_t, std::shared_ptr<const std::string>> log;
  };
  membership::StoreAnswer execute(std::uint32_t coordinator, const membership::StoreRequest& request, bool late);
  membership::StoreAnswer read(const membership::StoreRequest& request);
  bool append(const membership::StoreRequest& request);
  void put_entry(std::uint64_t position, const std::string& bytes);
  void answer_with(std::uint64_t instance, Duration delay, membership::StoreAnswer answer);

  World& world_;
  const bool judged_;
  Random random_;
  State state_;
  std::deque<State> before_, backups_;  // the last few; … of this leader
  std::uint64_t revision_ = 0;
  bool lacks_records_ = false;
  std::optional<TimePoint> lacked_until_;
  proto::Leader leader_;
  std::map<std::uint64_t, TimePoint> led_until_;  // by instance
  TimePoint away_until_{}, full_until_{};
  std::map<std::uint32_t, TimePoint> cut_until_, reads_only_until_;
  std::uint64_t generation_ = 0;  // cleared so often: what is under way to the one before is lost
};

}  // namespace rejoin::sim
