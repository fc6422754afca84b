// The CPU's looks into a device's memory through a pinned buffer, a piece at a time; digests are whoever's it is.
#pragma once

#include "device/access.h"

namespace rejoin::device {

class PinnedAccess : public Access {
 public:
  static constexpr std::size_t kPinned = 1 * MiB;
  // `pinned`: kPinned bytes, of the stream's device.
  PinnedAccess(Memory pinned, std::shared_ptr<Stream> stream)
      : pinned_(std::move(pinned)), stream_(std::move(stream)) {}
  Result<> read(BytesView from, std::byte* to) final;
  Result<> write(std::byte* to, BytesView from) final;

 private:
  Memory pinned_;
  std::shared_ptr<Stream> stream_;
};

}  // namespace rejoin::device
