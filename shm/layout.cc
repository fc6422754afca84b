#include "shm/layout.h"

#include <algorithm>

#include "base/fail.h"

namespace rejoin::shm {

Result<Layout> Layout::make(const Manifest& manifest, std::vector<std::uint64_t> segments, std::vector<Place> columns) {
  Layout layout;
  struct Taken {
    std::uint32_t segment;
    std::uint64_t begin, end;
    const Tensor* tensor;
  };
  std::vector<Taken> taken;
  for (const auto& tensor : manifest.tensors()) {
    layout.first_.push_back(taken.size());
    for (std::uint32_t column = 0; column < tensor.columns; ++column) {
      if (taken.size() >= columns.size())
        return fail(ErrorCode::invalid_argument, "there are {} places, too few for tensor '{}'", columns.size(),
                    tensor.name);
      const auto [segment, offset] = columns[taken.size()];
      if (segment >= segments.size() || !in_range(offset, tensor.bytes(), segments[segment]))
        return fail(ErrorCode::invalid_argument, "column {} of tensor '{}' does not lie in segment {} of {}", column,
                    tensor.name, segment, segments.size());
      if (offset % kAlignment != 0)
        return fail(ErrorCode::invalid_argument, "column {} of tensor '{}' begins at no multiple of {} bytes", column,
                    tensor.name, kAlignment);
      taken.push_back({segment, offset, offset + tensor.bytes(), &tensor});
    }
  }
  if (taken.size() != columns.size())
    return fail(ErrorCode::invalid_argument, "there are {} places for {} columns", columns.size(), taken.size());
  std::sort(taken.begin(), taken.end(),
            [](const Taken& a, const Taken& b) { return std::tie(a.segment, a.begin) < std::tie(b.segment, b.begin); });
  for (std::size_t i = 1; i < taken.size(); ++i)
    if (taken[i].segment == taken[i - 1].segment && taken[i].begin < taken[i - 1].end)
      return fail(ErrorCode::invalid_argument, "tensors '{}' and '{}' overlap in memory: declare shared weights once",
                  taken[i - 1].tensor->name, taken[i].tensor->name);
  layout.segments_ = std::move(segments);
  layout.columns_ = std::move(columns);
  return layout;
}

Place Layout::place(const Manifest& manifest, const Part& part, std::uint32_t column) const {
  Place place = this->place(part.tensor, column);
  place.offset += part.first * size_of(manifest.tensors()[part.tensor].type);
  return place;
}

void Layout::serialise(Bytes& to) const {
  put(to, static_cast<std::uint32_t>(segments_.size()));
  for (const auto size : segments_) put(to, size);
  for (const auto& column : columns_) put(to, column.segment), put(to, column.offset);
}

Result<Layout> Layout::parse(const Manifest& manifest, BytesView& bytes) {
  const auto bad = [] { return fail(ErrorCode::corrupt, "the state's layout can't be read"); };
  std::uint32_t count = 0;
  if (!take(bytes, count) || count > bytes.size() / sizeof(std::uint64_t)) return bad();
  std::vector<std::uint64_t> segments(count);
  for (auto& size : segments)
    if (!take(bytes, size)) return bad();
  std::vector<Place> columns;
  for (const auto& tensor : manifest.tensors())
    for (std::uint32_t column = 0; column < tensor.columns; ++column) {
      auto& place = columns.emplace_back();
      if (!take(bytes, place.segment) || !take(bytes, place.offset)) return bad();
    }
  return make(manifest, std::move(segments), std::move(columns));
}

}  // namespace rejoin::shm
