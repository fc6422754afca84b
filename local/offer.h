// An offer is what a trainer hands its daemon over the unix socket, so that the daemon can see the state: descriptors,
// the first of which describes the others.
#pragma once

#include <optional>
#include <vector>

#include "base/fd.h"
#include "device/device.h"
#include "local/layout.h"

namespace rejoin::local {

// Memory of the trainer: the daemon maps what the handles name, and uses the bytes from `skipped` on.
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
  std::vector<SharedMemory> memory_ranges;  // of the layout
  SharedMemory shadow;
  Fd page, doorbell;
};

constexpr std::size_t kMaxOffered = 65536;      // descriptors
constexpr std::size_t kMaxMessage = 512 * KiB;  // of either side over the unix socket
void make_room_for_messages(const Fd& socket);  // at either end

// Makes the list of descriptors: the description, which is a sealed memfd, and then those of the offer.
Result<std::vector<Fd>> pack(Offer offer);
// Reads an offer. Errors: `corrupt` for a description that makes no sense, `refused` for one without seals. It does not
// look at the memory behind the handles.
Result<Offer> unpack(std::vector<Fd> descriptors);

Bytes describe(const Offer& offer);
// Reads the offer without its descriptors; the caller puts those of the handles in.
Result<Offer> parse_description(BytesView bytes);

}  // namespace rejoin::local
