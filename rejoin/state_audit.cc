#include "rejoin/state_audit.h"

#include <algorithm>

#include "base/digest.h"
#include "base/fail.h"
#include "base/text.h"

namespace rejoin {

namespace {

constexpr std::uint64_t kGrain = 4 * KiB;  // ranges begin and end at multiples of this in a part

}  // namespace

StateAudit::StateAudit(const local::Owner& owner) : owner_(owner) {
  std::uint64_t at = 0;
  for (const auto& part : owner.manifest().parts()) {
    begins_.push_back(at);
    at += owner.manifest().length(part, 0);
  }
  begins_.push_back(at);
}

Result<std::unique_ptr<StateAudit>> StateAudit::make(const local::Owner& owner) {
  std::unique_ptr<StateAudit> audit(new StateAudit(owner));
  auto access = owner.device()->make_access(device::Priority::low);  // the trainer's kernels go first
  if (!access) return tl::unexpected(access.error());
  audit->access_ = std::move(*access);
  return audit;
}

Result<std::vector<local::Part>> StateAudit::ranges(std::uint64_t period, std::uint64_t phase) const {
  if (phase >= period) return fail(ErrorCode::invalid_argument, "an audit of part {} of {}", phase, period);
  const auto& manifest = owner_.manifest();
  const auto border = [&](std::uint64_t number) {
    return static_cast<std::uint64_t>(static_cast<unsigned __int128>(begins_.back()) * number / period);
  };
  const std::uint64_t begin = border(phase), end = border(phase + 1);
  std::vector<local::Part> ranges;
  const auto first = std::upper_bound(begins_.begin(), begins_.end(), begin) - 1 - begins_.begin();
  for (auto i = static_cast<std::size_t>(first); i < manifest.parts().size() && begins_[i] < end; ++i) {
    const local::Part& part = manifest.parts()[i];
    const std::uint64_t element = size_of(manifest.tensors()[part.tensor].type), length = manifest.length(part, 0);
    const auto cut = [&](std::uint64_t at) {  // whoever begins before a border ends at the same
      return at <= begins_[i] ? 0 : at - begins_[i] >= length ? length : (at - begins_[i]) / kGrain * kGrain;
    };
    const std::uint64_t from = cut(begin), to = cut(end);
    if (from < to) ranges.push_back({part.tensor, part.first + from / element, (to - from) / element});
  }
  return ranges;
}

Result<std::uint64_t> StateAudit::digest(std::uint64_t period, std::uint64_t phase) {
  const auto some = ranges(period, phase);
  if (!some) return tl::unexpected(some.error());
  std::vector<BytesView> columns;
  for (const auto& range : *some)
    for (std::uint32_t c = 0; c < owner_.manifest().columns(range); ++c) columns.push_back(owner_.column(range, c));
  const auto digests = access_->digests(columns);
  if (!digests) return tl::unexpected(digests.error());
  std::uint64_t all = combine_digests(period, phase);  // two that audit different parts differ
  for (const auto digest : *digests) all = combine_digests(all, digest);
  return all;
}

Result<std::vector<StateAudit::RangeDigest>> StateAudit::range_digests(std::uint64_t period, std::uint64_t phase) {
  const auto some = ranges(period, phase);
  if (!some) return tl::unexpected(some.error());
  std::vector<local::Columns> parts;
  for (const auto& range : *some) {
    auto& columns = parts.emplace_back();
    for (std::uint32_t c = 0; c < owner_.manifest().columns(range); ++c) columns.push_back(owner_.column(range, c));
  }
  const auto digests = local::digests_of(parts, *access_);
  if (!digests) return tl::unexpected(digests.error());
  // As fine as fits: by part, or several together.
  const std::size_t together = (some->size() + kMostRanges - 1) / kMostRanges;
  std::vector<RangeDigest> range_digests;
  std::uint32_t last = 0;  // tensor
  for (std::size_t i = 0; i < some->size(); ++i) {
    const local::Part& range = (*some)[i];
    const std::string& name = owner_.manifest().tensors()[range.tensor].name;
    if (i % together == 0) range_digests.push_back({name, range.first, 0, 0});
    else if (range.tensor != last) range_digests.back().tensor += "', '" + name;
    RangeDigest& range_digest = range_digests.back();
    range_digest.tensor = cut(std::move(range_digest.tensor), kLongestName);
    range_digest.count += range.count;
    range_digest.digest = combine_digests(range_digest.digest, (*digests)[i]);
    last = range.tensor;
  }
  return range_digests;
}

}  // namespace rejoin
