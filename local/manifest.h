// What a trainer's state consists of: tensors with their columns (the weight and its optimizer
// moments), cut into slices (what catch-up fetches as one) and parts (what it moves as one). The same on every replica.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"
#include "base/types.h"
#include "device/access.h"

namespace rejoin::local {

constexpr std::size_t kMaxColumns = 8;  // a weight and up to seven moments
// Of all columns together. Small enough that what has just landed is still in the cache when its digest is taken, and
// that the gradients kept for a slice under way are few.
constexpr std::uint64_t kPartBytes = 1 * MiB;
// Elements between which slices and parts begin and end. Whatever vector loops an optimizer has, they go through a
// slice as they go through the same elements of the whole tensor, where both are cut at such borders.
constexpr std::uint64_t kBorder = 64;
constexpr std::uint32_t kMaxPins = 64;  // parts a daemon can pin at one version
constexpr std::uint32_t kMaxTensors = 65536;
constexpr std::uint64_t kMaxParts = 1 << 20;  // 1 TiB of state a rank

struct Tensor {
  std::string name;
  DataType type = DataType::float32;  // of the weight
  std::uint64_t count = 0;            // elements of each column
  std::uint32_t columns = 1;
  bool elementwise = true;  // the optimizer updates each element by itself: slices may be smaller than the tensor
  std::vector<DataType> moment_types = {};               // of each column behind the weight; none: all are of its type
  std::optional<DataType> gradient_type = std::nullopt;  // nothing: the weight's

  DataType type_of(std::uint32_t column) const {
    return column == 0 || moment_types.empty() ? type : moment_types[column - 1];
  }
  DataType type_of_gradient() const { return gradient_type.value_or(type); }
  std::uint64_t bytes(std::uint32_t column) const { return count * size_of(type_of(column)); }
  std::uint64_t gradient_bytes() const { return count * size_of(type_of_gradient()); }
  std::uint64_t element_bytes() const;  // of one element, all columns
};
// Whether there can be such a tensor, whatever the others are.
Result<> check(const Tensor& tensor);

// A range of elements of one tensor, all columns: from a multiple of kBorder to another, or to the tensor's end.
struct Part {
  std::uint32_t tensor = 0;
  std::uint64_t first = 0, count = 0;  // elements
};

struct Slice {
  Part range;
  std::uint32_t first_part = 0, parts = 1;
};

class Manifest {
 public:
  // Errors: `invalid_argument` (no elements, a name twice, too many columns,
  // a tensor that is not elementwise and too large to be moved at one version).
  static Result<Manifest> make(std::vector<Tensor> tensors);
  static Result<Manifest> parse(BytesView bytes);  // checks everything: the bytes come from another process
  Bytes serialise() const;

  const std::vector<Tensor>& tensors() const { return tensors_; }
  const std::vector<Slice>& slices() const { return slices_; }
  const std::vector<Part>& parts() const { return parts_; }
  std::uint64_t bytes() const;                  // of all columns of all tensors
  std::uint64_t hash() const { return hash_; }  // of names, types, sizes: equal on all replicas

  std::uint64_t bytes_of(const Part& part) const;
  std::uint32_t columns(const Part& part) const { return tensors_[part.tensor].columns; }
  std::uint64_t length(const Part& part, std::uint32_t column) const {
    return part.count * size_of(tensors_[part.tensor].type_of(column));
  }
  // Where a column of a part that lies by itself begins: fit for vector loads. All fit kPartBytes.
  std::uint64_t packed_offset(const Part& part, std::uint32_t column) const;
  const Part& part(std::uint32_t slice, std::uint32_t i) const { return parts_[slices_[slice].first_part + i]; }

 private:
  std::vector<Tensor> tensors_;
  std::vector<Slice> slices_;
  std::vector<Part> parts_;
  std::uint64_t hash_ = 0;
};

// The columns of a part, wherever they are, and digests of parts: what all replicas compare. On a GPU several take
// little more time than one.
using Columns = std::vector<BytesView>;
Result<std::vector<std::uint64_t>> digests_of(std::span<const Columns> parts, device::Access& access);

}  // namespace rejoin::local
