#include "rejoin/session.h"

#include <cxxabi.h>

#include "base/command_line.h"
#include "base/fail.h"
#include "base/unix_socket.h"
#include "rejoin/progress.h"
#include "rejoin/training_state.h"
#include "transport/factory.h"

namespace rejoin {

void SessionConfig::bind(CommandLine& line) {
  line.setting("--replica", replica, "REJOIN_REPLICA", "this process's replica, from 0");
  line.setting("--rank", rank, "REJOIN_RANK", "its rank in the replica, from 0");
  line.setting("--socket", socket, "REJOIN_SOCKET", "unix socket of the node's daemon");
  line.setting("--device", device, "REJOIN_DEVICE",
               "where state and gradients are: host, cuda:NUMBER or cuda:PCI-ADDRESS");
  line.setting(
      "--transport", transport, "REJOIN_TRANSPORT",
      "transport of the all-reduce: shm, tcp, tcp:ADDRESS,ADDRESS… (rails), ibverbs[:DEVICE,DEVICE…] or ucx:LIST");
  line.setting("--data-listen", data_listen, "REJOIN_DATA_LISTEN", "address for data connections");
  line.setting("--chunk-bytes", chunk_bytes, "REJOIN_CHUNK_BYTES", "all-reduce: largest chunk");
  line.setting("--chunks-in-flight", chunks_in_flight, "REJOIN_CHUNKS_IN_FLIGHT",
               "all-reduce: chunks in flight per neighbour");
  line.setting("--reduce-blocks", reduce_blocks, "REJOIN_REDUCE_BLOCKS", "all-reduce on a GPU: blocks of its kernel");
  line.setting("--reduce-threads", reduce_threads, "REJOIN_REDUCE_THREADS", "… and threads of each");
  line.setting(
      "--flip-bit-at", flip_bit_at, "REJOIN_FLIP_BIT_AT",
      "a drill: in this step one bit of what the all-reduce brings here is flipped, as if on its way; 0: never");
  line.setting("--keep-budget", keep_budget, "REJOIN_KEEP_BUDGET", "bytes of gradients kept while catching up");
  line.add("--patience-ms", patience, "how long a daemon that does not answer is waited for")
      .environment("REJOIN_PATIENCE_MS");
  line.add("--between-steps-ms", between_steps,
           "how long the trainer may take between two steps, to evaluate or to save")
      .environment("REJOIN_BETWEEN_STEPS_MS");
}

Result<SessionConfig> SessionConfig::from_environment() {
  SessionConfig config;
  CommandLine line("");
  config.bind(line);
  if (auto parsed = line.parse({}); !parsed)
    return fail(ErrorCode::invalid_argument, "REJOIN_* settings: {}", parsed.error().message);
  return config;
}

namespace {

class SessionImpl final : public Session {
 public:
  SessionImpl(SessionConfig config, std::shared_ptr<device::Device> device, Fd interrupted)
      : config_(std::move(config)),
        interrupt_(std::move(interrupted)),
        state_(config_.keep_budget, std::move(device)) {}
  ~SessionImpl() override { progress_.reset(); }

  Result<TensorId> add(const TensorSpec& tensor) override { return state_.add(tensor); }
  Result<TensorId> add(const TensorSpec& tensor, const std::vector<std::span<std::byte>>& memory) override {
    if (memory.empty()) return fail(ErrorCode::invalid_argument, "tensor '{}' comes without its memory", tensor.name);
    return state_.add(tensor, memory);
  }
  Result<BucketId> bucket(const std::vector<TensorId>& tensors) override { return state_.bucket(tensors); }
  Result<BucketId> bucket(const std::vector<TensorId>& tensors, std::span<std::byte> gradients) override {
    return state_.bucket(tensors, gradients);
  }
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
    const SteadyClock clock;
    const TimePoint before = clock.now();
    const auto digest = state_.digest();
    if (!digest) return tl::unexpected(digest.error());
    const Duration took = clock.now() - before;
    if (from.digest() && *from.digest() != *digest)
      return fail(
          ErrorCode::mismatch,
          "the state that was restored is not the one that this position of step {} was taken with: its digest "
          "is {:016x}, and should be {:016x}. Restore all weights and moments of this rank, bit for bit, out of "
          "the checkpoint that the position was saved with; where they are meant to differ, give join() the "
          "position without_digest()",
          version, *digest, *from.digest());
    version_at_join_ = version;
    stands_ = from;
    progress_ = std::make_unique<Progress>(config_, state_, interrupt_);
    auto joined = progress_->join(from, *digest, took);
    if (!joined) progress_.reset(), stands_.reset();
    return joined;
  }

  Result<std::optional<Step>> begin_step() override {
    if (auto due = check_due("begin_step()"); !due) return tl::unexpected(due.error());
    if (in_step())
      return fail(ErrorCode::invalid_argument, "begin_step() in step {}, which commit() has not ended yet", step_);
    auto view = progress_->wait_for_step(last_);
    if (!view) return tl::unexpected(view.error());
    if (!*view) {
      if (progress_->over()) whole_ = version_at_join_;
      return std::optional<Step>{};
    }
    step_ = (*view)->step;
    stage_ = (*view)->contributes ? Stage::contributing : Stage::following;
    whole_.reset();
    if (stage_ == Stage::contributing) whole_ = step_ - 1;
    handed_over_.assign(state_.buckets().size(), false);
    stands_.reset();
    if ((*view)->contributes) stands_ = position_of(step_ - 1, (*view)->trained);
    state_.owner().set_phase(shm::Phase::compute);
    std::vector<SampleRange> batch;
    for (const auto& range : (*view)->batch) batch.push_back({range.begin, range.end});
    return std::optional<Step>(std::in_place, step_, (*view)->contributes, (*view)->leads, std::move(batch));
  }

  Result<> all_reduce(BucketId bucket) override {
    return hand_over(bucket, [&] { return progress_->all_reduce(bucket); });
  }
  Result<> all_reduce(BucketId bucket, CudaStream stream) override {
    return hand_over(bucket, [&] { return progress_->all_reduce(bucket, stream); });
  }

  Result<> commit(const std::function<void(const Piece&)>& optimizer) override {
    return commit(optimizer, [this](bool contributed) {
      state_.end_update(rejoin::Step(step_), contributed);
      return Result<>();
    });
  }
  Result<> commit(const std::function<void(const Piece&)>& optimizer, CudaStream stream) override {
    return commit(optimizer, [&](bool contributed) { return progress_->end_update(step_, contributed, stream); });
  }

  void when_reduced(std::function<void(std::uint64_t)> look) override { look_ = std::move(look); }
  Result<std::span<const std::byte>> reduced(TensorId t) const override {
    return state_.check_tensor(t, "reduced()").map([&] { return state_.reduced(t); });
  }

  std::optional<std::uint64_t> version() const override {
    if (whole_ || last_ == 0 || stage_ == Stage::updating || torn_) return whole_;
    return state_.whole_at(rejoin::Step(last_)) ? std::optional(last_) : std::nullopt;
  }
  std::uint64_t committed() const override { return last_; }
  Result<Position> position() const override {
    if (!progress_) return fail(ErrorCode::invalid_argument, "position() before join()");
    if (!stands_)
      return fail(ErrorCode::unavailable,
                  "position() of a state that is of no one step: this replica catches up, or is within commit(); take "
                  "the checkpoint between steps, on a replica whose step contributes()");
    const auto digest = state_digest();
    if (!digest) return tl::unexpected(digest.error());
    return Position(stands_->step(), stands_->trained(), *digest);
  }
  Result<std::uint64_t> state_digest() const override {
    if (torn_) return tl::unexpected(*ended_);
    if (progress_)
      if (auto updated = progress_->wait_for_update(Progress::Interruptible::no); !updated)
        return tl::unexpected(updated.error());
    return state_.digest();
  }

  Result<> leave() override {
    if (stage_ == Stage::updating) return fail(ErrorCode::invalid_argument, "leave() inside of an optimizer");
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
    if (stage_ == Stage::updating) return fail(ErrorCode::invalid_argument, "{} inside of an optimizer", call);
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
    auto handed = hand_over();
    if (handed) handed_over_[bucket] = true;
    return handed;
  }

  // The others would wait for what is missing, and could tell nobody but after seconds.
  Result<> check_buckets() const {
    if (stage_ != Stage::contributing) return {};
    std::string missing;
    for (BucketId b = 0; b < handed_over_.size(); ++b)
      if (!handed_over_[b]) missing += (missing.empty() ? "" : ", ") + state_.name_of(b);
    if (missing.empty()) return {};
    return fail(ErrorCode::invalid_argument,
                "commit() of step {} without {}: all_reduce() is due for each bucket in a step that this replica "
                "contributes to",
                step_, missing);
  }

  template <typename End>
  Result<> commit(const std::function<void(const Piece&)>& optimizer, End end) {
    if (auto due = check_due("commit()"); !due) return due;
    if (!in_step()) return fail(ErrorCode::invalid_argument, "commit() without a step: begin_step() gives one");
    if (!optimizer) return fail(ErrorCode::invalid_argument, "commit() of step {} without an optimizer", step_);
    if (auto may = progress_->may_go_on(); !may) return may;
    if (auto all = check_buckets(); !all) return all;
    const auto decision = progress_->wait_for_commit(step_);
    if (!decision) return tl::unexpected(decision.error());
    if (!decision->committed) {  // begin_step() gives it again, to contribute to
      stage_ = Stage::between;
      whole_ = step_ - 1;
      return {};
    }
    if (auto updated = progress_->wait_for_update(Progress::Interruptible::yes); !updated) return updated;
    if (auto updated = update(decision->contributed, optimizer, end); !updated) return tear(updated.error());
    stage_ = Stage::between;
    last_ = step_;
    if (decision->contributed) {
      whole_ = step_;
      stands_ = position_of(step_, decision->trained);
    }
    return {};
  }

  template <typename End>
  Result<> update(bool contributed, const std::function<void(const Piece&)>& optimizer, End end) {
    stage_ = Stage::updating;
    whole_.reset();
    stands_.reset();
    const auto pieces = state_.begin_update(rejoin::Step(step_), contributed);
    if (!pieces) return tl::unexpected(pieces.error());
    if (auto applied = apply(*pieces, optimizer); !applied) return applied;
    return end(contributed);
  }

  Result<> apply(const std::vector<catchup::Piece>& pieces, const std::function<void(const Piece&)>& optimizer) {
    const auto thrown = [&](const std::string& what) {
      return fail(ErrorCode::invalid_argument,
                  "the optimizer threw in the update of step {}: {}. The state of replica {} rank {} is updated in "
                  "part, and of no use: this session is at its end. Start the process again, and it catches up",
                  step_, what, config_.replica, config_.rank);
    };
    try {
      if (look_) look_(step_);
      for (const auto& piece : pieces)
        optimizer({TensorId{piece.tensor}, piece.first, piece.count, piece.step.value, piece.gradient});
    } catch (const abi::__forced_unwind&) {  // the thread is being cancelled, which nobody may stop
      (void)tear(thrown("its thread was cancelled").value());
      throw;
    } catch (const std::exception& error) {
      constexpr std::size_t longest = 500;  // of what anybody may have written
      return thrown(printable(error.what(), longest));
    } catch (...) {
      return thrown("something that is no std::exception");
    }
    return {};
  }

  // The state is between two versions and stays there. Its page says that an update goes on, so that no daemon takes
  // anything out of it but what has been copied aside; and the daemon is told that this replica is gone.
  Result<> tear(const Error& error) {
    ended_ = error;
    torn_ = true;
    stage_ = Stage::between;
    whole_.reset();
    progress_->fail(error);
    return tl::unexpected(error);
  }

  static Position position_of(std::uint64_t step, const membership::Samples& trained) {
    std::vector<SampleRange> ranges;
    for (const auto& [begin, end] : trained.ranges()) ranges.push_back({begin, end});
    return {step, std::move(ranges), std::nullopt};
  }

  const SessionConfig config_;
  Interrupt interrupt_;
  TrainingState state_;
  std::unique_ptr<Progress> progress_;
  Stage stage_ = Stage::between;
  std::vector<bool> handed_over_;  // buckets, in this step
  std::uint64_t step_ = 0, last_ = 0, version_at_join_ = 0;
  std::optional<std::uint64_t> whole_;  // the state's version, where it follows from this replica's role
  std::optional<Error> ended_;          // by leave(), or by an update that broke off
  bool torn_ = false;                   // … which has left a state of no version
  std::function<void(std::uint64_t)> look_;
  std::optional<Position> stands_;  // of the state, where it is of one step
};

}  // namespace

Result<std::unique_ptr<Session>> Session::open(const SessionConfig& config) {
  if (config.socket.empty())
    return fail(ErrorCode::invalid_argument, "no daemon socket: set SessionConfig::socket, --socket or REJOIN_SOCKET");
  if (auto named = check_unix_name(config.socket); !named) return tl::unexpected(named.error());
  if (auto known = transport::check_name(config.transport); !known) return tl::unexpected(known.error());
  const ftar::Options ring{.chunk_bytes = config.chunk_bytes, .chunks_in_flight = config.chunks_in_flight};
  if (auto right = ftar::check(ring); !right) return tl::unexpected(right.error());
  auto device = device::open_device(config.device);
  if (!device) return tl::unexpected(device.error());
  if (config.flip_bit_at != 0 && (*device)->kind() != device::MemoryKind::host)
    return fail(ErrorCode::invalid_argument, "--flip-bit-at {} of a state on {}: only the host's memory takes it",
                config.flip_bit_at, config.device);
  auto interrupted = make_eventfd();
  if (!interrupted) return tl::unexpected(interrupted.error());
  return std::unique_ptr<Session>(std::make_unique<SessionImpl>(config, std::move(*device), std::move(*interrupted)));
}

}  // namespace rejoin
