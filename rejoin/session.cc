#include "rejoin/session.h"

#include <CLI/CLI.hpp>
#include <cstring>

#include "base/digest.h"
#include "base/events.h"
#include "catchup/keeper.h"
#include "rejoin/progress.h"
#include "shm/owner.h"

namespace rejoin {

void SessionConfig::bind(CLI::App& app) {
  const auto option = [&](const char* flags, auto& value, const char* env, const char* help) {
    return app.add_option(flags, value, help)->envname(env)->capture_default_str();
  };
  option("--replica", replica, "REJOIN_REPLICA", "this process's replica, from 0");
  option("--rank", rank, "REJOIN_RANK", "its rank in the replica, from 0");
  option("--daemon", socket, "REJOIN_SOCKET", "unix socket of the node's daemon");
  option("--transport", transport, "REJOIN_TRANSPORT",
         "transport of the all-reduce: shm, tcp, tcp:ADDRESS,ADDRESS… (rails), ibverbs[:DEVICE,DEVICE…] or ucx:LIST");
  option("--data-listen", data_listen, "REJOIN_DATA_LISTEN", "address for data connections");
  option("--chunk-bytes", chunk_bytes, "REJOIN_CHUNK_BYTES", "all-reduce: largest chunk");
  option("--chunks-in-flight", chunks_in_flight, "REJOIN_CHUNKS_IN_FLIGHT",
         "all-reduce: chunks in flight per neighbour");
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
  explicit SessionImpl(SessionConfig config) : config_(std::move(config)) {}
  ~SessionImpl() override { progress_.reset(); }

  Result<TensorId> add(const TensorSpec& tensor) override {
    if (owner_) return fail(ErrorCode::invalid_argument, "tensor '{}' comes after allocate()", tensor.name);
    shm::Tensor t{.name = tensor.name,
                  .type = tensor.type,
                  .count = tensor.count,
                  .columns = tensor.moments + 1,
                  .elementwise = tensor.elementwise};
    tensors_.push_back(std::move(t));
    bucket_of_.push_back(kNone);
    return TensorId{static_cast<std::uint32_t>(tensors_.size() - 1)};
  }

  Result<BucketId> bucket(const std::vector<TensorId>& tensors) override {
    if (owner_) return fail(ErrorCode::invalid_argument, "a bucket comes after allocate()");
    if (tensors.empty()) return fail(ErrorCode::invalid_argument, "a bucket without tensors");
    const auto id = static_cast<BucketId>(buckets_.size());
    for (auto t : tensors) {
      if (t.index >= tensors_.size()) return fail(ErrorCode::not_found, "bucket {}: no tensor {}", id, t.index);
      if (bucket_of_[t.index] != kNone)
        return fail(ErrorCode::invalid_argument, "tensor '{}' is in bucket {} already", tensors_[t.index].name,
                    bucket_of_[t.index]);
      if (tensors_[t.index].type != tensors_[tensors[0].index].type)
        return fail(ErrorCode::invalid_argument, "bucket {} mixes {} and {}", id, to_string(tensors_[t.index].type),
                    to_string(tensors_[tensors[0].index].type));
      bucket_of_[t.index] = id;
    }
    buckets_.push_back(tensors);
    return id;
  }

  Result<> allocate() override {
    if (owner_) return fail(ErrorCode::invalid_argument, "allocate() twice");
    for (std::size_t t = 0; t < tensors_.size(); ++t)
      if (bucket_of_[t] == kNone)
        return fail(ErrorCode::invalid_argument, "tensor '{}' is in no bucket", tensors_[t].name);
    auto manifest = shm::Manifest::make(tensors_);
    if (!manifest) return tl::unexpected(manifest.error());
    // A slice under way has the gradients of the steps that pass meanwhile kept; with room for two there is always one.
    for (const auto& slice : manifest->slices()) {
      const std::uint64_t needed = 2 * slice.whole.count * size_of(manifest->tensors()[slice.whole.tensor].type);
      if (needed > config_.keep_budget)
        return fail(ErrorCode::invalid_argument,
                    "the budget for kept gradients is {}, and tensor '{}' needs {}: raise it (--keep-budget, "
                    "REJOIN_KEEP_BUDGET)",
                    human_bytes(config_.keep_budget), manifest->tensors()[slice.whole.tensor].name,
                    human_bytes(needed));
    }
    auto owner = shm::Owner::make(std::move(*manifest));
    if (!owner) return tl::unexpected(owner.error());
    std::uint64_t total = 0;
    gradient_offset_.resize(tensors_.size());
    std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;  // of the buckets
    for (const auto& bucket : buckets_) {
      const std::uint64_t begin = total;
      for (auto t : bucket) {
        gradient_offset_[t.index] = total;
        total += gradient_bytes(t.index);
      }
      ranges.emplace_back(begin, total - begin);
      total = round_up(total, 4096);
    }
    auto input = Mapping::anonymous(std::max<std::uint64_t>(total, 4096)),
         output = Mapping::anonymous(std::max<std::uint64_t>(total, 4096));
    if (!input) return tl::unexpected(input.error());
    if (!output) return tl::unexpected(output.error());
    input_ = std::move(*input);
    output_ = std::move(*output);
    owner_ = std::make_unique<shm::Owner>(std::move(*owner));
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      const DataType type = tensors_[buckets_[b][0].index].type;
      specs_.push_back({type, ranges[b].second / size_of(type),
                        input_.span().subspan(ranges[b].first, ranges[b].second),
                        output_.span().subspan(ranges[b].first, ranges[b].second)});
    }
    return {};
  }

  std::span<std::byte> weight(TensorId t) override { return column(t, 0); }
  std::span<std::byte> moment(TensorId t, std::uint32_t index) override { return column(t, index + 1); }
  std::span<std::byte> gradient(TensorId t) override {
    REJOIN_CHECK(owner_ && t.index < tensors_.size(), "gradient() of tensor {} before allocate()", t.index);
    return input_.span().subspan(gradient_offset_[t.index], gradient_bytes(t.index));
  }

  Result<> join(std::uint64_t version) override {
    if (!owner_ || progress_) return fail(ErrorCode::invalid_argument, "join() comes once, after allocate()");
    owner_->set_version(version);
    version_ = version;
    std::uint64_t plan = owner_->manifest().hash();
    for (const auto& bucket : buckets_)
      for (auto t : bucket) plan = combine_digests(plan, combine_digests(t.index, bucket.size()));
    keeper_ = std::make_unique<catchup::Keeper>(*owner_, config_.keep_budget);
    progress_ = std::make_unique<Progress>(config_, *owner_, specs_, plan | 1);
    return progress_->join(version, state_digest());
  }

  Result<std::optional<Step>> begin_step() override {
    if (!progress_) return fail(ErrorCode::invalid_argument, "begin_step() before join()");
    auto view = progress_->wait_for_step(last_);
    if (!view) return tl::unexpected(view.error());
    if (!*view) return std::optional<Step>{};
    step_ = (*view)->step;
    owner_->set_phase(shm::Phase::compute);
    std::vector<SampleRange> batch;
    for (const auto& range : (*view)->batch) batch.push_back({range.begin, range.end});
    return std::optional<Step>(std::in_place, step_, (*view)->contributes, std::move(batch));
  }

  Result<> all_reduce(BucketId bucket) override {
    if (!progress_) return fail(ErrorCode::invalid_argument, "all_reduce() before join()");
    return progress_->all_reduce(bucket);
  }

  Result<> commit(const std::function<void(const Piece&)>& optimizer) override {
    if (!progress_) return fail(ErrorCode::invalid_argument, "commit() before join()");
    auto contributed = progress_->wait_for_commit(step_);
    if (!contributed) return tl::unexpected(contributed.error());
    const rejoin::Step step(step_);
    const auto pieces =
        keeper_->begin(step, *contributed, [&](std::uint32_t t, std::uint64_t first, std::uint64_t count) {
          const std::uint64_t element = size_of(tensors_[t].type);
          return BytesView(output_.span()).subspan(gradient_offset_[t] + first * element, count * element);
        });
    for (const auto& piece : pieces)
      optimizer({TensorId{piece.tensor}, piece.first, piece.count, piece.step.value, piece.gradient});
    keeper_->end(step, *contributed);
    last_ = step_;
    version_ = step_;
    return {};
  }

  std::uint64_t version() const override { return version_; }

  std::uint64_t state_digest() const override {
    std::uint64_t result = 0;
    const auto& manifest = owner_->manifest();
    for (const auto& part : manifest.parts())
      result = combine_digests(result, shm::digest_of(manifest, part, owner_->state()));
    return result;
  }

 private:
  static constexpr BucketId kNone = ~BucketId{0};
  std::uint64_t gradient_bytes(std::size_t t) const { return tensors_[t].count * size_of(tensors_[t].type); }
  std::span<std::byte> column(TensorId t, std::uint32_t index) {
    REJOIN_CHECK(owner_ && t.index < tensors_.size() && index < tensors_[t.index].columns, "tensor {} column {}",
                 t.index, index);
    const auto& tensor = owner_->manifest().tensors()[t.index];
    return owner_->state().subspan(tensor.offset + index * tensor.stride, gradient_bytes(t.index));
  }

  const SessionConfig config_;
  std::vector<shm::Tensor> tensors_;
  std::vector<BucketId> bucket_of_;
  std::vector<std::vector<TensorId>> buckets_;
  std::vector<std::uint64_t> gradient_offset_;
  std::vector<ftar::BucketSpec> specs_;
  Mapping input_, output_;
  std::unique_ptr<shm::Owner> owner_;
  std::unique_ptr<catchup::Keeper> keeper_;
  std::unique_ptr<Progress> progress_;
  std::uint64_t step_ = 0, last_ = 0, version_ = 0;
};

}  // namespace

Result<std::unique_ptr<Session>> Session::open(const SessionConfig& config) {
  if (config.socket.empty())
    return fail(ErrorCode::invalid_argument, "no daemon socket: set SessionConfig::socket, --daemon or REJOIN_SOCKET");
  return std::unique_ptr<Session>(std::make_unique<SessionImpl>(config));
}

}  // namespace rejoin
