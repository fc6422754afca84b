#include "local/layout.h"

#include <algorithm>

#include "base/fail.h"

namespace rejoin::local {

Result<Layout> Layout::make(const Manifest& manifest, std::vector<std::uint64_t> memory_ranges,
                            std::vector<ColumnLocation> columns) {
  Layout layout;
  struct Taken {
    std::uint32_t memory_range;
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
      const auto [memory_range, offset] = columns[taken.size()];
      if (memory_range >= memory_ranges.size() || !in_range(offset, tensor.bytes(column), memory_ranges[memory_range]))
        return fail(ErrorCode::invalid_argument, "column {} of tensor '{}' does not lie in memory range {} of {}",
                    column, tensor.name, memory_range, memory_ranges.size());
      if (offset % kAlignment != 0)
        return fail(ErrorCode::invalid_argument, "column {} of tensor '{}' begins at no multiple of {} bytes", column,
                    tensor.name, kAlignment);
      taken.push_back({memory_range, offset, offset + tensor.bytes(column), &tensor});
    }
  }
  if (taken.size() != columns.size())
    return fail(ErrorCode::invalid_argument, "there are {} places for {} columns", columns.size(), taken.size());
  std::sort(taken.begin(), taken.end(), [](const Taken& a, const Taken& b) {
    return std::tie(a.memory_range, a.begin) < std::tie(b.memory_range, b.begin);
  });
  for (std::size_t i = 1; i < taken.size(); ++i)
    if (taken[i].memory_range == taken[i - 1].memory_range && taken[i].begin < taken[i - 1].end)
      return fail(ErrorCode::invalid_argument, "tensors '{}' and '{}' overlap in memory: declare shared weights once",
                  taken[i - 1].tensor->name, taken[i].tensor->name);
  layout.memory_ranges_ = std::move(memory_ranges);
  layout.columns_ = std::move(columns);
  return layout;
}

ColumnLocation Layout::location(const Manifest& manifest, const Part& part, std::uint32_t column) const {
  ColumnLocation location = this->location(part.tensor, column);
  location.offset += part.first * size_of(manifest.tensors()[part.tensor].type_of(column));
  return location;
}

void Layout::serialise(Bytes& to) const {
  put(to, static_cast<std::uint32_t>(memory_ranges_.size()));
  for (const auto size : memory_ranges_) put(to, size);
  for (const auto& column : columns_) put(to, column.memory_range), put(to, column.offset);
}

Result<Layout> Layout::parse(const Manifest& manifest, BytesView& bytes) {
  const auto bad = [] { return fail(ErrorCode::corrupt, "the state's layout can't be read"); };
  std::uint32_t count = 0;
  if (!take(bytes, count) || count > bytes.size() / sizeof(std::uint64_t)) return bad();
  std::vector<std::uint64_t> memory_ranges(count);
  for (auto& size : memory_ranges)
    if (!take(bytes, size)) return bad();
  std::vector<ColumnLocation> columns;
  for (const auto& tensor : manifest.tensors())
    for (std::uint32_t column = 0; column < tensor.columns; ++column) {
      auto& location = columns.emplace_back();
      if (!take(bytes, location.memory_range) || !take(bytes, location.offset)) return bad();
    }
  return make(manifest, std::move(memory_ranges), std::move(columns));
}

}  // namespace rejoin::local
