// The session's progress thread: owns the transport and the daemon's socket, and runs the driver between them.
// The trainer's thread talks to it through a few fields under one mutex.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/unix_socket.h"
#include "local.pb.h"
#include "rejoin/driver.h"
#include "rejoin/session.h"
#include "shm/owner.h"
#include "transport/idle.h"

namespace rejoin {

class Progress {
 public:
  // `owner` and the buckets' memory outlive this.
  Progress(const SessionConfig& config, shm::Owner& owner, std::vector<ftar::BucketSpec> buckets,
           std::uint64_t plan_hash);
  ~Progress();

  Result<> join(std::uint64_t version, std::uint64_t digest);

  // All wait for at most the config's patience without a sign of the daemon.
  Result<std::optional<StepView>> wait_for_step(std::uint64_t after);  // the first step later than `after`
  Result<> all_reduce(std::uint32_t bucket);
  Result<bool> wait_for_commit(std::uint64_t step);  // whether this replica contributed

 private:
  void run();
  void poll_daemon(TimePoint now);
  void publish();
  void say(const proto::FromNode& report);
  Result<> greet(Fd& socket);
  void reconnect(TimePoint now);
  void fail(Error error);
  proto::LocalHello hello() const;

  const SessionConfig config_;
  shm::Owner& owner_;
  std::vector<ftar::BucketSpec> buckets_;
  const std::uint64_t plan_hash_;
  std::uint64_t version_at_join_ = 0, digest_at_join_ = 0;
  Duration silence_ = std::chrono::seconds(2);

  // The progress thread's.
  SteadyClock clock_;
  std::unique_ptr<transport::Engine> engine_;
  std::string address_;
  std::optional<Driver> driver_;
  std::uint64_t published_ = 0;  // the driver's revision that the trainer's thread has been shown
  std::optional<transport::Idle> idle_;
  Fd daemon_;
  TimePoint retry_at_{}, heartbeat_at_{}, daemon_seen_{};
  std::thread thread_;
  Fd wake_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Under the mutex: what the trainer's thread and the progress thread tell each other.
  std::vector<bool> wanted_;  // buckets given to all_reduce() in this step
  std::optional<Error> failure_;
  bool asked_ = false;               // wanted_ or taken_ has changed
  std::optional<StepView> current_;  // the step under way, if any
  std::uint64_t taken_ = 0;          // the step that the trainer works on
  bool finished_ = false;
  std::uint64_t committed_ = 0;  // the last step decided that this replica took part in
  bool committed_contributes_ = false;
  bool stop_ = false;
};

}  // namespace rejoin
