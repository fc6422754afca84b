// The processes of one training job: a coordinator, or several with the etcd that they share, a daemon for each
// replica, a trainer for each rank. Starts them, kills them, starts them again as a cluster's scheduler would.
#pragma once

#include <sys/types.h>

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/deadlines.h"
#include "base/result.h"
#include "examples/demo_etcd.h"

namespace rejoin::demo {

struct JobSettings {
  std::string binaries;  // directory of rejoind and rejoin-demo-trainer
  std::string data;
  std::uint32_t replicas = 3, ranks = 2;
  std::uint64_t steps = 150, batch = 16, parameters = 1000000, seed = 1, silence_ms = deadlines::kSilence.count();
  std::string device = "host";    // where the trainers have state and gradients
  std::string state = "session";  // who allocates them: see rejoin-demo-trainer
  std::string transport = "shm";
  std::string log_level = "warn";
  std::string store = "file";  // or etcd: then there are several coordinators
  bool several() const { return store == "etcd"; }
};

struct RankName {
  std::uint32_t replica = 0, rank = 0;
  auto operator<=>(const RankName&) const = default;
};

class Job {
 public:
  static constexpr std::size_t kCoordinators = 3;  // where there are several

  // Everything lives in `directory`: key, sockets, logs, events, output of the processes.
  Job(JobSettings settings, std::string directory);
  ~Job();

  // `more`: arguments of a trainer's first instance.
  Result<> start(const std::map<RankName, std::vector<std::string>>& more);
  std::string events_directory() const { return directory_ + "/events"; }
  std::map<std::string, std::string> log_paths() const;  // by the coordinator's name
  std::string pages() const;                             // of all coordinators, when they have started
  // All coordinators there were, by PID: their events name them all alike.
  const std::map<int, std::string>& coordinators() const { return coordinator_of_; }

  void signal_trainer(RankName rank, int signal);
  Result<> restart_coordinator();  // kill -9, and the same again on the same log
  Result<> restart_daemon(std::uint32_t replica);
  void signal_coordinator(int signal, const std::string& name = "coordinator");  // where it runs
  Etcd* etcd() { return etcd_ ? &*etcd_ : nullptr; }
  void signal_all(int signal);
  // Looks after the processes: whoever was killed, by whomever, is started again; a replica that lost a rank as a whole
  // once all its ranks have ended. A process that ended with an error, or crashed, is an error here.
  Result<> look_after(TimePoint now);
  // Of a finished job with several coordinators: until each has written down all that was decided. Then they end, and
  // what they said last is returned, by name. Of one with one coordinator: nothing.
  Result<nlohmann::json> settle();
  // A stopped rank never ends by itself.
  void end_stopped(std::uint32_t replica);

  bool finished() const { return finished_.size() == std::size_t{settings_.replicas} * settings_.ranks; }
  std::vector<std::string> output_tail(const std::string& name = "") const;  // of this process, or of all

 private:
  struct Coordinator {
    std::string name, log_directory, address = "127.0.0.1:0";
    std::string status;  // its address
    pid_t pid = 0;
    std::optional<TimePoint> lost;  // to be started again
  };
  std::string output(const std::string& name) const { return directory_ + "/" + name + ".out"; }
  Result<> start_coordinator(Coordinator& coordinator);
  Result<> start_daemon(std::uint32_t replica);
  Result<> start_trainer(RankName rank, const std::vector<std::string>& more);
  Result<> on_ended(pid_t pid, int status, TimePoint now);
  Result<> on_coordinator_ended(Coordinator& coordinator, TimePoint now);
  Result<> answer_coordinators(TimePoint now);
  // What it says of its addresses, the daemon that has just been started as `pid`, with this one among them.
  Result<nlohmann::json> wait_for_addresses(pid_t& pid, const std::string& file, const char* key);

  const JobSettings settings_;
  const std::string directory_;
  std::optional<Etcd> etcd_;
  std::vector<Coordinator> coordinators_;
  std::map<int, std::string> coordinator_of_;
  std::map<std::uint32_t, pid_t> daemons_;
  std::map<RankName, pid_t> trainers_;
  std::set<RankName> finished_;
  std::set<RankName> stopped_;
  std::map<std::uint32_t, TimePoint> lost_;  // replicas to be started again
  std::set<std::uint32_t> died_;             // replicas, since the job began, or began afresh
  TimePoint asked_{};
  std::string roll_back_word_;  // an operator's, that coordinators are started with
};

}  // namespace rejoin::demo
