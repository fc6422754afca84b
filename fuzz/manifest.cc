#include <cstdlib>

#include "shm/offer.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace rejoin;
  auto offer = shm::parse_description(std::as_bytes(std::span(data, size)));
  if (!offer) return 0;
  // What was accepted is consistent: every part lies in its segment, which lies in its memory, and all means the same
  // when it is written again.
  const auto& [manifest, layout, segments, aside, page, doorbell] = *offer;
  if (segments.size() != layout.segments().size()) std::abort();
  for (const auto& part : manifest.parts())
    for (std::uint32_t column = 0; column < manifest.columns(part); ++column) {
      const shm::Place place = layout.place(manifest, part, column);
      if (!in_range(place.offset, manifest.length(part), layout.segments()[place.segment])) std::abort();
    }
  for (std::size_t i = 0; i < segments.size(); ++i) {
    std::uint64_t all = 0;
    for (const auto& handle : segments[i].handles) all += handle.size;
    if (!in_range(segments[i].skipped, layout.segments()[i], all)) std::abort();
  }
  const Bytes again = shm::describe(*offer);
  auto reparsed = shm::parse_description(again);
  if (!reparsed || reparsed->manifest.hash() != manifest.hash() || shm::describe(*reparsed) != again) std::abort();
  return 0;
}
