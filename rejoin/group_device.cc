#include "rejoin/group_device.h"

#include <algorithm>
#include <bit>

namespace rejoin {

namespace {

template <typename Use>
Result<> on(device::Device& device, CudaStream handle, const Use& use) {
  const auto stream = device.adopt_stream(handle);
  if (!stream) return tl::unexpected(stream.error());
  if (auto takes = (*stream)->takes_work(); !takes) return takes;
  return use(**stream);
}

}  // namespace

Result<> GroupDevice::takes(CudaStream handle) {
  return on(*device_, handle, [](device::Stream&) { return Result<>(); });
}

Result<> StreamedOperation::begin_behind(CudaStream handle) {
  return on(*device_, handle, [&](device::Stream& stream) { return its_.queue_ready(stream); });
}

Result<> StreamedOperation::hold() {
  if (auto held = reducer_->hold(); !held) return held;
  const std::lock_guard lock(mutex_);
  if (ended_) reducer_->let_go();
  else held_ = true;
  return {};
}

Result<> StreamedOperation::wait_on(CudaStream handle) {
  return on(*device_, handle, [&](device::Stream& stream) { return its_.queue_wait_for_end(stream); });
}

void StreamedOperation::end() {
  const std::lock_guard lock(mutex_);
  ended_ = true;
  if (std::exchange(held_, false)) reducer_->let_go();
  its_.end();
  flags_->give_back(its_);
}

Result<std::unique_ptr<GroupDevice>> GroupDevice::open(std::shared_ptr<device::Device> device, bool exports) {
  std::unique_ptr<GroupDevice> opened(new GroupDevice);
  auto flags = StreamFlags::of(device);
  if (!flags) return tl::unexpected(flags.error());
  auto reducer = device::Reducer::make(*device, {.blocks = 0, .external_launcher = true});
  if (!reducer) return tl::unexpected(reducer.error());
  opened->exports_ = exports && device->remote_writes() == device::Device::RemoteWrites::ordered;
  opened->device_ = std::move(device);
  opened->reducer_ = std::move(*reducer);
  opened->flags_ = *flags;
  opened->launcher_ = std::make_unique<KernelLauncher>(opened->reducer_);
  if (auto started = opened->launcher_->start(); !started) return tl::unexpected(started.error());
  return opened;
}

Result<std::shared_ptr<StreamedOperation>> GroupDevice::make_operation() {
  const auto flags = flags_->take();
  if (!flags) return tl::unexpected(flags.error());
  return std::make_shared<StreamedOperation>(device_, reducer_, flags_, *flags);
}

Result<std::vector<collectives::Group::DeviceScratch>> GroupDevice::scratch_for(std::uint64_t bytes) {
  std::vector<collectives::Group::DeviceScratch> fresh;
  if (bytes == 0) return fresh;
  const auto fits = [&](const device::Memory& one) { return one.bytes.size() >= bytes; };
  while (std::ranges::count_if(scratch_, fits) < collectives::kAtOnce) {
    auto memory = device_->allocate(std::max<std::uint64_t>(std::bit_ceil(bytes), 64 * KiB));
    if (!memory) {
      scratch_.resize(scratch_.size() - fresh.size());  // the group has not heard of these
      return tl::unexpected(memory.error());
    }
    scratch_.push_back(std::move(*memory));
    fresh.push_back({scratch_.back().bytes, exported(scratch_.back().bytes)});
  }
  return fresh;
}

std::optional<device::Device::Exported> GroupDevice::exported(std::span<std::byte> memory) const {
  if (!exports_ || memory.empty()) return std::nullopt;
  auto made = device_->export_dma_buf(memory);
  return made ? std::optional(std::move(*made)) : std::nullopt;
}

}  // namespace rejoin
