#include "rejoin/session.h"

#include "base/command_line.h"
#include "rejoin/progress.h"
#include "rejoin/training_state.h"

namespace rejoin {

void SessionConfig::bind(CommandLine& line) {
  const auto option = [&](const char* flags, auto& value, const char* env, const char* help) {
    return Flag(line.add(flags, value, help).environment(env).show_default());
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
  CommandLine line("");
  config.bind(line);
  if (auto parsed = line.parse({}); !parsed)
    return fail(ErrorCode::invalid_argument, "REJOIN_* settings: {}", parsed.error().message);
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

  Result<> join(std::uint64_t version) override {
    if (!state_.allocated() || progress_)
      return fail(ErrorCode::invalid_argument, "join() comes once, after allocate()");
    if (version > kMostSteps)
      return fail(ErrorCode::invalid_argument, "join({}): a version is the number of a step, {} at most", version,
                  kMostSteps);
    if (auto started = state_.start(version); !started) return started;
    const SteadyClock clock;
    const TimePoint before = clock.now();
    const auto digest = state_.digest();
    if (!digest) return tl::unexpected(digest.error());
    const Duration took = clock.now() - before;
    version_ = version;
    progress_ = std::make_unique<Progress>(config_, state_);
    return progress_->join(version, *digest, took);
  }

  Result<std::optional<Step>> begin_step() override {
    if (!progress_) return fail(ErrorCode::invalid_argument, "begin_step() before join()");
    auto view = progress_->wait_for_step(last_);
    if (!view) return tl::unexpected(view.error());
    if (!*view) return std::optional<Step>{};
    step_ = (*view)->step;
    state_.owner().set_phase(shm::Phase::compute);
    std::vector<SampleRange> batch;
    for (const auto& range : (*view)->batch) batch.push_back({range.begin, range.end});
    return std::optional<Step>(std::in_place, step_, (*view)->contributes, std::move(batch));
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

  std::uint64_t version() const override { return version_; }
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
    if (auto updated = progress_->wait_for_update(); !updated) return updated;
    const auto pieces = state_.begin_update(rejoin::Step(step_), contributed);
    if (!pieces) return tl::unexpected(pieces.error());
    for (const auto& piece : *pieces)
      optimizer({TensorId{piece.tensor}, piece.first, piece.count, piece.step.value, piece.gradient});
    if (auto ended = end(contributed); !ended) return ended;
    last_ = step_;
    version_ = step_;
    return {};
  }

  const SessionConfig config_;
  TrainingState state_;
  std::unique_ptr<Progress> progress_;
  std::uint64_t step_ = 0, last_ = 0, version_ = 0;
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
