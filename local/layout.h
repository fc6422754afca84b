// The layout tells where one process has its state: the location of each column in the memory ranges that the process
// shares with its daemon. Replicas may have different layouts.
#pragma once

#include "local/manifest.h"

namespace rejoin::local {

struct ColumnLocation {
  std::uint32_t memory_range = 0;
  std::uint64_t offset = 0;  // bytes in it
};

class Layout {
 public:
  Layout() = default;  // of no state
  // `columns`: of the first tensor, then of the second, … Errors: `invalid_argument` where a column does not lie whole
  // in its memory range, begins at no multiple of kAlignment, or overlaps another; `memory ranges` are their bytes.
  static Result<Layout> make(const Manifest& manifest, std::vector<std::uint64_t> memory_ranges,
                             std::vector<ColumnLocation> columns);
  static Result<Layout> parse(const Manifest& manifest, BytesView& bytes);  // takes its bytes off the front
  void serialise(Bytes& to) const;

  const std::vector<std::uint64_t>& memory_ranges() const { return memory_ranges_; }
  ColumnLocation location(std::uint32_t tensor, std::uint32_t column) const {
    return columns_[first_[tensor] + column];
  }
  ColumnLocation location(const Manifest& manifest, const Part& part, std::uint32_t column) const;

  static constexpr std::uint64_t kAlignment = 16;  // bytes: what a GPU's kernels load at once

 private:
  std::vector<std::uint64_t> memory_ranges_;
  std::vector<ColumnLocation> columns_;
  std::vector<std::size_t> first_;  // by tensor, in columns_
};

}  // namespace rejoin::local
