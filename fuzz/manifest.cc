#include "shm/manifest.h"

#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace rejoin;
  auto manifest = shm::Manifest::parse(std::as_bytes(std::span(data, size)));
  if (!manifest) return 0;
  // What was accepted is consistent: every extent lies in the state, and it means the same when it is written again.
  for (const auto& part : manifest->parts())
    for (std::uint32_t column = 0; column < manifest->columns(part); ++column) {
      const shm::Extent extent = manifest->extent(part, column);
      if (!in_range(extent.offset, extent.length, manifest->state_bytes())) std::abort();
    }
  auto again = shm::Manifest::parse(manifest->serialise());
  if (!again || again->hash() != manifest->hash() || again->state_bytes() != manifest->state_bytes()) std::abort();
  return 0;
}
