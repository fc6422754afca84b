// The CPU's looks into a CUDA device's memory.
#include <algorithm>

#include "device/access.h"
#include "device/cuda_context.h"
#include "device/digester.h"

namespace rejoin::device {

namespace {

// Through a pinned buffer, a piece at a time.
class CudaAccess final : public Access {
 public:
  static Result<std::unique_ptr<Access>> make(Device& device, Priority priority) {
    auto access = std::make_unique<CudaAccess>();
    auto pinned = device.allocate_pinned(kPinned);
    if (!pinned) return tl::unexpected(pinned.error());
    auto stream = device.make_stream(priority);
    if (!stream) return tl::unexpected(stream.error());
    auto digester = Digester::make(device, priority);
    if (!digester) return tl::unexpected(digester.error());
    access->pinned_ = std::move(*pinned);
    access->stream_ = std::move(*stream);
    access->digester_ = std::move(*digester);
    return access;
  }
  Result<> read(BytesView from, std::byte* to) override {
    for (; !from.empty(); from = from.subspan(std::min(kPinned, from.size()))) {
      const std::size_t size = std::min(kPinned, from.size());
      auto done = stream_->copy(pinned_.bytes.data(), from.data(), size);
      if (done) done = stream_->synchronize();
      if (!done) return done;
      to = std::copy_n(pinned_.bytes.begin(), size, to);
    }
    return {};
  }
  Result<> write(std::byte* to, BytesView from) override {
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
  Result<std::vector<std::uint64_t>> digests(std::span<const BytesView> pieces) override {
    return digester_->digests(pieces);
  }

 private:
  static constexpr std::size_t kPinned = 1 * MiB;
  Memory pinned_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Digester> digester_;
};

}  // namespace

Result<std::unique_ptr<Access>> make_cuda_access(Device& device, Priority priority) {
  return CudaAccess::make(device, priority);
}

}  // namespace rejoin::device
