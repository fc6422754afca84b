// The CPU's looks into a device's memory, each waiting for its end: for what is rare or small beside what a NIC or a
// kernel moves. On the host they are what they seem.
#pragma once

#include "base/bytes.h"
#include "device/device.h"

namespace rejoin::device {

// Thread: one at a time. Whatever of the device these hold keeps it.
class Access {
 public:
  virtual ~Access() = default;
  virtual Result<> read(BytesView from, std::byte* to) = 0;
  virtual Result<> write(std::byte* to, BytesView from) = 0;
  // Of each piece: the digest of base/digest.h. Pieces begin at multiples of 16 bytes.
  virtual Result<std::vector<std::uint64_t>> digests(std::span<const BytesView> ranges) = 0;
};

}  // namespace rejoin::device
