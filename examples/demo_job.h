// The processes of one training job: a coordinator, a daemon for each replica, a trainer for each rank. Starts them,
// kills them, starts them again as a cluster's scheduler would.
#pragma once

#include <sys/types.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"

namespace rejoin::demo {

struct JobSettings {
  std::string binaries;  // directory of rejoind and rejoin-demo-trainer
  std::string data;
  std::uint32_t replicas = 3, ranks = 2;
  std::uint64_t steps = 150, batch = 16, parameters = 1000000, seed = 1, silence_ms = 2000;
  std::string device = "host";    // where the trainers have state and gradients
  std::string state = "session";  // who allocates them: see rejoin-demo-trainer
  std::string transport = "shm";
  std::string log_level = "warn";
};

struct RankName {
  std::uint32_t replica = 0, rank = 0;
  auto operator<=>(const RankName&) const = default;
};

class Job {
 public:
  // Everything lives in `directory`: key, sockets, log, events, output of the processes.
  Job(JobSettings settings, std::string directory) : settings_(std::move(settings)), directory_(std::move(directory)) {}
  ~Job();

  // `more`: arguments of a trainer's first instance.
  Result<> start(const std::map<RankName, std::vector<std::string>>& more);
  std::string events_directory() const { return directory_ + "/events"; }
  std::string log_path() const { return directory_ + "/log/decisions.log"; }

  void signal_trainer(RankName rank, int signal);
  Result<> restart_coordinator();  // kill -9, and the same again on the same log
  Result<> restart_daemon(std::uint32_t replica);
  void signal_coordinator(int signal);
  void signal_all(int signal);
  // Looks after the processes: whoever was killed, by whomever, is started again; a replica that lost a rank as a whole
  // once all its ranks have ended. A process that ended with an error, or crashed, is an error here.
  Result<> look_after(TimePoint now);
  // A stopped rank never ends by itself.
  void end_stopped(std::uint32_t replica);

  bool finished() const { return finished_.size() == std::size_t{settings_.replicas} * settings_.ranks; }
  bool running(RankName rank) const { return trainers_.contains(rank); }
  std::vector<std::string> output_tail(const std::string& name = "") const;  // of this process, or of all

 private:
  Result<pid_t> spawn(const std::string& name, std::vector<std::string> arguments);
  Result<> start_coordinator(const std::string& listen);
  Result<> start_daemon(std::uint32_t replica);
  Result<> start_trainer(RankName rank, const std::vector<std::string>& more);
  Result<> on_ended(pid_t pid, int status, TimePoint now);
  // Of the daemon that has just been started as `pid`.
  Result<std::string> wait_for_address(pid_t& pid, const std::string& file, const char* key);

  const JobSettings settings_;
  const std::string directory_;
  std::string coordinator_address_;
  pid_t coordinator_ = 0;
  std::map<std::uint32_t, pid_t> daemons_;
  std::map<RankName, pid_t> trainers_;
  std::set<RankName> finished_;
  std::set<RankName> stopped_;
  std::map<std::uint32_t, TimePoint> lost_;  // replicas to be started again
};

}  // namespace rejoin::demo
