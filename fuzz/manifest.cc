#include <cstdlib>

#include "local/offer.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace rejoin;
  auto offer = local::parse_description(std::as_bytes(std::span(data, size)));
  if (!offer) return 0;
  // What was accepted is consistent: every part lies in its memory range, which lies in its memory, and all means the
  // same when it is written again.
  const auto& [manifest, layout, memory_ranges, shadow, page, doorbell] = *offer;
  if (memory_ranges.size() != layout.memory_ranges().size()) std::abort();
  for (const auto& part : manifest.parts())
    for (std::uint32_t column = 0; column < manifest.columns(part); ++column) {
      const local::ColumnLocation location = layout.location(manifest, part, column);
      if (!in_range(location.offset, manifest.length(part, column), layout.memory_ranges()[location.memory_range]))
        std::abort();
    }
  for (std::size_t i = 0; i < memory_ranges.size(); ++i) {
    std::uint64_t all = 0;
    for (const auto& handle : memory_ranges[i].handles) all += handle.size;
    if (!in_range(memory_ranges[i].skipped, layout.memory_ranges()[i], all)) std::abort();
  }
  const Bytes again = local::describe(*offer);
  auto reparsed = local::parse_description(again);
  if (!reparsed || reparsed->manifest.hash() != manifest.hash() || local::describe(*reparsed) != again) std::abort();
  return 0;
}
