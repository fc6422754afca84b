#include "rejoin/session.h"

#include <CLI/CLI.hpp>

#include "rejoin/progress.h"
#include "rejoin/training_state.h"

namespace rejoin {

void SessionConfig::bind(CLI::App& app) {
  const auto option = [&](const char* flags, auto& value, const char* env, const char* help) {
    return app.add_option(flags, value, help)->envname(env)->capture_default_str();
  };
  option("--replica", replica, "REJOIN_REPLICA", "this process's replica, from 0");
  option("--rank", rank, "REJOIN_RANK", "its rank in the replica, from 0");
  option("--daemon", socket, "REJOIN_SOCKET", "unix socket of the node's daemon");
  option("--device", device, "REJOIN_DEVICE", "where state and gradients are: host, cuda:NUMBER or cuda:PCI-ADDRESS");
  option("--transport", transport, "REJOIN_TRANSPORT",
         "transport of the all-reduce: shm, tcp, tcp:ADDRESS,ADDRESS… (rails), ibverbs[:DEVICE,DEVICE…] or ucx:LIST");
  option("--data-listen", data_listen, "REJOIN_DATA_LISTEN", "address for data connections");
  option("--chunk-bytes", chunk_bytes, "REJOIN_CHUNK_BYTES", "all-reduce: largest chunk");
  option("--chunks-in-flight", chunks_in_flight, "REJOIN_CHUNKS_IN_FLIGHT",
         "all-reduce: chunks in flight per neighbour");
  option("--reduce-blocks", reduce_blocks, "REJOIN_REDUCE_BLOCKS", "all-reduce on a GPU: blocks of its kernel");
  option("--reduce-threads", reduce_threads, "REJOIN_REDUCE_THREADS", "… and threads of each");
  option("--flip-bit-at", flip_bit_at, "REJOIN_FLIP_BIT_AT",
         "a drill: in this step one bit of what the all-reduce brings here is flipped, as if on its way; 0: never");
  option("--keep-budget", keep_budget, "REJOIN_KEEP_BUDGET", "bytes of gradients kept while catching up");
}

Result<SessionConfig> SessionConfig::from_environment() {
  SessionConfig config;
  CLI::App app;
  config.bind(app);
  try {
    app.parse(std::vector<std::string>{});
  } catch (const CLI::ParseError& error) {
    return fail(ErrorCode::invalid_argument, "REJOIN_* settings: {}", error.what());
  }
  return config;
}

namespace {

class SessionImpl final : public Session {
 public:
  SessionImpl(SessionConfig config, std::shared_ptr<device::Device> device)
      : config_(std::move(config)), state_(config_.keep_budget, std::move(device)) {}
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
  std::span<std::byte> weight(TensorId t) override { return state_.column(t, 0); }
  std::span<std::byte> moment(TensorId t, std::uint32_t index) override { return state_.column(t, index + 1); }
  std::span<std::byte> gradient(TensorId t) override { return state_.gradient(t); }

  using Session::join;
  Result<> join(const Position& from) override {
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
    version_ = version;
    stands_ = from;
    progress_ = std::make_unique<Progress>(config_, state_);
    return progress_->join(from, *digest, took);
  }

  Result<std::optional<Step>> begin_step() override {
    if (!progress_) return fail(ErrorCode::invalid_argument, "begin_step() before join()");
    auto view = progress_->wait_for_step(last_);
    if (!view) return tl::unexpected(view.error());
    if (!*view) return std::optional<Step>{};
    step_ = (*view)->step;
    stands_.reset();
    if ((*view)->contributes) stands_ = position_of(step_ - 1, (*view)->trained);
    state_.owner().set_phase(shm::Phase::compute);
    std::vector<SampleRange> batch;
    for (const auto& range : (*view)->batch) batch.push_back({range.begin, range.end});
    return std::optional<Step>(std::in_place, step_, (*view)->contributes, (*view)->leads, std::move(batch));
  }

  Result<> all_reduce(BucketId bucket) override {
    if (!progress_) return fail(ErrorCode::invalid_argument, "all_reduce() before join()");
    return progress_->all_reduce(bucket);
  }
  Result<> all_reduce(BucketId bucket, CudaStream stream) override {
    if (!progress_) return fail(ErrorCode::invalid_argument, "all_reduce() before join()");
    return progress_->all_reduce(bucket, stream);
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
  std::span<const std::byte> reduced(TensorId t) const override { return state_.reduced(t); }

  std::uint64_t version() const override { return version_; }
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
    if (progress_)
      if (auto updated = progress_->wait_for_update(); !updated) return tl::unexpected(updated.error());
    return state_.digest();
  }

 private:
  template <typename End>
  Result<> commit(const std::function<void(const Piece&)>& optimizer, End end) {
    if (!progress_) return fail(ErrorCode::invalid_argument, "commit() before join()");
    const auto decision = progress_->wait_for_commit(step_);
    if (!decision) return tl::unexpected(decision.error());
    if (!decision->committed) {  // begin_step() gives it again, to contribute to
      version_ = step_ - 1;
      return {};
    }
    const bool contributed = decision->contributed;
    stands_.reset();
    if (auto updated = progress_->wait_for_update(); !updated) return updated;
    const auto pieces = state_.begin_update(rejoin::Step(step_), contributed);
    if (!pieces) return tl::unexpected(pieces.error());
    if (look_) look_(step_);
    for (const auto& piece : *pieces)
      optimizer({TensorId{piece.tensor}, piece.first, piece.count, piece.step.value, piece.gradient});
    if (auto ended = end(contributed); !ended) return ended;
    last_ = step_;
    version_ = step_;
    if (contributed) stands_ = position_of(step_, decision->trained);
    return {};
  }

  static Position position_of(std::uint64_t step, const membership::Samples& trained) {
    std::vector<SampleRange> ranges;
    for (const auto& [begin, end] : trained.ranges()) ranges.push_back({begin, end});
    return {step, std::move(ranges), std::nullopt};
  }

  const SessionConfig config_;
  TrainingState state_;
  std::unique_ptr<Progress> progress_;
  std::uint64_t step_ = 0, last_ = 0, version_ = 0;
  std::function<void(std::uint64_t)> look_;
  std::optional<Position> stands_;  // of the state, where it is of one step
};

}  // namespace

Result<std::unique_ptr<Session>> Session::open(const SessionConfig& config) {
  if (config.socket.empty())
    return fail(ErrorCode::invalid_argument, "no daemon socket: set SessionConfig::socket, --daemon or REJOIN_SOCKET");
  auto device = device::open_device(config.device);
  if (!device) return tl::unexpected(device.error());
  if (config.flip_bit_at != 0 && (*device)->kind() != device::MemoryKind::host)
    return fail(ErrorCode::invalid_argument, "--flip-bit-at {} of a state on {}: only the host's memory takes it",
                config.flip_bit_at, config.device);
  return std::unique_ptr<Session>(std::make_unique<SessionImpl>(config, std::move(*device)));
}

}  // namespace rejoin
