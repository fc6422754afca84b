// The session's progress thread owns the transport and the daemon's socket, and runs the driver between them. Once its
// ring is made it never enters a GPU's driver: "No driver between hand-over and flag" in docs/design-notes.md. The
// trainer's thread talks to it through a few fields under one mutex.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/deadlines.h"
#include "base/fd.h"
#include "base/longest_time.h"
#include "base/seldom.h"
#include "device/remote.h"
#include "local.pb.h"
#include "local/owner.h"
#include "rejoin/driver.h"
#include "rejoin/feedback_scale.h"
#include "rejoin/interrupt.h"
#include "rejoin/kernel_launcher.h"
#include "rejoin/report_queue.h"
#include "rejoin/session.h"
#include "rejoin/side_thread.h"
#include "rejoin/stream_order.h"
#include "rejoin/training_state.h"
#include "rejoin/watchdog.h"
#include "transport/idle.h"

namespace rejoin {

class ProgressThread {
 public:
  // `state`, which is allocated, and `interrupt` outlive this.
  ProgressThread(const SessionConfig& config, TrainingState& state, const Interrupt& interrupt, std::string card,
                 std::string card_listening, bool weighs);
  ~ProgressThread();

  // Returns when the coordinator has taken this rank. `digest_time`: how long the state's digest took.
  Result<> join(const Position& from, std::uint64_t digest, Duration digest_time);

  // Why nothing of this goes on in a child of fork(), where its threads are not. Takes no lock: the thread may have had
  // it.
  std::optional<Error> elsewhere() const;

  // The calls that wait do so for at most the config's patience without a sign of the daemon, and end with `cancelled`
  // after interrupt(). The trainer's thread makes them.
  Result<std::optional<StepView>> wait_for_step(std::uint64_t after);  // returns the first step later than `after`
  bool over() const;          // the job had ended before this replica had a part in it
  bool brought_last() const;  // … and its state is that of the last step, with which it came
  // Says whether the contributors of the trainer's step are all there, with the same step, and stay so for `during`.
  bool intact(std::chrono::milliseconds during);
  Result<> may_go_on() const;  // fails after a failure or an interrupt
  Result<> all_reduce(std::uint32_t bucket);
  Result<> all_reduce(std::uint32_t bucket, CudaStream stream);
  // The update of this step, the last one committed here, has multiplied the mean gradient by this factor. The driver
  // gets what follows from it before any all-reduce that is asked for later.
  void scale_feedback(std::uint64_t step, float factor);
  struct Decision {
    bool committed = false;  // otherwise the step, so far a joiner's, begins again: this replica contributes to it
    bool contributed = false;
    std::uint32_t contributors = 0;  // how many replicas contributed
    membership::Samples trained;     // all samples trained up to this step
  };
  Result<Decision> wait_for_commit(std::uint64_t step);
  struct Busy {
    std::chrono::milliseconds limit;
    std::string reason;  // as others are shown it
    bool computes;       // see Driver::Occupation
  };
  // Errors: `invalid_argument`.
  static Result<Busy> check_busy(std::chrono::milliseconds limit, std::string_view reason, bool computes);
  // The trainer says what it is busy with from now on, for at most `limit`, and by done() that it is not any more.
  Result<> busy(const Busy& busy);
  Result<> done();
  // Errors: `invalid_argument`, which changes nothing (no stream for this state, or one that is being captured).
  Result<> takes(CudaStream stream);
  // For a state on a GPU: end_update() has the update end when the stream has done it, and wait_for_update() waits
  // until the last update has ended. takes() comes first.
  Result<> end_update(std::uint64_t step, bool contributed, CudaStream stream);
  enum class Interruptible : bool { no, yes };
  Result<> wait_for_update(Interruptible how);
  // Ends everything here with this error, and reports it to the daemon.
  void fail(Error error);
  // Reports to the daemon that this rank leaves, and waits for its answer. The caller calls it once; a session that has
  // failed has left already.
  Result<> leave();

 private:
  static constexpr Duration kReconnect = std::chrono::milliseconds(20);  // between two tries
  // Between two looks at flags that streams write, which wakes nobody: a hundredth of a core, and no time beside a
  // step.
  static constexpr Duration kStreams = std::chrono::microseconds(100);
  std::optional<int> numa_node() const;

  void run();
  bool poll_daemon(TimePoint now);
  void check_daemon(TimePoint now);
  void publish();
  void note_epoch();
  void end_step_that_is_cut_short();
  void send_all(TimePoint now);
  bool has_line();
  Result<> greet(Fd& socket);
  Result<> check_protocol(const proto::LocalWelcome& welcome) const;
  Result<transport::Secret> take_secrets(const proto::LocalWelcome& welcome);
  Result<> send_offer(const Fd& socket, const proto::FromTrainer& message);  // with as many descriptors as go at once
  void reconnect(TimePoint now);
  Result<> register_again(TimePoint now);
  void lose_daemon(const std::string& why);
  Result<> wait_a_little(const Fd& socket);
  Result<Fd> reach_daemon(TimePoint deadline);
  Result<> check_user(const Fd& socket) const;
  Result<> introduce();
  Result<> register_with(Fd& socket, TimePoint deadline);
  Result<> wait_for_registration();
  bool leaves(TimePoint now);
  bool send_farewell(const std::string& why);
  void part();
  void wait_for_answer();
  bool may_be_copied_into() const;
  Result<> make_engine(bool on_gpu);
  Result<> prepare_device();
  Result<> prepare_driver();
  Result<> begin();
  proto::LocalHello hello(std::size_t descriptors) const;

  std::optional<Error> ended() const;
  Result<> occupy(std::optional<Driver::Occupation> occupation);
  // Waits on the trainer's thread until `is` holds; false where it does not by then. Meanwhile config_.while_waiting is
  // called without the lock.
  template <typename Is>
  bool wait(std::unique_lock<std::mutex>& lock, Is is, Duration limit = kLongestTime) {
    for (const TimePoint until = in(limit);;) {
      const auto next = config_.while_waiting ? std::min(until, in(std::chrono::milliseconds(100))) : until;
      if (changed_.wait_until(lock, next, is)) return true;
      if (next == until) return false;
      lock.unlock();
      config_.while_waiting();
      lock.lock();
    }
  }
  Result<> may_reduce(std::uint32_t bucket) const;
  bool ask();
  void poll_streams();
  void let_streams_go_on();  // past the buckets that have been reduced
  void look_after_streams();
  void finish_updates();
  void finish_works();

  const pid_t process_ = ::getpid();
  const SessionConfig config_;
  TrainingState& state_;
  const Interrupt& interrupt_;
  const std::string card_, card_listening_;
  const bool weighs_;
  local::Owner& owner_;
  const std::vector<ftar::BucketSpec>& buckets_;
  Position joined_from_;
  std::uint64_t digest_at_join_ = 0;
  Duration digest_time_{};
  Duration silence_ = deadlines::kSilence;

  // The progress thread's.
  SteadyClock clock_;
  std::unique_ptr<transport::Engine> engine_;
  std::string address_;
  std::optional<Driver> driver_;
  std::uint64_t published_ = 0;  // the driver's revision that the trainer's thread has been shown
  std::optional<transport::Idle> idle_;
  std::vector<std::uint64_t> shown_reduced_;  // by bucket: the step last passed to streams_
  Fd daemon_;
  Seldom strange_daemon_{kSameLineAgain};  // limits a line in the log
  bool welcome_ = false;                   // the daemon has accepted us, and listens
  ReportQueue unsent_;
  std::vector<Fd> offer_;      // descriptors of the state, made once, since the GPU's driver makes them
  device::Line served_;        // the line over which a GPU's memory is served to this daemon
  std::vector<int> to_offer_;  // descriptors that this daemon has yet to be sent
  TimePoint retry_at_{}, heartbeat_at_{}, daemon_seen_{};
  bool interrupt_seen_ = false;
  TimePoint leave_by_{};  // until when it waits for the daemon's answer to LocalLeave
  bool farewell_sent_ = false, farewell_heard_ = false;
  std::string dropped_;  // why the daemon has closed the connection, as it says
  std::thread thread_;
  Fd wake_;
  // For a state on a GPU; null otherwise.
  std::shared_ptr<device::Reducer> reducer_;
  std::unique_ptr<StreamOrder> streams_;  // both threads use it
  std::unique_ptr<KernelLauncher> kernel_launcher_;
  std::unique_ptr<device::MemoryServer> server_;
  std::unique_ptr<SideThread> side_thread_;
  std::unique_ptr<Watchdog> watchdog_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Under the mutex: what the trainer's thread and the progress thread tell each other.
  std::vector<bool> wanted_;       // buckets to be reduced in this step
  std::vector<bool> handed_over_;  // those, and the buckets that a stream has yet to come to
  std::size_t updates_ = 0;        // how many updates streams have yet to do
  std::optional<Error> failure_;
  FeedbackScale feedback_scale_;
  std::optional<std::pair<std::uint64_t, float>> scaled_;  // what comes of that, for the driver: a step, and how much
  bool asked_ = false;                                     // wanted_ or taken_ has changed
  bool occupation_changed_ = false;
  std::optional<Driver::Occupation> occupation_;  // what the trainer is busy with
  std::optional<StepView> current_;               // the step under way, if any
  std::uint64_t taken_ = 0;                       // the step that the trainer works on
  // When the trainer has begun it, handed over the last bucket, and said what it is busy with: this thread may look
  // much later.
  TimePoint taken_at_{}, wanted_at_{}, occupied_at_{};
  bool taken_contributes_ = false;  // it works on that step as a contributor
  bool registered_ = false, finished_ = false, over_ = false, brought_last_ = false;
  bool intact_ = true;  // nobody who contributes with the trainer to its step was lost, or begins it in another epoch
  Epoch epoch_;         // the present one
  // The contributors to it, and those to the trainer's step: their incarnations, sorted.
  std::vector<std::uint64_t> contributors_, taken_with_;
  std::uint64_t committed_ = 0;  // the last step decided that this replica took part in
  bool committed_contributes_ = false;
  std::uint32_t committed_contributors_ = 0;
  bool stop_ = false, leaving_ = false;
  std::optional<Result<>> left_;
  membership::Samples committed_trained_;
};

}  // namespace rejoin
