#include "device/pinned_access.h"

#include <algorithm>

namespace rejoin::device {

Result<> PinnedAccess::read(BytesView from, std::byte* to) {
  for (; !from.empty(); from = from.subspan(std::min(kPinned, from.size()))) {
    const std::size_t size = std::min(kPinned, from.size());
    auto done = stream_->copy(pinned_.bytes.data(), from.data(), size);
    if (done) done = stream_->synchronize();
    if (!done) return done;
    to = std::copy_n(pinned_.bytes.begin(), size, to);
  }
  return {};
}

Result<> PinnedAccess::write(std::byte* to, BytesView from) {
  for (; !from.empty(); from = from.subspan(std::min(kPinned, from.size()))) {
    const std::size_t size = std::min(kPinned, from.size());
    std::copy_n(from.begin(), size, pinned_.bytes.begin());
    auto done = stream_->copy(to, pinned_.bytes.data(), size);
    if (done) done = stream_->synchronize();
    if (!done) return done;
    to += size;
  }
  return {};
}

}  // namespace rejoin::device
