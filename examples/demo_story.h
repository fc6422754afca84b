// What happened in a run, out of the event files of all its processes: read while it goes on for the live view, and
// evaluated at the end. Knows only what the processes wrote.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "examples/demo_job.h"
#include "membership/ledger.h"

namespace rejoin::demo {

inline double ms(std::int64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-6; }

struct Event {
  std::int64_t t = 0;  // CLOCK_MONOTONIC nanoseconds
  std::string who, kind;
  int pid = 0;
  nlohmann::json fields;
  std::uint64_t number(const char* key) const { return fields.value(key, std::uint64_t{0}); }
};

struct CatchUpState {
  std::uint64_t bytes = 0, total = 0;
  double rate = 0;
  std::uint64_t sources = 0;
};

struct ReplicaState {
  std::string role = "starting";
  std::uint64_t version = 0;
  double loss = 0;
  std::map<std::uint32_t, CatchUpState> catch_up;  // by rank, of the latest
};

// What the demo did to the job.
struct Deed {
  std::int64_t t = 0;
  // kill, hang, kill_daemon, kill_coordinator, kill_source, kill_joiner, pause_coordinator, pause_all; of several
  // coordinators kill_leader, pause_leader, kill_etcd, pause_etcd
  std::string kind;
  std::uint32_t replica = 0, rank = 0;
  std::uint64_t step = 0;
  std::string who = {};    // which coordinator, or members of etcd
  std::int64_t until = 0;  // goes on, or is started again, from then on
};

class Story {
 public:
  explicit Story(std::string directory) : directory_(std::move(directory)) {}
  // Reads what is new; returns it.
  std::vector<Event> read();
  void did(Deed deed) { deeds_.push_back(std::move(deed)); }
  void undone(const std::string& kind, std::int64_t t);  // of the last such deed
  // These processes' events are these names', whatever they say. Before they are read.
  void name(const std::map<int, std::string>& by_pid) { names_ = by_pid; }

  const std::vector<Event>& events() const { return events_; }
  const std::map<std::uint32_t, ReplicaState>& replicas() const { return replicas_; }
  std::uint64_t committed() const { return committed_; }
  const std::vector<Deed>& deeds() const { return deeds_; }
  std::vector<std::pair<std::uint64_t, double>> losses() const;  // step, mean over contributors

  // The --json document, but for what the caller knows better (digest comparison with another run, settings).
  // `logs`: of each coordinator.
  nlohmann::json report(const JobSettings& settings, const std::map<std::string, std::string>& logs) const;

 private:
  void take(const Event& event);
  nlohmann::json failure(const Deed& deed) const;
  nlohmann::json catch_ups() const;
  nlohmann::json step_times() const;

  const std::string directory_;
  std::map<std::string, std::size_t> offsets_;
  std::map<int, std::string> names_;
  std::vector<Event> events_;
  std::vector<Deed> deeds_;
  std::map<std::uint32_t, ReplicaState> replicas_;
  std::map<std::uint64_t, std::map<std::string, double>> loss_;  // step → who → loss
  std::uint64_t committed_ = 0;
};

}  // namespace rejoin::demo
