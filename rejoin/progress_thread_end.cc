// How a session's part in the job ends, and what ends its waiting: it leaves, it fails, or it is interrupted.
// See "How a session ends" in docs/design-notes.md.
#include <poll.h>

#include <algorithm>

#include "base/events.h"
#include "base/fail.h"
#include "base/log.h"
#include "base/longest_time.h"
#include "base/unix_socket.h"
#include "local.pb.h"
#include "local/offer.h"
#include "rejoin/progress_thread.h"

namespace rejoin {

namespace {

constexpr auto kNoAnswerWorthTelling = std::chrono::seconds(1);  // of the coordinator's silence

}  // namespace

// ---- the trainer's thread

std::optional<Error> ProgressThread::elsewhere() const {
  const pid_t here = ::getpid();
  if (here == process_) return std::nullopt;
  return Error{
      ErrorCode::invalid_argument,
      fmt::format("this session is that of process {}, and {} is a child of it: its threads are not in a child "
                  "of fork(). Fork before join()",
                  process_, here)};
}

Result<> ProgressThread::takes(CudaStream stream) {
  if (auto why = elsewhere()) return tl::unexpected(std::move(*why));
  if (streams_) return streams_->takes(stream);
  return rejoin::fail(ErrorCode::invalid_argument,
                      "a CUDA stream for what is in the host's memory: set SessionConfig::device");
}

// Under the mutex.
std::optional<Error> ProgressThread::ended() const {
  if (failure_) return failure_;
  if (left_) return Error{ErrorCode::cancelled, "this session has left the job"};
  if (interrupt_.raised())
    return Error{ErrorCode::cancelled, "interrupt() was called: this session runs no more steps; leave() and end"};
  return std::nullopt;
}

Result<> ProgressThread::may_go_on() const {
  if (auto why = elsewhere()) return tl::unexpected(std::move(*why));
  const std::lock_guard lock(mutex_);
  if (auto why = ended()) return tl::unexpected(std::move(*why));
  return {};
}

bool ProgressThread::over() const {
  const std::lock_guard lock(mutex_);
  return over_;
}

bool ProgressThread::brought_last() const {
  const std::lock_guard lock(mutex_);
  return brought_last_;
}

// Where the coordinator has another --steps now. A trainer between two steps finds the job finished, as otherwise.
void ProgressThread::end_step_that_is_cut_short() {
  std::unique_lock lock(mutex_);
  if (failure_ || over_ || taken_ <= committed_) return;
  const std::uint64_t dropped = taken_;
  lock.unlock();
  fail({ErrorCode::cancelled, fmt::format("the job is finished with step {}, and step {}, which was under way here, is "
                                          "dropped: the coordinator was started with --steps {}",
                                          dropped - 1, dropped, dropped - 1)});
}

bool ProgressThread::intact(std::chrono::milliseconds during) {
  if (elsewhere()) return false;
  const auto until = in(std::min<std::chrono::milliseconds>(during, kLongestTime));
  std::unique_lock lock(mutex_);
  return !changed_.wait_until(lock, until, [&] { return ended() || !intact_; });
}

// The coordinator answers each registration at once, whatever the job is doing, if it is there.
Result<> ProgressThread::wait_for_registration() {
  std::unique_lock lock(mutex_);
  const auto answered = [&] { return registered_ || ended(); };
  if (!wait(lock, answered, kNoAnswerWorthTelling)) {
    logger().warn("replica {} rank {} waits for the coordinator, which has not answered its registration with {} yet",
                  config_.replica, config_.rank, config_.socket);
    wait(lock, answered);
  }
  if (auto why = ended()) return tl::unexpected(std::move(*why));
  return {};
}

Result<> ProgressThread::leave() {
  if (auto why = elsewhere()) return tl::unexpected(std::move(*why));
  if (!thread_.joinable()) return {};
  std::unique_lock lock(mutex_);
  leaving_ = true;
  signal_eventfd(wake_);
  // The thread itself waits up to a silence for the daemon's word, and up to another one for a GPU.
  const auto longest = std::max<Duration>(config_.patience, 3 * silence_);
  if (!changed_.wait_for(lock, longest, [&] { return left_.has_value(); }))
    return rejoin::fail(ErrorCode::timeout,
                        "this session's progress thread has stood still for {} ms: end the process, and the others go "
                        "on without it",
                        longest / std::chrono::milliseconds(1));
  return *left_;
}

// ---- the progress thread

// Whether the trainer wants to leave, and everything is sent that can be.
bool ProgressThread::leaves(TimePoint now) {
  {
    const std::lock_guard lock(mutex_);
    if (!leaving_) return false;
  }
  if (leave_by_ == TimePoint{}) leave_by_ = now + silence_;
  if (!farewell_sent_) farewell_sent_ = send_farewell("");
  const bool nobody_cares = !daemon_ && driver_->finished();
  return farewell_heard_ || nobody_cares || now > leave_by_;
}

// False where nobody can be told now.
bool ProgressThread::send_farewell(const std::string& why) {
  if (!daemon_ || !welcome_) return false;
  proto::FromTrainer message;
  message.mutable_leave()->set_why(why);
  const std::string bytes = message.SerializeAsString();
  const auto sent = send_with_fds(daemon_, as_bytes(bytes), {});
  if (!sent) logger().debug("the daemon could not be told that this session ends: {}", sent.error().message);
  return sent.has_value();
}

// The thread's last message. Nobody is to wait for a replica that does nothing any more, though its process may live
// on.
void ProgressThread::part() {
  bool wanted = false;
  std::string why;
  {
    const std::lock_guard lock(mutex_);
    wanted = leaving_;
    if (failure_) why = failure_->message;
  }
  if (!farewell_sent_) farewell_sent_ = send_farewell(why);
  events::record(events::Kind::left, {}, why);
  if (streams_) streams_->release();
  if (server_) wait_for_answer();
  const bool quiet = !server_ || server_->end_served(silence_);
  const bool unheard = wanted && why.empty() && !farewell_heard_ && !driver_->finished();
  {
    const std::lock_guard lock(mutex_);
    left_ = Result<>();
    if (unheard)
      left_ = rejoin::fail(ErrorCode::unavailable,
                           "the daemon at {} was not there to hear that this replica leaves: the others go on when "
                           "this process has ended, or after a silence of {:.1f} s",
                           config_.socket, milliseconds(silence_) / 1000);
    if (!quiet && may_be_copied_into())
      left_ = rejoin::fail(ErrorCode::timeout,
                           "what the daemon at {} has copied into this state on a GPU is not over after {:.1f} s: the "
                           "GPU is busy or hangs. Leave this memory as it is until the session is closed",
                           config_.socket, milliseconds(silence_) / 1000);
  }
  changed_.notify_all();
  if (streams_) finish_updates();
}

// What is copied out of a contributor's state for joiners that it does not serve any more harms nobody.
bool ProgressThread::may_be_copied_into() const {
  const auto* statuses = owner_.page().slice_statuses();
  return !std::all_of(statuses, statuses + owner_.manifest().slices().size(), [](const auto& status) {
    return local::SliceStatus::unpack(status.load()).state == local::SliceState::current;
  });
}

// Memory of a GPU is the framework's, and may be something else when the session has gone. So the daemon answers
// before, and asks for no copy into it from then on. Of those that it has asked for, some may still be queued here.
void ProgressThread::wait_for_answer() {
  if (leave_by_ == TimePoint{}) leave_by_ = clock_.now() + silence_;
  while (farewell_sent_ && !farewell_heard_ && clock_.now() < leave_by_) {
    pollfd waiting{daemon_.get(), POLLIN, 0};
    ::poll(&waiting, 1, 10);
    const auto received = receive_with_fds(daemon_, local::kMaxMessage);
    if (!received) return;  // it has ended, or is of no use
    proto::ToTrainer message;
    if (received->has_value() &&
        message.ParseFromArray((*received)->bytes.data(), static_cast<int>((*received)->bytes.size())))
      farewell_heard_ = message.has_left();
  }
}

// What is queued on the trainer's streams when it leaves: nobody else waits for it, and the trainer may still want the
// state of its last step.
void ProgressThread::finish_updates() {
  std::unique_lock lock(mutex_);
  while (updates_ > 0 && !stop_ && !failure_) {
    lock.unlock();
    look_after_streams();
    lock.lock();
    changed_.wait_for(lock, kStreams);
  }
}

}  // namespace rejoin
