#include "rejoin/training_state.h"

#include <algorithm>

#include "base/digest.h"
#include "base/fail.h"
#include "base/text.h"

namespace rejoin {

Result<TensorId> TrainingState::add(const TensorSpec& tensor, const std::vector<std::span<std::byte>>& own) {
  static_assert(kMostMoments + 1 == local::kMaxColumns);
  if (tensor.moments > kMostMoments)
    return fail(ErrorCode::invalid_argument, "tensor '{}' has {} moments; there must be 0 to {}", tensor.name,
                tensor.moments, kMostMoments);
  local::Tensor t{.name = tensor.name,
                  .type = tensor.type,
                  .count = tensor.count,
                  .columns = tensor.moments + 1,
                  .elementwise = tensor.elementwise,
                  .moment_types = tensor.moment_types,
                  .gradient_type = tensor.gradient_type};
  if (auto right = check_new(t, own); !right) return tl::unexpected(right.error());
  names_.insert(t.name);
  tensors_.push_back(std::move(t));
  own_state_.push_back(own);
  bucket_of_.push_back(kNone);
  return TensorId{static_cast<std::uint32_t>(tensors_.size() - 1)};
}

Result<> TrainingState::check_new(const local::Tensor& tensor, const local::Owner::Own& own) const {
  if (owner_) return fail(ErrorCode::invalid_argument, "tensor '{}' comes after allocate()", tensor.name);
  if (auto right = local::check(tensor); !right) return right;
  if (!is_utf8(tensor.name))  // nobody would read its declaration
    return fail(ErrorCode::invalid_argument, "tensor '{}': its name is not UTF-8",
                printable(tensor.name, tensor.name.size()));
  if (names_.contains(tensor.name))
    return fail(ErrorCode::invalid_argument, "there is a tensor '{}' already: each needs a name of its own",
                tensor.name);
  if (tensors_.size() == local::kMaxTensors)
    return fail(ErrorCode::invalid_argument, "tensor '{}' would be number {}; a state has at most {}: join some",
                tensor.name, tensors_.size() + 1, local::kMaxTensors);
  return own.empty() ? Result<>() : local::Owner::check(tensor, own);
}

Result<BucketId> TrainingState::bucket(const std::vector<TensorId>& tensors, std::span<std::byte> own) {
  const auto id = static_cast<BucketId>(buckets_.size());
  const auto bytes = check_bucket(id, tensors);
  if (!bytes) return tl::unexpected(bytes.error());
  if (own.data() != nullptr && own.size() != *bytes)  // also where it is one of no bytes
    return fail(ErrorCode::invalid_argument, "bucket {}: its gradients are {} bytes, and the memory for them {}", id,
                *bytes, own.size());
  const auto element = size_of(tensors_[tensors[0].index].type_of_gradient());
  if (device_->kind() != device::MemoryKind::host && reinterpret_cast<std::uintptr_t>(own.data()) % element != 0)
    return fail(ErrorCode::invalid_argument,
                "bucket {}: the memory for its gradients at {} is not where elements of {} can be added on a GPU: give "
                "it some at a multiple of {}",
                id, static_cast<const void*>(own.data()), to_string(tensors_[tensors[0].index].type_of_gradient()),
                element);
  for (BucketId other = 0; other < id; ++other)
    if (own.data() < own_[other].data() + own_[other].size() && own_[other].data() < own.data() + own.size())
      return fail(ErrorCode::invalid_argument,
                  "bucket {}: the memory for its gradients and that of {} have bytes in common: give each its own", id,
                  name_of(other));
  for (auto t : tensors) bucket_of_[t.index] = id;
  buckets_.push_back(tensors);
  own_.push_back(own);
  exact_.push_back(false);
  return id;
}

Result<> TrainingState::keep_exact(BucketId bucket) {
  if (owner_) return fail(ErrorCode::invalid_argument, "keep_exact() comes after allocate()");
  if (bucket >= buckets_.size())
    return fail(ErrorCode::not_found, "keep_exact(): there is no bucket {}; bucket() has given {}, numbered from 0",
                bucket, buckets_.size());
  exact_[bucket] = true;
  return {};
}

Result<> TrainingState::set_fingerprint(std::string text) {
  constexpr std::size_t longest = 4096;
  if (text.size() > longest)
    return fail(ErrorCode::invalid_argument, "the fingerprint has {} bytes; there may be up to {}", text.size(),
                longest);
  fingerprint_ = std::move(text);
  return {};
}

Result<std::uint64_t> TrainingState::check_bucket(BucketId id, const std::vector<TensorId>& tensors) const {
  if (owner_) return fail(ErrorCode::invalid_argument, "a bucket comes after allocate()");
  if (tensors.empty()) return fail(ErrorCode::invalid_argument, "a bucket without tensors");
  if (id == ftar::kMaxBuckets)
    return fail(ErrorCode::invalid_argument,
                "bucket {} would be one more than the {} that there may be: put several "
                "tensors into each",
                id, ftar::kMaxBuckets);
  std::uint64_t bytes = 0;
  std::set<std::uint32_t> seen;
  for (auto t : tensors) {
    if (t.index >= tensors_.size())
      return fail(ErrorCode::not_found, "bucket {}: there is no tensor {}; add() has given {}, numbered from 0", id,
                  t.index, tensors_.size());
    if (!seen.insert(t.index).second)
      return fail(ErrorCode::invalid_argument, "bucket {} names tensor '{}' twice", id, tensors_[t.index].name);
    if (bucket_of_[t.index] != kNone)
      return fail(ErrorCode::invalid_argument, "tensor '{}' is in bucket {} already", tensors_[t.index].name,
                  bucket_of_[t.index]);
    const DataType type = tensors_[t.index].type_of_gradient(), first = tensors_[tensors[0].index].type_of_gradient();
    if (type != first)
      return fail(ErrorCode::invalid_argument, "bucket {} mixes gradients of {} and {}", id, to_string(type),
                  to_string(first));
    bytes += gradient_bytes(t.index);
  }
  return bytes;
}

std::string TrainingState::name_of(BucketId bucket) const {
  constexpr std::size_t shown = 3;
  const auto& tensors = buckets_[bucket];
  std::string names;
  for (std::size_t i = 0; i < std::min(shown, tensors.size()); ++i)
    names += fmt::format("{}'{}'", i > 0 ? ", " : "", tensors_[tensors[i].index].name);
  if (tensors.size() > shown) names += fmt::format(" and {} more", tensors.size() - shown);
  return fmt::format("bucket {} ({})", bucket, names);
}

std::string TrainingState::names_of_all_but(const std::vector<bool>& some) const {
  std::string names;
  for (BucketId b = 0; b < some.size(); ++b)
    if (!some[b]) names += (names.empty() ? "" : ", ") + name_of(b);
  return names;
}

Result<> TrainingState::allocate() {
  if (owner_) return fail(ErrorCode::invalid_argument, "allocate() twice");
  for (std::size_t t = 0; t < tensors_.size(); ++t)
    if (bucket_of_[t] == kNone)
      return fail(ErrorCode::invalid_argument, "tensor '{}' is in no bucket", tensors_[t].name);
  auto manifest = local::Manifest::make(tensors_);
  if (!manifest) return tl::unexpected(manifest.error());
  // A slice under way has the gradients of the steps that pass meanwhile kept; with room for two there is always one.
  for (const auto& slice : manifest->slices()) {
    const auto& tensor = manifest->tensors()[slice.range.tensor];
    const std::uint64_t needed = 2 * slice.range.count * size_of(tensor.type_of_gradient());
    if (needed > gradient_log_budget_)
      return fail(ErrorCode::invalid_argument,
                  "the budget for kept gradients is {}, and tensor '{}' needs {}: raise it (--gradient-log-budget, "
                  "REJOIN_GRADIENT_LOG_BUDGET)",
                  human_bytes(gradient_log_budget_), tensor.name, human_bytes(needed));
  }
  auto access = device_->make_access();
  if (!access) return tl::unexpected(access.error());
  access_ = std::move(*access);
  auto owner = local::Owner::make(std::move(*manifest), device_, own_state_);
  if (!owner) return tl::unexpected(owner.error());
  std::uint64_t inputs = 0, outputs = 0;  // bytes
  gradient_offset_.resize(tensors_.size());
  struct Range {
    std::uint64_t input = 0, output = 0, size = 0;
  };
  std::vector<Range> ranges;  // of the buckets
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const std::uint64_t begin = outputs;
    for (auto t : buckets_[b]) {
      gradient_offset_[t.index] = outputs;
      outputs += gradient_bytes(t.index);
    }
    ranges.push_back({inputs, begin, outputs - begin});
    outputs = round_up(outputs, 4096);
    if (own_[b].empty()) inputs += outputs - begin;
  }
  auto input = allocate_gradients(inputs), output = allocate_gradients(outputs);
  if (!input) return tl::unexpected(input.error());
  if (!output) return tl::unexpected(output.error());
  input_ = std::move(*input);
  output_ = std::move(*output);
  owner_ = std::make_unique<local::Owner>(std::move(*owner));
  gradient_.resize(tensors_.size());
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const auto& [from, begin, size] = ranges[b];
    const auto input_of = own_[b].empty() ? input_.bytes.subspan(from, size) : own_[b];
    for (auto t : buckets_[b])
      gradient_[t.index] = input_of.subspan(gradient_offset_[t.index] - begin, gradient_bytes(t.index));
    const DataType type = tensors_[buckets_[b][0].index].type_of_gradient();
    specs_.push_back({type, size / size_of(type), input_of, output_.bytes.subspan(begin, size), exact_[b]});
  }
  return {};
}

Result<device::Memory> TrainingState::allocate_gradients(std::size_t size) const {
  if (size == 0) return device::Memory{};
  auto memory = device_->allocate(size);
  if (!memory) return memory;
  if (auto zeroed = device::zero_fresh(*device_, memory->bytes); !zeroed) return tl::unexpected(zeroed.error());
  return memory;
}

Result<> TrainingState::check_tensor(TensorId t, const char* what) const {
  if (!owner_) return fail(ErrorCode::invalid_argument, "{} before allocate(): nothing is there yet", what);
  if (t.index >= tensors_.size())
    return fail(ErrorCode::not_found, "{}: there is no tensor {}; add() has given {}, numbered from 0", what, t.index,
                tensors_.size());
  return {};
}

Result<> TrainingState::check_moment(TensorId t, std::uint32_t index) const {
  if (auto there = check_tensor(t, "moment()"); !there) return there;
  const auto& tensor = tensors_[t.index];
  if (tensor.columns == 1)
    return fail(ErrorCode::not_found, "moment(): tensor '{}' was declared without moments", tensor.name);
  if (index >= tensor.columns - 1)
    return fail(ErrorCode::not_found,
                "moment(): tensor '{}' has no moment {}; it was declared with {}, numbered 0 to {}", tensor.name, index,
                tensor.columns - 1, tensor.columns - 2);
  return {};
}

std::span<std::byte> TrainingState::column(TensorId t, std::uint32_t index) {
  REJOIN_CHECK(owner_ && t.index < tensors_.size() && index < tensors_[t.index].columns, "tensor {} column {}", t.index,
               index);
  return owner_->column(t.index, index);
}

std::span<const std::byte> TrainingState::reduced(TensorId t) const {
  REJOIN_CHECK(owner_ && t.index < tensors_.size(), "reduced() of tensor {} before allocate()", t.index);
  return output_.bytes.subspan(gradient_offset_[t.index], gradient_bytes(t.index));
}

std::span<std::byte> TrainingState::gradient(TensorId t) {
  REJOIN_CHECK(owner_ && t.index < tensors_.size(), "gradient() of tensor {} before allocate()", t.index);
  return gradient_[t.index];
}

Result<std::uint64_t> TrainingState::digest() const {
  constexpr std::size_t at_once = 256;  // parts
  if (!owner_) return fail(ErrorCode::invalid_argument, "a digest of the state before allocate()");
  std::uint64_t result = 0;
  const auto& manifest = owner_->manifest();
  std::vector<local::Columns> some;
  for (std::size_t i = 0; i < manifest.parts().size(); ++i) {
    const auto& part = manifest.parts()[i];
    auto& columns = some.emplace_back();
    for (std::uint32_t c = 0; c < manifest.columns(part); ++c) columns.push_back(owner_->column(part, c));
    if (some.size() < at_once && i + 1 < manifest.parts().size()) continue;
    const auto digests = local::digests_of(std::exchange(some, {}), *access_);
    if (!digests) return tl::unexpected(digests.error());
    for (const auto digest : *digests) result = combine_digests(result, digest);
  }
  return result;
}

std::uint64_t TrainingState::plan_hash() const {
  std::uint64_t plan = owner_->manifest().hash();
  for (const auto& bucket : buckets_)
    for (auto t : bucket) plan = combine_digests(plan, combine_digests(t.index, bucket.size()));
  if (!fingerprint_.empty()) plan = combine_digests(plan, rejoin::digest(as_bytes(fingerprint_)));
  return plan | 1;
}

proto::Declaration TrainingState::declaration() const {
  constexpr std::size_t most_bytes = 256 * KiB;
  proto::Declaration all;
  all.set_fingerprint(fingerprint_);
  std::size_t bytes = fingerprint_.size();
  for (std::size_t t = 0; t < tensors_.size(); ++t) {
    proto::Declaration::Tensor tensor;
    tensor.set_name(tensors_[t].name);
    tensor.set_type(std::string(to_string(tensors_[t].type)));
    tensor.set_count(tensors_[t].count);
    tensor.set_moments(tensors_[t].columns - 1);
    tensor.set_elementwise(tensors_[t].elementwise);
    tensor.set_bucket(bucket_of_[t]);
    for (const auto type : tensors_[t].moment_types) tensor.add_moment_types(std::string(to_string(type)));
    if (tensors_[t].type_of_gradient() != tensors_[t].type)
      tensor.set_gradient_type(std::string(to_string(tensors_[t].type_of_gradient())));
    bytes += tensor.ByteSizeLong() + 8;
    if (bytes > most_bytes) {
      all.set_omitted(static_cast<std::uint32_t>(tensors_.size() - t));
      break;
    }
    *all.add_tensors() = std::move(tensor);
  }
  return all;
}

Result<> TrainingState::start(std::uint64_t version) {
  auto gradient_log = catchup::GradientLog::make(*owner_, gradient_log_budget_);
  if (!gradient_log) return tl::unexpected(gradient_log.error());
  gradient_log_ = std::move(*gradient_log);
  owner_->set_version(version);
  return {};
}

Result<std::vector<catchup::Update>> TrainingState::begin_update(Step step, bool contributed,
                                                                 std::uint32_t contributors) {
  return gradient_log_->begin(
      step, contributed, contributors, [&](std::uint32_t t, std::uint64_t first, std::uint64_t count) {
        const std::uint64_t element = size_of(tensors_[t].type_of_gradient());
        return BytesView(output_.bytes).subspan(gradient_offset_[t] + first * element, count * element);
      });
}

void TrainingState::end_update(Step step, bool contributed) { gradient_log_->end(step, contributed); }

bool TrainingState::complete_at(Step version) const {
  if (!owner_) return false;
  auto& page = owner_->page();
  if (page.complete.load() == 0 || owner_->clock() != local::Clock{version.value, false}) return false;
  const auto* statuses = page.slice_statuses();
  return std::all_of(statuses, statuses + owner_->manifest().slices().size(), [&](const auto& status) {
    const auto slice = local::SliceStatus::unpack(status.load());
    return slice.state == local::SliceState::current && slice.version() == version.value;
  });
}

}  // namespace rejoin
