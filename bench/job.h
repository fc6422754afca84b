// A job on this machine, to measure it: a coordinator, and for each replica a daemon and a trainer of one rank, all of
// them processes. The trainers do nothing but all-reduce one bucket and commit, step after step. What happened when is
// in their flight recordings (base/flight.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "daemon/recording.h"

namespace rejoin::bench {

struct JobSettings {
  std::uint32_t replicas = 3;
  std::uint64_t bytes = 1 * MiB;  // of the bucket, in float32
  std::string transport = "shm";
  std::uint64_t silence_ms = 500;
  std::string python;         // trainers run by this interpreter; empty: by this program
  std::optional<int> cuda{};  // the bucket is in this device's memory, handed over and updated on a stream
};

class Job {
 public:
  // When this returns all trainers have been started. Errors name the process and have the end of what it said.
  static Result<std::unique_ptr<Job>> start(const JobSettings& settings);
  // Ends all processes; nothing is left.
  ~Job();
  Job(const Job&) = delete;

  // A trainer whose process has gone.
  Result<> start_trainer(std::uint32_t replica);
  pid_t trainer(std::uint32_t replica) const { return trainers_[replica].pid; }
  pid_t daemon(std::uint32_t replica) const { return daemons_[replica].pid; }
  pid_t coordinator() const { return coordinator_.pid; }
  // SIGKILL, and waits until it has gone.
  void kill_trainer(std::uint32_t replica);

  // As its trainer says: the last step that it has committed as a contributor, and with how many contributors.
  std::uint64_t step(std::uint32_t replica) const;
  std::uint32_t contributors(std::uint32_t replica) const;

  // Until `condition` holds. Errors: `timeout`; `unavailable` where a process has ended by itself; `cancelled` after
  // SIGINT, SIGTERM or SIGHUP.
  Result<> wait_until(const std::function<bool()>& condition, std::chrono::seconds limit, const std::string& what);

  // What a living process has recorded until now.
  Result<daemon::Recording> recording_of(pid_t process) const;

 private:
  struct Child {
    pid_t pid = 0;
    Fd pidfd;
    std::string name;
  };
  // In a file that all trainers map.
  struct Progress {
    std::atomic<std::uint64_t> step, contributors;
  };

  explicit Job(const JobSettings& settings) : s_(settings) {}
  Result<> start_all();
  Result<Child> spawn(const std::string& name, const std::vector<std::string>& arguments,
                      const std::vector<std::string>& environment, const std::function<int()>& instead = {});
  Result<std::string> address_in(const std::string& file, const char* key);
  int train(std::uint32_t replica) const;  // in a child
  Progress& progress(std::uint32_t replica) const;
  std::string file(const std::string& name) const { return directory_ + "/" + name; }
  std::string said(const std::string& name) const;  // the end of its output
  static void end(Child& child);

  const JobSettings s_;
  std::string directory_, binaries_;
  Mapping progress_;
  Child coordinator_;
  std::vector<Child> daemons_, trainers_;
};

}  // namespace rejoin::bench
