#include "rejoin/process_group.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "base/fail.h"
#include "base/fd.h"
#include "base/longest_time.h"
#include "base/no_cancel.h"
#include "base/no_signals.h"
#include "base/start_thread.h"
#include "collectives/call.h"
#include "rejoin/group_device.h"
#include "rejoin/prepare_process.h"
#include "rejoin/secret_address.h"
#include "transport/idle.h"

namespace rejoin {

namespace {

constexpr std::string_view kScheme = "rejoin-member-1";
constexpr std::string_view kNoMember = "member of a process group: give what its handle() has returned";
constexpr std::string_view kParents =
    "this process group is of the process that this one was forked from, whose thread moves its bytes: make another "
    "group in this process";
constexpr Duration kAskCancelled = std::chrono::milliseconds(50);

// Numbers of operations that have ended.
struct Ended {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::uint64_t> numbers;
  bool closed = false;
};

class Operation final : public Work {
 public:
  explicit Operation(std::shared_ptr<Ended> ended, std::shared_ptr<StreamedOperation> streamed = nullptr)
      : ended_(std::move(ended)), streamed_(std::move(streamed)) {}

  bool done() const override {
    if (::getpid() != process_) return true;  // a thread that is not here may hold the lock
    const std::lock_guard lock(mutex_);
    return result_.has_value();
  }
  Result<> wait(Duration limit, const std::function<bool()>& cancelled) override {
    if (::getpid() != process_) return fail(ErrorCode::unavailable, "{}", kParents);
    const auto deadline = in(limit);
    std::unique_lock lock(mutex_);
    while (!result_) {
      const auto at = SteadyClock().now();
      if (at >= deadline) return fail(ErrorCode::timeout, "timed out waiting for an operation of a process group");
      changed_.wait_for(lock, std::min(kAskCancelled, deadline - at));
      if (result_ || !cancelled) continue;
      lock.unlock();
      if (cancelled())
        return fail(ErrorCode::cancelled, "interrupted while waiting for an operation of a process group");
      lock.lock();
    }
    return *result_;
  }
  void notify(std::uint64_t number) override {
    if (::getpid() != process_) return;  // nor does next_done() wait there
    const std::lock_guard lock(mutex_);
    if (result_) push(number);
    else numbers_.push_back(number);
  }
  Result<> wait_on(CudaStream stream) override {
    if (!streamed_)
      return fail(ErrorCode::invalid_argument,
                  "CUDA streams wait for operations of a device's memory: wait() for this");
    if (::getpid() != process_) return fail(ErrorCode::unavailable, "{}", kParents);
    {
      const std::lock_guard lock(mutex_);
      if (result_) return *result_;
    }
    return streamed_->wait_on(stream);
  }
  void end(const Result<>& result) {
    {
      const std::lock_guard lock(mutex_);
      result_ = result;
      changed_.notify_all();
      for (const auto number : numbers_) push(number);
    }
    if (streamed_) streamed_->end();
  }

 private:
  void push(std::uint64_t number) {
    const std::lock_guard lock(ended_->mutex);
    ended_->numbers.push_back(number);
    ended_->changed.notify_one();
  }
  const pid_t process_ = ::getpid();
  const std::shared_ptr<Ended> ended_;
  const std::shared_ptr<StreamedOperation> streamed_;  // none: of the host's memory
  mutable std::mutex mutex_;                           // guards all below
  std::condition_variable changed_;
  std::optional<Result<>> result_;
  std::vector<std::uint64_t> numbers_;
};

class Threaded final : public ProcessGroup {
 public:
  static Result<std::unique_ptr<ProcessGroup>> open(const ProcessGroupConfig& config, const std::string& device_name) {
    prepare_process();
    const NoSignals no_signals;  // also of the driver's threads and the transport's
    std::unique_ptr<GroupDevice> device;
    auto named = device::open_device(device_name);
    if (!named) return tl::unexpected(named.error());
    if ((*named)->kind() == device::MemoryKind::cuda) {
      auto opened = GroupDevice::open(std::move(*named), config.transport.starts_with("ibverbs"));
      if (!opened) return tl::unexpected(opened.error());
      device = std::move(*opened);
    }
    auto listener =
        SecretListener::open(config, device ? device->device() : nullptr, device ? device->reducer() : nullptr);
    if (!listener) return tl::unexpected(listener.error());
    auto wake = make_eventfd();
    if (!wake) return tl::unexpected(wake.error());
    std::unique_ptr<Threaded> made(
        new Threaded(listener->own, std::move(device), std::move(listener->engine), std::move(*wake)));
    if (auto started = start_thread(made->thread_, [group = made.get()] { group->run(); }); !started)
      return tl::unexpected(started.error());
    return made;
  }

  ~Threaded() override {
    if (here()) end();
    else leave_all_to_parent();
  }

  const std::string& handle() const override { return handle_; }

  Result<> reconfigure(std::uint64_t number, const std::vector<std::string>& members, Duration limit,
                       const std::function<bool()>& cancelled) override {
    if (!here()) return fail(ErrorCode::unavailable, "{}", kParents);
    std::vector<collectives::Handle> handles;
    std::optional<std::uint32_t> rank;
    for (const auto& member : members) {
      const auto address = SecretAddress::parse(kScheme, kNoMember, member);
      if (!address) return tl::unexpected(address.error());
      if (address->family != own_.family)
        return fail(ErrorCode::mismatch,
                    "the transport of member {} is {}, and this one's is {}: all take the same, and "
                    "all have a GPU's memory, or none",
                    handles.size(), address->family, own_.family);
      if (address->secret == own_.secret) {
        if (rank)
          return fail(ErrorCode::invalid_argument, "this member is named twice, as ranks {} and {}", *rank,
                      handles.size());
        rank = static_cast<std::uint32_t>(handles.size());
      }
      handles.push_back({address->secret, {address->address}});
    }
    if (!rank)
      return fail(ErrorCode::invalid_argument, "none of the {} members is this one: add what its handle() has returned",
                  members.size());
    const auto work = std::make_shared<Operation>(ended_);
    const auto deadline = in(limit);
    {
      const std::lock_guard lock(mutex_);
      ++configuration_.count;
      configuration_.rank = *rank, configuration_.size = static_cast<std::uint32_t>(handles.size());
      push([=, this, count = configuration_.count] {
        in_configuration_ = count;
        failed_ = false;  // before anybody hears that all are here
        group_->reconfigure(number, handles, *rank, deadline, [work](const Result<>& result) { work->end(result); });
      });
    }
    return work->wait(Duration::max(), cancelled);
  }
  std::uint32_t rank() const override { return configuration().rank; }
  std::uint32_t size() const override { return configuration().size; }

  Result<std::shared_ptr<Work>> start(const CollectiveCall& call) override {
    if (!here()) return fail(ErrorCode::unavailable, "{}", kParents);
    const auto now = configuration();
    if (now.size == 0)
      return fail(ErrorCode::unavailable, "this process group has no members yet: reconfigure() names them");
    if (call.on_device && !device_)
      return fail(ErrorCode::invalid_argument,
                  "buffers in a device's memory, and this process group was opened without a device");
    if (size_of(call.type) == 0)
      return fail(ErrorCode::invalid_argument, "type {} is no DataType", static_cast<int>(call.type));
    const auto memory = call.on_device ? device::MemoryKind::cuda : device::MemoryKind::host;
    auto operation = collectives::prepare(
        {call.kind, call.type, call.combine, call.root, call.tag, call.inputs, call.outputs, memory}, now.rank,
        now.size);
    if (!operation) return tl::unexpected(operation.error());
    if (call.on_device) return start_on_device(call, std::move(*operation), now.count);
    const auto work = std::make_shared<Operation>(ended_);
    submit(std::move(*operation), work, call.limit, now.count);
    return work;
  }

  Result<std::uint64_t> next_done(Duration limit) override {
    if (!here()) return fail(ErrorCode::cancelled, "{}", kParents);
    std::unique_lock lock(ended_->mutex);
    ended_->changed.wait_until(lock, in(limit), [&] { return !ended_->numbers.empty() || ended_->closed; });
    if (ended_->numbers.empty())
      return ended_->closed ? fail(ErrorCode::cancelled, "the process group was shut down")
                            : fail(ErrorCode::timeout, "no operation has ended");
    const auto number = ended_->numbers.front();
    ended_->numbers.pop_front();
    return number;
  }

  void abort(const std::string& reason) override {
    if (here()) in_thread([=, this] { group_->abort({ErrorCode::cancelled, reason}); });
  }

  bool failed() const override { return failed_; }

  void shutdown(Duration limit) override {
    if (!here()) return;  // the parent stays
    const auto work = std::make_shared<Operation>(ended_);
    in_thread([=, this] {
      group_->leave();
      leaving_.push_back(work);
    });
    (void)work->wait(limit, {});  // who has not heard by then sees the connection closed
    const std::lock_guard lock(ended_->mutex);
    ended_->closed = true;
    ended_->changed.notify_all();
  }

 private:
  // Not in a child of fork(), where a thread that is not there may hold each lock ("Children of fork()").
  bool here() const { return ::getpid() == process_; }
  void end() {
    const NoCancel no_cancel;
    stop_ = true;
    signal_eventfd(wake_);
    if (thread_.joinable()) thread_.join();
    group_.reset(), engine_.reset(), device_.reset();
    const std::lock_guard lock(ended_->mutex);
    ended_->closed = true;
    ended_->changed.notify_all();
  }
  // In a child of fork(), where the thread is not, and what it works on stands as it stood.
  void leave_all_to_parent() {
    leave_to_parent(thread_);
    (void)new auto(ended_);  // somebody may wait for it
    (void)group_.release(), (void)engine_.release(), (void)device_.release();
  }

  struct Configuration {
    std::uint64_t count = 0;  // how many there were
    std::uint32_t rank = 0, size = 0;
  };
  Configuration configuration() const {
    if (!here()) return configuration_;
    const std::lock_guard lock(mutex_);
    return configuration_;
  }

  void submit(collectives::Operation operation, const std::shared_ptr<Operation>& work, Duration limit,
              std::uint64_t configuration) {
    operation.deadline = in(limit);
    operation.done = [work](const Result<>& result) { work->end(result); };
    // Functions that are kept are copied: what can't be is shared.
    const auto shared = std::make_shared<collectives::Operation>(std::move(operation));
    in_thread([this, shared, configuration] {
      if (in_configuration_ == configuration) return group_->submit(std::move(*shared));
      shared->done(fail(ErrorCode::cancelled, "the process group was reconfigured while this operation was started"));
    });
  }
  // Everything that calls the driver, on the caller's thread.
  Result<std::shared_ptr<Work>> start_on_device(const CollectiveCall& call, collectives::Operation operation,
                                                std::uint64_t configuration) {
    const std::lock_guard one_at_a_time(starting_);
    if (auto takes = device_->takes(call.stream); !takes) return tl::unexpected(takes.error());
    auto scratch = device_->scratch_for(operation.plan.scratch);
    if (!scratch) return tl::unexpected(scratch.error());
    for (auto& one : *scratch) {
      const auto given = std::make_shared<collectives::Group::DeviceScratch>(std::move(one));
      in_thread([this, given] { group_->give_scratch(std::move(*given)); });
    }
    std::ranges::transform(operation.memory, operation.exported.begin(),
                           [&](const auto& memory) { return device_->exported(memory); });
    const auto streamed = device_->make_operation();
    if (!streamed) return tl::unexpected(streamed.error());
    if (auto queued = (*streamed)->begin_behind(call.stream); !queued) return tl::unexpected(queued.error());
    operation.ready = [streamed = *streamed] { return streamed->ready(); };
    const auto work = std::make_shared<Operation>(ended_, *streamed);
    submit(std::move(operation), work, call.limit, configuration);
    if (auto held = (*streamed)->hold(); !held) abort(held.error().message);  // it ends with that
    return work;
  }

  Threaded(const SecretAddress& own, std::unique_ptr<GroupDevice> device, std::unique_ptr<transport::Engine> engine,
           Fd wake)
      : own_(own),
        handle_(own.text(kScheme)),
        device_(std::move(device)),
        engine_(std::move(engine)),
        wake_(std::move(wake)) {
    group_ = std::make_unique<collectives::Group>(*engine_, collectives::Handle{own.secret, {own.address}},
                                                  device_ ? device_->reducer() : nullptr);
  }

  void in_thread(std::function<void()> call) {
    const std::lock_guard lock(mutex_);
    push(std::move(call));
  }
  void push(std::function<void()> call) {  // with mutex_ held
    calls_.push_back(std::move(call));
    signal_eventfd(wake_);
  }

  void run() {
    transport::Idle idle(*engine_);
    const int others[] = {wake_.get()};
    const SteadyClock clock;
    while (!stop_) {
      const auto before = group_->steps();
      group_->poll(clock.now());
      const bool called = take_calls();
      failed_ = group_->failed();
      if (!leaving_.empty() && group_->left())
        for (const auto& work : std::exchange(leaving_, {})) work->end({});
      if (called || group_->steps() != before) idle.reset();
      else if (group_->working()) ::sched_yield();  // on the GPU, for microseconds
      else idle.wait(group_->busy(), group_->next_deadline(clock.now()) - clock.now(), others);
    }
    take_calls();
    group_.reset();
  }

  bool take_calls() {
    std::vector<std::function<void()>> calls;
    {
      const std::lock_guard lock(mutex_);
      calls.swap(calls_);
      if (!calls.empty()) drain_eventfd(wake_);  // there are calls wherever it is signalled, so a poll costs no read()
    }
    for (const auto& call : calls) call();
    return !calls.empty();
  }

  const pid_t process_ = ::getpid();
  const SecretAddress own_;
  const std::string handle_;
  const std::shared_ptr<Ended> ended_ = std::make_shared<Ended>();
  std::unique_ptr<GroupDevice> device_;
  std::mutex starting_;  // operations on the device; held over calls of the driver, so the thread never takes it
  // The thread's.
  std::unique_ptr<transport::Engine> engine_;
  std::unique_ptr<collectives::Group> group_;
  std::uint64_t in_configuration_ = 0;               // the count of the one that it is in
  std::vector<std::shared_ptr<Operation>> leaving_;  // end when it has left

  const Fd wake_;
  mutable std::mutex mutex_;     // guards
  Configuration configuration_;  // … the last that was asked for
  std::vector<std::function<void()>> calls_;
  std::atomic<bool> stop_{false}, failed_{false};
  std::thread thread_;
};

}  // namespace

Result<std::unique_ptr<ProcessGroup>> ProcessGroup::open(const ProcessGroupConfig& config) {
  return Threaded::open(config, "host");
}

Result<std::unique_ptr<ProcessGroup>> ProcessGroup::open(const ProcessGroupConfig& config, const std::string& device) {
  return Threaded::open(config, device);
}

}  // namespace rejoin
