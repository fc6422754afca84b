// What a trainer hands its daemon, so that it can see the state: descriptors, the first of which tells what the others
// are.
#pragma once

#include <optional>
#include <vector>

#include "base/fd.h"
#include "device/device.h"
#include "shm/layout.h"

namespace rejoin::shm {

// Memory that is taken over as its handles say; of that, some bytes from `skipped` on.
struct SharedMemory {
  std::vector<device::Handle> handles;
  std::uint64_t skipped = 0;
  // The same bytes for a NIC, where their device can be reached by one: only the process that has allocated them can
  // export them.
  std::optional<device::Device::Exported> dma_buf;
};

struct Offer {
  Manifest manifest;
  Layout layout;
  std::vector<SharedMemory> segments;  // of the layout
  SharedMemory aside;
  Fd page, doorbell;
};

constexpr std::size_t kMaxOffered = 65536;  // descriptors

// A description, which is a sealed memfd, and the offer's own.
Result<std::vector<Fd>> pack(Offer offer);
// Errors: `corrupt`, `refused` for a description without seals. The memory that the handles are of is not looked at.
Result<Offer> unpack(std::vector<Fd> descriptors);

Bytes describe(const Offer& offer);
// The offer without its descriptors; those of handles are to follow.
Result<Offer> parse_description(BytesView bytes);

}  // namespace rejoin::shm
