#include "local/manifest.h"

#include <algorithm>
#include <set>

#include "base/digest.h"
#include "base/fail.h"
#include "base/text.h"

namespace rejoin::local {

namespace {

// Elements of a part, of a tensor whose type and columns are in order.
std::uint64_t elements_per_part(const Tensor& tensor) {
  static_assert(kPartBytes >= kBorder * kMaxColumns * sizeof(double));
  return kPartBytes / tensor.element_bytes() / kBorder * kBorder;
}

std::uint64_t parts_of(const Tensor& tensor) {
  const std::uint64_t per_part = elements_per_part(tensor);
  return (tensor.count + per_part - 1) / per_part;
}

}  // namespace

std::uint64_t Tensor::element_bytes() const {
  std::uint64_t bytes = 0;
  for (std::uint32_t column = 0; column < columns; ++column) bytes += size_of(type_of(column));
  return bytes;
}

Result<> check(const Tensor& tensor) {
  constexpr std::uint64_t most_bytes = std::uint64_t{1} << 46;
  constexpr std::size_t longest_name = 200;
  if (tensor.name.empty())
    return fail(ErrorCode::invalid_argument, "a tensor's name has 0 bytes; there must be 1 to {}", longest_name);
  if (tensor.name.size() > longest_name)
    return fail(ErrorCode::invalid_argument,
                "tensor '{}' has a name of {} bytes; there must be 1 to {}: give it a shorter one, or the modules that "
                "it is named after",
                shortened(tensor.name, 80), tensor.name.size(), longest_name);
  if (size_of(tensor.type) == 0)
    return fail(ErrorCode::invalid_argument, "tensor '{}' has elements of type number {}, which is none", tensor.name,
                static_cast<unsigned>(tensor.type));
  if (tensor.columns < 1 || tensor.columns > kMaxColumns)
    return fail(ErrorCode::invalid_argument, "tensor '{}' has {} columns; there must be 1 to {}", tensor.name,
                tensor.columns, kMaxColumns);
  if (!tensor.moment_types.empty() && tensor.moment_types.size() != tensor.columns - 1)
    return fail(ErrorCode::invalid_argument, "tensor '{}' has {} moments and types for {}", tensor.name,
                tensor.columns - 1, tensor.moment_types.size());
  auto others = tensor.moment_types;
  others.push_back(tensor.type_of_gradient());
  for (const auto type : others)
    if (size_of(type) == 0)
      return fail(ErrorCode::invalid_argument,
                  "tensor '{}' has a moment or a gradient of type number {}, which is none", tensor.name,
                  static_cast<unsigned>(type));
  const std::uint64_t most = most_bytes / size_of(tensor.type);
  if (tensor.count == 0 || tensor.count > most)
    return fail(ErrorCode::invalid_argument, "tensor '{}' has {} elements; there must be 1 to {}", tensor.name,
                tensor.count, most);
  if (!tensor.elementwise && parts_of(tensor) > kMaxPins)
    return fail(ErrorCode::invalid_argument,
                "tensor '{}' of {} is not elementwise and too large to move at one version (limit {}); "
                "declare it elementwise if its optimizer is, or split it",
                tensor.name, human_bytes(tensor.count * tensor.element_bytes()), human_bytes(kMaxPins * kPartBytes));
  return {};
}

Result<Manifest> Manifest::make(std::vector<Tensor> tensors) {
  if (tensors.empty() || tensors.size() > kMaxTensors)
    return fail(ErrorCode::invalid_argument, "{} tensors in the state; there must be 1 to {}", tensors.size(),
                kMaxTensors);
  Manifest manifest;
  std::set<std::string> names;
  for (auto& tensor : tensors) {
    if (auto right = check(tensor); !right) return tl::unexpected(right.error());
    if (!names.insert(tensor.name).second)
      return fail(ErrorCode::invalid_argument, "tensor name '{}' is used twice", tensor.name);
    const std::uint64_t per_part = elements_per_part(tensor);
    if (parts_of(tensor) > kMaxParts - manifest.parts_.size())
      return fail(ErrorCode::invalid_argument, "a state over {} at tensor '{}'", human_bytes(kMaxParts * kPartBytes),
                  tensor.name);
    const auto index = static_cast<std::uint32_t>(manifest.tensors_.size());
    for (std::uint64_t first = 0; first < tensor.count; first += per_part) {
      const Part part{index, first, std::min(per_part, tensor.count - first)};
      if (tensor.elementwise || first == 0)
        manifest.slices_.push_back({part, static_cast<std::uint32_t>(manifest.parts_.size()), 1});
      else ++manifest.slices_.back().parts, manifest.slices_.back().range.count += part.count;
      manifest.parts_.push_back(part);
    }
    manifest.tensors_.push_back(std::move(tensor));
  }
  const Bytes bytes = manifest.serialise();
  manifest.hash_ = digest(bytes);
  return manifest;
}

Bytes Manifest::serialise() const {
  Bytes bytes;
  put(bytes, static_cast<std::uint32_t>(tensors_.size()));
  for (const auto& tensor : tensors_) {
    put(bytes, static_cast<std::uint32_t>(tensor.name.size()));
    const auto name = as_bytes(tensor.name);
    bytes.insert(bytes.end(), name.begin(), name.end());
    put(bytes, tensor.type);
    put(bytes, tensor.count);
    put(bytes, tensor.columns);
    put(bytes, static_cast<std::uint8_t>(tensor.elementwise));
    for (std::uint32_t column = 1; column < tensor.columns; ++column) put(bytes, tensor.type_of(column));
    put(bytes, tensor.type_of_gradient());
  }
  return bytes;
}

Result<Manifest> Manifest::parse(BytesView bytes) {
  const auto bad = [] { return fail(ErrorCode::corrupt, "the state manifest can't be read"); };
  std::uint32_t count = 0;
  if (!take(bytes, count) || count > kMaxTensors) return bad();
  std::vector<Tensor> tensors;
  for (std::uint32_t i = 0; i < count; ++i) {
    Tensor tensor;
    std::uint32_t length = 0;
    if (!take(bytes, length) || length > 200 || bytes.size() < length) return bad();
    tensor.name = as_text(bytes.first(length));
    bytes = bytes.subspan(length);
    std::uint8_t elementwise = 0;
    if (!take(bytes, tensor.type) || !take(bytes, tensor.count) || !take(bytes, tensor.columns) ||
        !take(bytes, elementwise) || tensor.columns < 1 || tensor.columns > kMaxColumns)
      return bad();
    tensor.elementwise = elementwise != 0;
    tensor.moment_types.resize(tensor.columns - 1);
    for (auto& type : tensor.moment_types)
      if (!take(bytes, type)) return bad();
    if (!take(bytes, tensor.gradient_type.emplace())) return bad();
    tensors.push_back(std::move(tensor));
  }
  if (!bytes.empty()) return bad();
  return make(std::move(tensors));
}

std::uint64_t Manifest::bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& tensor : tensors_) bytes += tensor.count * tensor.element_bytes();
  return bytes;
}

std::uint64_t Manifest::bytes_of(const Part& part) const { return part.count * tensors_[part.tensor].element_bytes(); }

std::uint64_t Manifest::packed_offset(const Part& part, std::uint32_t column) const {
  std::uint64_t offset = 0;
  for (std::uint32_t before = 0; before < column; ++before) offset += round_up(length(part, before), 16);
  return offset;
}

Result<std::vector<std::uint64_t>> digests_of(std::span<const Columns> parts, device::Access& access) {
  std::vector<BytesView> ranges;
  for (const auto& columns : parts) ranges.insert(ranges.end(), columns.begin(), columns.end());
  auto digests = access.digests(ranges);
  if (!digests) return digests;
  std::vector<std::uint64_t> results;
  auto next = digests->begin();
  for (const auto& columns : parts) {
    std::uint64_t result = 0;
    for (std::size_t i = 0; i < columns.size(); ++i) result = combine_digests(result, *next++);
    results.push_back(result);
  }
  return results;
}

}  // namespace rejoin::local
