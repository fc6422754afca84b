// The CPU's looks into a CUDA device's memory.
#include "device/cuda_context.h"
#include "device/digester.h"
#include "device/pinned_access.h"

namespace rejoin::device {

namespace {

class CudaAccess final : public PinnedAccess {
 public:
  CudaAccess(Memory pinned, std::shared_ptr<Stream> stream, std::unique_ptr<Digester> digester)
      : PinnedAccess(std::move(pinned), std::move(stream)), digester_(std::move(digester)) {}
  Result<std::vector<std::uint64_t>> digests(std::span<const BytesView> ranges) override {
    return digester_->digests(ranges);
  }

 private:
  std::unique_ptr<Digester> digester_;
};

}  // namespace

Result<std::unique_ptr<Access>> make_cuda_access(Device& device, Priority priority) {
  auto pinned = device.allocate_pinned(PinnedAccess::kPinned);
  if (!pinned) return tl::unexpected(pinned.error());
  auto made = device.make_stream(priority);
  if (!made) return tl::unexpected(made.error());
  const std::shared_ptr<Stream> stream = std::move(*made);  // one for both: a GPU has few queues for all its streams
  auto digester = Digester::make(device, stream);
  if (!digester) return tl::unexpected(digester.error());
  return std::make_unique<CudaAccess>(std::move(*pinned), stream, std::move(*digester));
}

}  // namespace rejoin::device
