// The GPU of a process group: what those who start operations of its memory do on their threads, so that the group's
// own thread never calls the driver ("No driver between hand-over and flag" in docs/design-notes.md).
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "collectives/group.h"
#include "device/reducer.h"
#include "rejoin/kernel_launcher.h"
#include "rejoin/stream_flags.h"

namespace rejoin {

// An operation between a CUDA stream and the group.
class StreamedOperation {
 public:
  StreamedOperation(std::shared_ptr<device::Device> device, std::shared_ptr<device::Reducer> reducer,
                    StreamFlags* flags, StreamFlags::Flags its)
      : device_(std::move(device)), reducer_(std::move(reducer)), flags_(flags), its_(its) {}

  // The caller's threads. Errors: of the device.
  Result<> begin_behind(CudaStream stream);  // what is queued there comes before it
  // The kernel stays on the GPU until end(), which may have come. After begin_behind(), and after the group has the
  // operation: whatever another thread makes the driver wait for meanwhile, the kernel then goes as soon as it can.
  Result<> hold();
  Result<> wait_on(CudaStream stream);  // what is queued there later comes after it

  // The group's thread; no calls of the driver, nor of who waits for one.
  bool ready() const { return its_.ready(); }
  void end();

 private:
  const std::shared_ptr<device::Device> device_;
  const std::shared_ptr<device::Reducer> reducer_;
  StreamFlags* const flags_;
  const StreamFlags::Flags its_;
  std::mutex mutex_;  // guards
  bool held_ = false, ended_ = false;
};

class GroupDevice {
 public:
  // Errors: of the device; `unavailable`: it has no kernels, or its streams wait for no flags; `exhausted`: the system
  // gives no thread. `exports`: the transport takes dma-bufs.
  static Result<std::unique_ptr<GroupDevice>> open(std::shared_ptr<device::Device> device, bool exports);

  const std::shared_ptr<device::Device>& device() const { return device_; }
  const std::shared_ptr<device::Reducer>& reducer() const { return reducer_; }

  // Errors: as device::Stream::takes_work()
  Result<> takes(CudaStream stream);
  // The caller's threads, one at a time.
  Result<std::shared_ptr<StreamedOperation>> make_operation();
  // What the group lacks for a plan with this much scratch memory. It stays until this goes.
  Result<std::vector<collectives::Group::DeviceScratch>> scratch_for(std::uint64_t bytes);
  // As a dma-buf, where a NIC may write there without a flush by the driver; without one the bytes are staged.
  std::optional<device::Device::Exported> exported(std::span<std::byte> memory) const;

 private:
  GroupDevice() = default;
  std::shared_ptr<device::Device> device_;
  std::shared_ptr<device::Reducer> reducer_;
  StreamFlags* flags_ = nullptr;
  bool exports_ = false;
  std::vector<device::Memory> scratch_;
  std::unique_ptr<KernelLauncher> launcher_;  // goes before the memory, whose freeing waits for the device
};

}  // namespace rejoin
