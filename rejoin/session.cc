#include "rejoin/session.h"

#include <cxxabi.h>

#include <algorithm>

#include "base/event_file.h"
#include "base/fail.h"
#include "base/flight.h"
#include "base/unix_socket.h"
#include "rejoin/card.h"
#include "rejoin/prepare_process.h"
#include "rejoin/progress_thread.h"
#include "rejoin/step.h"
#include "rejoin/training_state.h"

namespace rejoin {

namespace {

class SessionImpl final : public Session {
 public:
  SessionImpl(SessionConfig config, std::shared_ptr<device::Device> device, Fd interrupted)
      : config_(std::move(config)),
        interrupt_(std::move(interrupted)),
        state_(config_.gradient_log_budget, std::move(device)) {
    config_.socket = from_anywhere(config_.socket);
  }
  ~SessionImpl() override {
    if (progress_ && progress_->elsewhere()) (void)progress_.release();  // it is the parent's, and so are its threads
    progress_.reset();
  }

  Result<TensorId> add(const TensorSpec& tensor) override { return state_.add(tensor); }
  Result<TensorId> add(const TensorSpec& tensor, const std::vector<std::span<std::byte>>& memory) override {
    if (memory.empty()) return fail(ErrorCode::invalid_argument, "tensor '{}' comes without its memory", tensor.name);
    return state_.add(tensor, memory);
  }
  Result<BucketId> bucket(const std::vector<TensorId>& tensors) override { return state_.bucket(tensors); }
  Result<BucketId> bucket(const std::vector<TensorId>& tensors, std::span<std::byte> gradients) override {
    if (gradients.data() == nullptr) return fail(ErrorCode::invalid_argument, "a bucket comes without its memory");
    return state_.bucket(tensors, gradients);
  }
  Result<> keep_exact(BucketId bucket) override { return state_.keep_exact(bucket); }
  Result<> allocate() override { return state_.allocate(); }
  Result<std::span<std::byte>> weight(TensorId t) override {
    return state_.check_tensor(t, "weight()").map([&] { return state_.column(t, 0); });
  }
  Result<std::span<std::byte>> moment(TensorId t, std::uint32_t index) override {
    return state_.check_moment(t, index).map([&] { return state_.column(t, index + 1); });
  }
  Result<std::span<std::byte>> gradient(TensorId t) override {
    return state_.check_tensor(t, "gradient()").map([&] { return state_.gradient(t); });
  }
  Result<> set_fingerprint(std::string text) override {
    if (progress_) return fail(ErrorCode::invalid_argument, "set_fingerprint() comes after join()");
    return state_.set_fingerprint(std::move(text));
  }
  Result<> set_card(std::string card, std::string listening) override {
    if (progress_) return fail(ErrorCode::invalid_argument, "set_card() comes after join()");
    if (auto right = check_card(card, listening); !right) return right;
    card_ = std::move(card), card_listening_ = std::move(listening);
    return {};
  }
  void use_weights() override { weighted_ = true; }
  using Session::join;
  Result<> join(const Position& from) override {
    if (ended_) return tl::unexpected(*ended_);
    const std::uint64_t version = from.step();
    if (!state_.allocated() || progress_)
      return fail(ErrorCode::invalid_argument, "join() comes once, after allocate()");
    if (version > kMostSteps)
      return fail(ErrorCode::invalid_argument, "join() from the position of step {}: steps are numbered up to {}",
                  version, kMostSteps);
    if (auto started = state_.start(version); !started) return started;
    if (auto filled = state_.wait_for_device(); !filled) return filled;
    const SteadyClock clock;
    const TimePoint before = clock.now();
    const auto digest = state_.digest();
    if (!digest) return tl::unexpected(digest.error());
    const Duration took = clock.now() - before;
    if (auto right = check_restored(from, *digest); !right) return right;
    joined_from_ = from;
    progress_ = std::make_unique<ProgressThread>(config_, state_, interrupt_, card_, card_listening_, weighted_);
    Result<> joined;
    try {
      joined = progress_->join(from, *digest, took);
    } catch (...) {  // while_waiting has thrown: nothing has been joined
      progress_.reset();
      throw;
    }
    if (!joined) progress_.reset();
    return joined && busy_ ? progress_->busy(*busy_) : joined;
  }

  Result<std::optional<Step>> begin_step() override {
    if (auto due = check_due("begin_step()"); !due) return tl::unexpected(due.error());
    if (in_step())
      return fail(ErrorCode::invalid_argument, "begin_step() in step {}, which commit() has not ended yet", step_);
    auto view = progress_->wait_for_step(last_);
    if (!view) return tl::unexpected(view.error());
    if (!*view) {
      if (progress_->brought_last()) last_ = joined_from_.step();
      if (progress_->over()) complete_version_ = joined_from_.step(), stands_ = joined_from_;
      return std::optional<Step>{};
    }
    step_ = (*view)->step;
    stage_ = (*view)->contributes ? Stage::contributing : Stage::following;
    complete_version_.reset(), stands_.reset();
    if ((*view)->contributes) complete_version_ = step_ - 1, stands_ = position_after(step_ - 1, (*view)->trained);
    handed_over_.assign(state_.buckets().size(), false);
    state_.owner().set_phase(local::Phase::compute);
    events::record(events::Kind::step, {.step = step_, .a = (*view)->contributes});
    return step_of(std::move(**view), weighted_);
  }

  Result<> all_reduce(BucketId bucket) override {
    return hand_over(bucket, [&] { return progress_->all_reduce(bucket); });
  }
  Result<> all_reduce(BucketId bucket, CudaStream stream) override {
    return hand_over(bucket, [&] { return progress_->all_reduce(bucket, stream); });
  }

  Result<> commit(const std::function<void(const Update&)>& optimizer) override {
    return commit(optimizer, [this] { return end_update(); });
  }
  Result<> commit(const std::function<void(const Update&)>& optimizer, CudaStream stream) override {
    return takes(stream).and_then([&] { return commit(optimizer, [&] { return end_update(stream); }); });
  }

  Result<std::optional<std::vector<Update>>> begin_update() override {
    using Updates = std::optional<std::vector<Update>>;
    if (auto due = check_step_due("begin_update()"); !due) return tl::unexpected(due.error());
    return decide().and_then([this](bool committed) -> Result<Updates> {
      if (!committed) return Updates{};
      return begin_updates().map([](std::vector<Update>&& updates) { return Updates(std::move(updates)); });
    });
  }
  Result<> end_update() override {
    return end_update([this](bool contributed) {
      state_.end_update(rejoin::Step(step_), contributed);
      return Result<>();
    });
  }
  Result<> end_update(CudaStream stream) override {
    const auto end = [&](bool contributed) { return progress_->end_update(step_, contributed, stream); };
    return takes(stream).and_then([&] { return end_update(end); });
  }
  Error abandon_update(const std::string& what) override {
    if (ended_) return *ended_;
    if (stage_ != Stage::updating || applying_)
      return {ErrorCode::invalid_argument, "abandon_update() without an update: begin_update() begins one"};
    return tear(broken_update(config_, step_, "the optimizer failed", printable(what, kLongestReason))).error();
  }

  void when_reduced(std::function<void(std::uint64_t)> look) override { look_ = std::move(look); }
  Result<std::span<const std::byte>> reduced(TensorId t) const override {
    return state_.check_tensor(t, "reduced()").map([&] { return state_.reduced(t); });
  }

  Result<> scale_feedback(std::uint64_t step, float factor) override {
    auto may = check_factor(step, factor).and_then([&] { return check_due("scale_feedback()"); });
    const bool late = in_step() && std::ranges::find(handed_over_, true) != handed_over_.end();
    if (may && step == last_ && !late) progress_->scale_feedback(step, factor);
    return may;
  }

  Result<> busy(std::chrono::milliseconds limit, std::string_view reason) override {
    return begin_busy(ProgressThread::check_busy(limit, reason, false));
  }
  Result<> busy_in_step(std::chrono::milliseconds limit, std::string_view reason) override {
    return begin_busy(ProgressThread::check_busy(limit, reason, true));
  }
  Result<> begin_busy(const Result<ProgressThread::Busy>& what) {
    if (ended_) return tl::unexpected(*ended_);
    if (!what) return tl::unexpected(what.error());
    if (busy_)
      return fail(ErrorCode::invalid_argument, "busy() with '{}', but busy with '{}' already: done() comes first",
                  what->reason, busy_->reason);
    busy_ = *what;
    return progress_ ? progress_->busy(*busy_) : Result<>();
  }
  Result<> done() override {
    if (!std::exchange(busy_, std::nullopt))
      return ended_ ? tl::unexpected(*ended_) : fail(ErrorCode::invalid_argument, "done() without busy()");
    if (progress_)
      if (auto done = progress_->done(); !done) return done;
    return ended_ ? tl::unexpected(*ended_) : Result<>();
  }

  std::optional<std::uint64_t> version() const override {
    if (complete_version_ || last_ == 0 || stage_ == Stage::updating || torn_) return complete_version_;
    return state_.complete_at(rejoin::Step(last_)) ? std::optional(last_) : std::nullopt;
  }
  std::uint64_t committed() const override { return last_; }
  bool intact(std::chrono::milliseconds during) override { return progress_ && progress_->intact(during); }
  Result<> check() const override { return ended_ || !progress_ ? check_due("check()") : progress_->may_go_on(); }
  Result<Position> position() const override {
    if (torn_) return tl::unexpected(*ended_);
    if (!progress_) return fail(ErrorCode::invalid_argument, "position() before join()");
    if (!stands_) return tl::unexpected(of_no_one_step());
    const auto digest = state_digest();
    if (!digest) return tl::unexpected(digest.error());
    return Position(stands_->step(), stands_->trained(), *digest);
  }
  Result<std::uint64_t> state_digest() const override {
    if (torn_) return tl::unexpected(*ended_);
    const auto there =
        progress_ ? progress_->wait_for_update(ProgressThread::Interruptible::no) : state_.wait_for_device();
    if (!there) return tl::unexpected(there.error());
    return state_.digest();
  }

  Result<> leave() override {
    if (auto due = check_no_update("leave()"); !due) return due;
    if (ended_) return {};
    ended_ = Error{ErrorCode::cancelled, "this session has left the job: leave() was called"};
    return progress_ ? progress_->leave() : Result<>();
  }
  void interrupt() noexcept override { interrupt_.raise(); }

 private:
  enum class Stage : std::uint8_t { between, contributing, following, updating };
  bool in_step() const { return stage_ == Stage::contributing || stage_ == Stage::following; }

  Result<> check_due(const char* call) const {
    if (ended_) return tl::unexpected(*ended_);
    if (!progress_) return fail(ErrorCode::invalid_argument, "{} before join()", call);
    if (const auto why = progress_->elsewhere()) return tl::unexpected(*why);
    return check_no_update(call);
  }
  Result<> check_no_update(const char* call) const {
    if (stage_ != Stage::updating) return {};
    if (applying_) return fail(ErrorCode::invalid_argument, "{} inside of an optimizer", call);
    return fail(ErrorCode::invalid_argument, "{} before end_update(), or abandon_update(), of step {}", call, step_);
  }

  Result<> check_step_due(const char* call) const {
    if (auto due = check_due(call); !due) return due;
    if (!in_step()) return fail(ErrorCode::invalid_argument, "{} without a step: begin_step() gives one", call);
    return {};
  }

  template <typename HandOver>
  Result<> hand_over(BucketId bucket, HandOver hand_over) {
    if (auto due = check_due("all_reduce()"); !due) return due;
    if (!in_step()) return fail(ErrorCode::invalid_argument, "all_reduce({}) before begin_step()", bucket);
    if (stage_ == Stage::following)
      return fail(ErrorCode::invalid_argument,
                  "all_reduce({}) in step {}, in which this replica catches up: it has no gradients to add "
                  "(Step::contributes() says so), and commit() is next",
                  bucket, step_);
    // Said before, as the exchange may be over when the progress thread has it.
    const bool last = bucket < handed_over_.size() && !handed_over_[bucket] &&
                      std::count(handed_over_.begin(), handed_over_.end(), false) == 1;
    if (last) events::record(events::Kind::computed, {.step = step_});
    auto handed = hand_over();
    if (handed) handed_over_[bucket] = true;
    return handed;
  }

  Result<> takes(CudaStream to) { return progress_ && !ended_ ? progress_->takes(to) : Result<>(); }
  // The others would wait for what is missing, and could tell nobody but after seconds.
  Result<> check_buckets() const {
    if (stage_ != Stage::contributing) return {};
    const std::string missing = state_.names_of_all_but(handed_over_);
    return missing.empty() ? Result<>() : tl::unexpected(forgotten_buckets(step_, missing));
  }

  // Waits for the step's decision. False: begin_step() gives it again, to contribute to.
  Result<bool> decide() {
    if (auto may = progress_->may_go_on(); !may) return tl::unexpected(may.error());
    if (auto all = check_buckets(); !all) return tl::unexpected(all.error());
    auto decision = progress_->wait_for_commit(step_);
    if (!decision) return tl::unexpected(decision.error());
    if (!decision->committed) {
      stage_ = Stage::between;
      complete_version_ = step_ - 1;
      return false;
    }
    if (auto updated = progress_->wait_for_update(ProgressThread::Interruptible::yes); !updated)
      return tl::unexpected(updated.error());
    decision_ = std::move(*decision);
    return true;
  }

  // From here on the state changes.
  Result<std::vector<Update>> begin_updates() {
    stage_ = Stage::updating;
    complete_version_.reset();
    stands_.reset();
    auto updates = with_memory(config_, step_, [this] {
      return state_.begin_update(rejoin::Step(step_), decision_.contributed, decision_.contributors).map(updates_of);
    });
    return updates ? std::move(updates) : tl::unexpected(tear(updates.error()).error());
  }

  template <typename End>
  Result<> end_update(const End& end) {
    if (ended_) return tl::unexpected(*ended_);
    if (stage_ != Stage::updating || applying_)
      return fail(ErrorCode::invalid_argument, "end_update() without an update: begin_update() begins one");
    if (const auto why = progress_->elsewhere()) return tl::unexpected(*why);
    const auto ended = with_memory(config_, step_, [&] { return end(decision_.contributed); });
    if (!ended) return tear(ended.error());
    stage_ = Stage::between;
    last_ = step_;
    events::record(events::Kind::updated, {.step = step_, .a = decision_.contributed});
    if (decision_.contributed) {
      complete_version_ = step_;
      stands_ = position_after(step_, decision_.trained);
    }
    return {};
  }

  template <typename End>
  Result<> commit(const std::function<void(const Update&)>& optimizer, const End& end) {
    if (auto due = check_step_due("commit()"); !due) return due;
    if (!optimizer) return fail(ErrorCode::invalid_argument, "commit() of step {} without an optimizer", step_);
    const auto committed = decide();
    if (!committed) return tl::unexpected(committed.error());
    if (!*committed) return {};
    const auto updates = begin_updates();
    if (!updates) return tl::unexpected(updates.error());
    applying_ = true;
    const auto applied = apply(*updates, optimizer);
    applying_ = false;
    return applied ? end() : tear(applied.error());
  }

  Result<> apply(const std::vector<Update>& updates, const std::function<void(const Update&)>& optimizer) {
    const char* who = "when_reduced()'s function threw";
    const auto thrown = [&](const auto& what) { return tl::unexpected(broken_update(config_, step_, who, what)); };
    try {
      if (const auto look = look_) look(step_);  // it may set another one
      who = "the optimizer threw";
      for (const auto& update : updates) optimizer(update);
    } catch (const abi::__forced_unwind&) {  // the thread is being cancelled, which nobody may stop
      (void)tear(thrown("its thread was cancelled").value());
      throw;
    } catch (const std::exception& error) {
      return thrown(printable(error.what(), kLongestReason));
    } catch (...) {
      return thrown("something that is no std::exception");
    }
    return {};
  }

  // The state is between two versions and stays there. Its page says that an update goes on, so that no daemon takes
  // anything out of it but what has been copied to the shadow buffer; and the daemon is told that this replica is gone.
  Result<> tear(const Error& error) {
    if (const auto why = progress_->elsewhere()) return tl::unexpected(*why);  // the parent's goes on
    ended_ = error;
    torn_ = true;
    stage_ = Stage::between;
    complete_version_.reset();
    progress_->fail(error);
    return tl::unexpected(error);
  }

  static constexpr std::size_t kLongestReason = 500;  // of what anybody may have written
  SessionConfig config_;
  Interrupt interrupt_;
  std::string card_, card_listening_;
  bool weighted_ = false;
  TrainingState state_;
  std::unique_ptr<ProgressThread> progress_;
  Stage stage_ = Stage::between;
  std::vector<bool> handed_over_;  // buckets, in this step
  std::uint64_t step_ = 0, last_ = 0;
  std::optional<std::uint64_t> complete_version_;  // the state's version, where it follows from this replica's role
  std::optional<Error> ended_;                     // by leave(), or by an update that broke off
  bool applying_ = false;                          // the update under way is commit()'s own
  bool torn_ = false;                              // … which has left a state of no version
  std::optional<ProgressThread::Busy> busy_;
  std::function<void(std::uint64_t)> look_;
  ProgressThread::Decision decision_;  // on the step whose update is under way
  Position joined_from_;
  std::optional<Position> stands_;  // of the state, where it is of one step. Until the first the daemon may write to it
};

}  // namespace

Result<std::unique_ptr<Session>> Session::open(const SessionConfig& config) {
  prepare_process();
  if (auto right = config.check(); !right) return tl::unexpected(right.error());
  auto device = device::open_device(config.device);
  if (!device) return tl::unexpected(device.error());
  if (config.flip_bit_at != 0 && (*device)->kind() != device::MemoryKind::host)
    return fail(ErrorCode::invalid_argument, "--flip-bit-at is for state in the host's memory, not {}", config.device);
  auto interrupted = make_eventfd();
  if (!interrupted) return tl::unexpected(interrupted.error());
  const std::string who = fmt::format("r{}.{}", config.replica, config.rank);
  events::open_file(config.events, who);
  flight::open(config.flight, who, "trainer");
  return std::unique_ptr<Session>(std::make_unique<SessionImpl>(config, std::move(*device), std::move(*interrupted)));
}

}  // namespace rejoin
