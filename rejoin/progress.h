// The session's progress thread: owns the transport, the ring and the daemon's socket, and runs the step protocol.
// The trainer's thread talks to it through a few fields under one mutex.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/unix_socket.h"
#include "ftar/communicator.h"
#include "local.pb.h"
#include "membership/rank.h"
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

  struct StepView {
    std::uint64_t step = 0;
    bool contributes = false;
    std::vector<SampleRange> batch;
  };
  // All wait for at most the config's patience without a sign of the daemon.
  Result<std::optional<StepView>> wait_for_step(std::uint64_t after);  // the first step later than `after`
  Result<> all_reduce(std::uint32_t bucket);
  Result<bool> wait_for_commit(std::uint64_t step);  // whether this replica contributed

 private:
  void run();
  void poll_ring(TimePoint now);
  void poll_daemon(TimePoint now);
  void on_word(const proto::ToNode& word);
  void on_plan(const proto::Plan& plan);
  void on_peers(const proto::Peers& peers);
  void enter_epoch();
  void submit_wanted();
  void report_exchanged();
  void report_links();
  void look_for_stalls(TimePoint now);
  Duration patience_with_compute() const;
  void say(const proto::FromNode& report);
  Result<> greet(Fd& socket);
  void reconnect(TimePoint now);
  void fail(Error error);
  proto::LocalHello hello() const;

  const SessionConfig config_;
  shm::Owner& owner_;
  std::vector<ftar::BucketSpec> buckets_;
  const std::uint64_t plan_hash_;
  const std::uint64_t life_;
  std::uint64_t version_at_join_ = 0, digest_at_join_ = 0;
  Duration silence_ = std::chrono::seconds(2);

  // The progress thread's.
  SteadyClock clock_;
  std::unique_ptr<transport::Engine> engine_;
  std::string address_;
  std::unique_ptr<ftar::Communicator> ring_;
  std::uint64_t secret_ = 0;
  std::optional<transport::Idle> idle_;
  Fd daemon_;
  TimePoint retry_at_{}, heartbeat_at_{}, stall_checked_{}, daemon_seen_{};
  membership::Rank machine_;
  proto::Peers peers_;
  std::vector<bool> submitted_, done_;  // by bucket, in this epoch and step
  std::uint64_t stall_said_for_ = 0;
  std::vector<Duration> step_times_;  // of the last steps
  TimePoint committed_at_{};
  std::thread thread_;
  Fd wake_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Under the mutex: what the trainer's thread and the progress thread tell each other.
  std::vector<bool> wanted_;  // buckets given to all_reduce() in this step
  std::optional<Error> failure_;
  StepView current_;  // the step under way, if any
  bool have_step_ = false;
  std::uint64_t taken_ = 0;  // the step that the trainer works on
  bool finished_ = false;
  std::uint64_t committed_ = 0;  // the last step decided that this replica took part in
  bool committed_contributes_ = false;
  bool stop_ = false;
};

}  // namespace rejoin
