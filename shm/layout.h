// Where one process has its state: each column's place in the segments that it shares with its daemon. Not the same on
// every replica.
#pragma once

#include "shm/manifest.h"

namespace rejoin::shm {

struct Place {
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;  // bytes in it
};

class Layout {
 public:
  Layout() = default;  // of no state
  // `columns`: of the first tensor, then of the second, … Errors: `invalid_argument` where a column does not lie whole
  // in its segment, begins at no multiple of kAlignment, or overlaps another; `segments` are their bytes.
  static Result<Layout> make(const Manifest& manifest, std::vector<std::uint64_t> segments, std::vector<Place> columns);
  static Result<Layout> parse(const Manifest& manifest, BytesView& bytes);  // takes its bytes off the front
  void serialise(Bytes& to) const;

  const std::vector<std::uint64_t>& segments() const { return segments_; }
  Place place(std::uint32_t tensor, std::uint32_t column) const { return columns_[first_[tensor] + column]; }
  Place place(const Manifest& manifest, const Part& part, std::uint32_t column) const;

  static constexpr std::uint64_t kAlignment = 16;  // bytes: what a GPU's kernels load at once

 private:
  std::vector<std::uint64_t> segments_;
  std::vector<Place> columns_;
  std::vector<std::size_t> first_;  // by tensor, in columns_
};

}  // namespace rejoin::shm
