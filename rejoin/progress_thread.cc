#include "rejoin/progress_thread.h"

#include <algorithm>

#include "base/deadlines.h"
#include "base/entropy.h"
#include "base/events.h"
#include "base/fail.h"
#include "base/flight.h"
#include "base/log.h"
#include "base/no_cancel.h"
#include "base/no_signals.h"
#include "base/refusals.h"
#include "base/start_thread.h"
#include "membership/node.h"
#include "transport/advertise.h"
#include "transport/factory.h"
#include "transport/placement.h"

namespace rejoin {

ProgressThread::ProgressThread(const SessionConfig& config, TrainingState& state, const Interrupt& interrupt,
                               std::string card, std::string card_listening, bool weighs)
    : config_(config),
      state_(state),
      interrupt_(interrupt),
      card_(std::move(card)),
      card_listening_(std::move(card_listening)),
      weighs_(weighs),
      owner_(state.owner()),
      buckets_(state.buckets()),
      shown_reduced_(buckets_.size()),
      wanted_(buckets_.size()),
      handed_over_(buckets_.size()) {}

ProgressThread::~ProgressThread() {
  const NoCancel no_cancel;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  if (wake_) signal_eventfd(wake_);
  if (thread_.joinable()) thread_.join();
  watchdog_.reset();
  if (streams_) streams_->release();
  side_thread_.reset();  // what it does is the driver's
  finish_works();
  driver_.reset();
  engine_.reset();  // what it still copies is done by a kernel that the launcher may have to launch
  kernel_launcher_.reset();
  server_.reset();
  streams_.reset();
}

// What the ring has given to the GPU, which writes into memory that goes with the driver. When the thread has ended.
void ProgressThread::finish_works() {
  while (reducer_ && !reducer_->idle()) {
    if (!reducer_->done()) return;  // nothing works on it any more
    (void)reducer_->wants_launch();
    std::this_thread::yield();
  }
}

// ---- the trainer's thread

Result<> ProgressThread::join(const Position& from, std::uint64_t digest, Duration digest_time) {
  joined_from_ = from;
  digest_at_join_ = digest;
  digest_time_ = digest_time;
  auto wake = make_eventfd();
  if (!wake) return tl::unexpected(wake.error());
  wake_ = std::move(*wake);
  const auto& device = owner_.device();
  const bool on_gpu = device->kind() != transport::MemoryKind::host;
  if (auto made = make_engine(on_gpu); !made) return made;
  std::function<void(std::function<void()>)> aside;
  if (on_gpu) {
    side_thread_ = std::make_unique<SideThread>(wake_);
    if (auto started = side_thread_->start(); !started) return started;
    aside = [this](std::function<void()> work) { side_thread_->run(std::move(work)); };
  }
  driver_.emplace(
      DriverConfig{.replica = ReplicaId(config_.replica),
                   .rank = config_.rank,
                   .instance = random_number() | 1,
                   .transport = transport::family_of(config_.transport) + (on_gpu ? " out of a GPU's memory" : ""),
                   .plan_hash = state_.plan_hash(),
                   .declared = state_.declaration(),
                   .card = card_,
                   .card_listening = card_listening_,
                   .from = from,
                   .weighs = weighs_,
                   .ring = {.chunk_bytes = config_.chunk_bytes,
                            .chunks_in_flight = config_.chunks_in_flight,
                            .flip_bit_at = Step(config_.flip_bit_at),
                            .device = on_gpu ? device : nullptr,
                            .shared_reducer = reducer_,
                            .coding = *ftar::coding_named(config_.coding),  // as check() has found
                            .coding_error = config_.coding_error},
                   .patience = config_.patience,
                   .between_steps = config_.between_steps,
                   .aside = std::move(aside)},
      *engine_, owner_, buckets_);
  if (auto prepared = prepare_driver(); !prepared) return prepared;
  if (auto introduced = introduce(); !introduced) return introduced;
  if (auto begun = begin(); !begun) return begun;
  return wait_for_registration();
}

// For the progress thread, and for who allocates what NICs write into: that is where it is touched first.
std::optional<int> ProgressThread::numa_node() const {
  return config_.numa == "off" ? std::nullopt : transport::numa_node_for(config_.transport, owner_.device()->address());
}

// On this thread, before the daemon hears of this process.
Result<> ProgressThread::prepare_driver() {
  const NoSignals no_signals;
  const transport::RunNear near(numa_node());
  return driver_->prepare();
}

Result<> ProgressThread::begin() {
  idle_.emplace(*engine_, transport::Idle::Options{.spins = 200, .yields = 20});
  if (streams_) {
    watchdog_ = std::make_unique<Watchdog>(
        deadlines::kStreamsWait.of(silence_), [this] { return streams_->streams_wait(); },
        [this] {
          fail({ErrorCode::timeout,
                fmt::format("this session's progress thread has stood still for {:.1f} s while CUDA streams wait for "
                            "it: they go on without their gradients, and the session is at its end; start the process "
                            "again",
                            milliseconds(deadlines::kStreamsWait.of(silence_)) / 1000)});
        });
    if (auto started = watchdog_->start(); !started) return started;
  }
  return start_thread(thread_, [this] { run(); });
}

Result<> ProgressThread::make_engine(bool on_gpu) {
  const NoSignals no_signals;
  const transport::RunNear near(numa_node());
  if (on_gpu)
    if (auto prepared = prepare_device(); !prepared) return prepared;
  auto engine = transport::make_engine(config_.transport, owner_.device(), reducer_);
  if (!engine) return tl::unexpected(engine.error());
  engine_ = std::move(*engine);
  engine_->set_polled_on();
  return transport::listen_as(*engine_, {config_.data_listen}, "--data-listen (REJOIN_DATA_LISTEN)")
      .and_then(
          [&](const transport::Address& listening) { return transport::advertised(listening, config_.advertise); })
      .map([&](const transport::Address& advertised) { address_ = advertised.text; });
}

Result<> ProgressThread::prepare_device() {
  const auto& device = owner_.device();
  auto reducer = device::Reducer::make(*device, {.blocks = config_.reduce_blocks,
                                                 .threads = config_.reduce_threads,
                                                 .codes = config_.coding != "off",
                                                 .external_launcher = true});
  if (!reducer) return tl::unexpected(reducer.error());
  reducer_ = std::move(*reducer);
  auto streams = StreamOrder::make(device, reducer_, buckets_.size(), [this] { signal_eventfd(wake_); });
  if (!streams) return tl::unexpected(streams.error());
  streams_ = std::move(*streams);
  kernel_launcher_ = std::make_unique<KernelLauncher>(reducer_);
  if (auto started = kernel_launcher_->start(); !started) return started;
  auto server = device::MemoryServer::make(device, owner_.shared_memory());
  if (!server) return tl::unexpected(server.error());
  server_ = std::move(*server);
  return {};
}

Result<std::optional<StepView>> ProgressThread::wait_for_step(std::uint64_t after) {
  if (server_) (void)server_->release_ended();  // between steps no stream waits for a bucket
  std::unique_lock lock(mutex_);
  wait(lock, [&] { return ended() || finished_ || (current_ && current_->step > after); });
  if (auto why = ended()) return tl::unexpected(std::move(*why));
  if (finished_) return std::optional<StepView>{};
  taken_ = current_->step;
  taken_at_ = clock_.now();
  intact_ = true;
  taken_with_ = contributors_;
  taken_contributes_ = current_->contributes;
  const auto step = current_;
  const bool wakes = ask();
  lock.unlock();
  if (wakes) signal_eventfd(wake_);
  return step;
}

// Under the mutex. Returns whether the progress thread is to be woken: where it was asked before and has not looked
// yet, it is about to, unless an update on the GPU was in its way.
bool ProgressThread::ask() { return !std::exchange(asked_, true) || updates_ > 0; }

// Under the mutex.
Result<> ProgressThread::may_reduce(std::uint32_t bucket) const {
  if (auto why = ended()) return tl::unexpected(std::move(*why));
  if (bucket >= wanted_.size())
    return rejoin::fail(ErrorCode::invalid_argument, "there is no bucket {}; bucket() has given {}, numbered from 0",
                        bucket, wanted_.size());
  if (wanted_[bucket] || handed_over_[bucket])
    return rejoin::fail(ErrorCode::invalid_argument, "bucket {} is being reduced already in this step", bucket);
  return {};
}

Result<> ProgressThread::all_reduce(std::uint32_t bucket) {
  bool wakes = false;
  {
    const std::lock_guard lock(mutex_);
    if (auto may = may_reduce(bucket); !may) return may;
    wanted_[bucket] = true;
    wanted_at_ = clock_.now();
    wakes = ask();
  }
  if (wakes) signal_eventfd(wake_);
  return {};
}

Result<> ProgressThread::all_reduce(std::uint32_t bucket, CudaStream stream) {
  if (auto may = takes(stream); !may) return may;
  std::uint64_t step = 0;
  {
    const std::lock_guard lock(mutex_);
    if (auto may = may_reduce(bucket); !may) return may;
    handed_over_[bucket] = true;
    step = taken_;
  }
  auto handed = streams_->hand_over(bucket, step, stream);
  if (!handed) fail(handed.error());  // of the device: nothing goes on
  return handed;
}

// Nothing is to be woken: it is of use with the next bucket that is wanted.
void ProgressThread::scale_feedback(std::uint64_t step, float factor) {
  const std::lock_guard lock(mutex_);
  scaled_ = {step, feedback_scale_.of(step, factor)};
}

Result<> ProgressThread::end_update(std::uint64_t step, bool contributed, CudaStream stream) {
  {
    const std::lock_guard lock(mutex_);
    ++updates_;
  }
  auto queued = streams_->updated(step, contributed, stream);
  if (!queued) fail(queued.error());  // likewise
  return queued;
}

Result<> ProgressThread::wait_for_update(Interruptible how) {
  if (auto why = elsewhere()) return tl::unexpected(std::move(*why));
  std::unique_lock lock(mutex_);
  const auto given_up = [&] { return how == Interruptible::yes ? ended() : failure_; };
  wait(lock, [&] { return updates_ == 0 || given_up(); });
  if (updates_ > 0) return tl::unexpected(*given_up());
  return {};
}

Result<ProgressThread::Decision> ProgressThread::wait_for_commit(std::uint64_t step) {
  std::unique_lock lock(mutex_);
  const auto begins_again = [&] {
    return current_ && current_->step == step && current_->contributes && !taken_contributes_;
  };
  wait(lock, [&] { return ended() || committed_ >= step || begins_again(); });
  if (committed_ >= step) return Decision{true, committed_contributes_, committed_contributors_, committed_trained_};
  if (auto why = ended()) return tl::unexpected(std::move(*why));
  return Decision{};
}

// ---- the progress thread

void ProgressThread::fail(Error error) {
  logger().error("{}", error.message);
  events::record(events::Kind::failed, {}, error.message);
  {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::move(error);
  }
  if (streams_) streams_->release();
  changed_.notify_all();
  signal_eventfd(wake_);
}

// What the trainer's streams have come to.
void ProgressThread::poll_streams() {
  const auto reached = streams_->poll();
  for (const auto& what : reached) {
    if (!what.bucket) state_.end_update(Step(what.step), what.contributed);
    const std::lock_guard lock(mutex_);
    if (what.bucket) wanted_[*what.bucket] = true, handed_over_[*what.bucket] = false, wanted_at_ = clock_.now();
    else --updates_;
    asked_ = true;
  }
  if (!reached.empty()) changed_.notify_all();
}

void ProgressThread::let_streams_go_on() {
  const auto& reduced = driver_->reduced();
  for (std::uint32_t b = 0; b < reduced.size(); ++b)
    if (std::exchange(shown_reduced_[b], reduced[b]) != reduced[b]) streams_->on_reduced(b, reduced[b]);
}

void ProgressThread::look_after_streams() {
  watchdog_->turn();
  poll_streams();
  (void)reducer_->wants_launch();
}

void ProgressThread::run() {
  const transport::RunNear near(numa_node());
  for (;;) {
    if (streams_) look_after_streams();
    {
      const std::lock_guard lock(mutex_);
      if (stop_ || failure_) break;
      if (std::exchange(occupation_changed_, false)) driver_->occupy(occupation_, occupied_at_);
      if (interrupt_.raised() && !std::exchange(interrupt_seen_, true)) changed_.notify_all();
      // A joiner's outputs are for its next step when the update of the last one is done with them.
      if (asked_ && updates_ == 0) {
        asked_ = false;
        if (const auto scaled = std::exchange(scaled_, std::nullopt))
          driver_->scale_feedback(scaled->first, scaled->second);
        driver_->take(taken_, taken_at_);
        driver_->want(wanted_, wanted_at_);
      }
    }
    const TimePoint now = clock_.now();
    membership::forgive(daemon_seen_, driver_->notice(now), now);
    if (now - heartbeat_at_ >= deadlines::kHeartbeatOfTrainer.of(silence_)) {
      heartbeat_at_ = now;
      flight::beat();
      if (welcome_) {
        proto::FromNode heartbeat = driver_->heartbeat();
        for (const auto refused : refusals::counted()) heartbeat.mutable_heartbeat()->add_refused(refused);
        unsent_.add(std::move(heartbeat));
      }
    }
    if (daemon_) (void)poll_daemon(now);
    else reconnect(now);
    if (daemon_) check_daemon(now);
    const std::uint64_t outcomes = driver_->outcomes();
    driver_->poll(now);
    if (streams_) let_streams_go_on();
    if (driver_->outcomes() != outcomes) idle_->reset();
    for (auto& report : driver_->take_reports()) unsent_.add(std::move(report));
    send_all(now);
    if (driver_->revision() != published_) publish();
    if (leaves(now)) break;
    // On the GPU, for microseconds, and without waking anybody.
    if (driver_->working()) continue;
    Duration limit = std::min<Duration>({silence_ / 8, std::chrono::milliseconds(100), driver_->due() - now});
    if (!daemon_) limit = kReconnect;
    if (streams_ && streams_->waits_for_streams()) limit = kStreams;
    const int others[] = {daemon_.get(), wake_.get(), interrupt_seen_ ? -1 : interrupt_.eventfd().get()};
    idle_->wait(driver_->busy(), limit, std::span(others).subspan(daemon_ ? 0 : 1));
    drain_eventfd(wake_);
  }
  part();
}

// Shows the trainer's thread how far things have come.
void ProgressThread::publish() {
  published_ = driver_->revision();
  if (driver_->failure()) return fail(*driver_->failure());
  {
    const std::lock_guard lock(mutex_);
    if (committed_ != driver_->committed()) wanted_.assign(buckets_.size(), false);
    committed_ = driver_->committed();
    committed_contributes_ = driver_->committed_contributes();
    committed_contributors_ = driver_->committed_contributors();
    registered_ = driver_->registered();
    committed_trained_ = driver_->committed_trained();
    finished_ = driver_->finished();
    over_ = driver_->over();
    brought_last_ = driver_->brought_last();
    current_ = driver_->step();
    if (epoch_ != driver_->machine().epoch()) note_epoch();
  }
  if (driver_->finished()) end_step_that_is_cut_short();
  changed_.notify_all();
}

// Under the mutex. Where the trainer's step is not decided yet, some may begin it in this epoch only. One that is
// decided all have begun, and newcomers are no matter.
void ProgressThread::note_epoch() {
  epoch_ = driver_->machine().epoch();
  std::vector<std::uint64_t> contributors;
  for (const auto& member : driver_->machine().plan().members())
    if (!member.catching_up()) contributors.push_back(member.incarnation());
  std::ranges::sort(contributors);
  if (committed_ < taken_ || !std::ranges::includes(contributors, taken_with_)) intact_ = false;
  contributors_ = std::move(contributors);
}

}  // namespace rejoin
