// What the plugin has in this process: its devices, and an engine for each that is in use.
#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "nccl/abi.h"
#include "nccl/devices.h"
#include "nccl/net.h"

namespace rejoin::nccl {

// Any thread. NCCL unloads this library when its last communicator ends, also one that was aborted while it connected:
// nothing of it may stay then, least of all a thread.
class Plugin {
 public:
  Plugin();
  // This library's static objects are destroyed. Where it is unloaded, all ends with them, and this object, too; where
  // the program ends, NCCL may have calls to come, and nothing does.
  void unload();

  // A communicator begins. Of those of older versions nobody tells when they end.
  abi::Result init(abi::Logger logger);
  // A communicator has ended, and was the last: what is half connected is nobody's any more.
  void finalize();
  abi::Result devices(int* count);
  template <typename Properties>
  abi::Result properties(int device, Properties* to);
  template <typename Parts>
  abi::Result make_virtual(int* device, const Parts* parts);
  // The engine of a device, which connections of one traffic class share.
  rejoin::Result<std::shared_ptr<Device>> engine(int device, int traffic_class);
  // Whether this process is a child of fork() of one that has made engines. They are its parent's: rings in shared
  // memory, sets of descriptors and keys are those that the parent goes on with, and threads are not there.
  bool in_child() const;
  abi::Result refuse_child();
  // Logs it.
  abi::Result complain(const Error& error);

 private:
  ~Plugin() = default;
  const DeviceInfo* find(int device);
  rejoin::Result<int> join(const std::vector<int>& parts);
  std::vector<std::shared_ptr<Device>> made();  // the engines that are there

  const SteadyClock clock_{};
  std::mutex mutex_;
  std::atomic<abi::Logger> logs_{nullptr};  // NCCL's
  int begun_ = 0;                           // communicators that have not ended
  Settings settings_;
  std::vector<std::unique_ptr<DeviceInfo>> devices_;  // NCCL holds on to their strings
  std::map<std::pair<int, int>, std::weak_ptr<Device>> engines_;
  std::atomic<int> generation_{-1};  // of this process, as children.h has it, once there is an engine
};

template <typename Properties>
abi::Result Plugin::properties(int device, Properties* to) {
  const DeviceInfo* info = find(device);
  if (info == nullptr) return abi::kInvalidArgument;
  *to = {};
  to->name = const_cast<char*>(info->name.c_str());  // NCCL only reads it
  to->pci_path = info->pci_path.empty() ? nullptr : const_cast<char*>(info->pci_path.c_str());
  to->guid = info->guid != 0 ? info->guid : static_cast<std::uint64_t>(device);
  to->pointers = abi::kHost | (info->cuda ? abi::kCuda : 0) | (info->dma_buf ? abi::kDmaBuf : 0);
  to->registration_is_global = 1;
  to->speed = info->speed_mbps;
  to->port = info->port;
  to->max_connections = 65536;
  to->max_receives = kMaxGroup;
  to->offload = abi::kDeviceOfHost;
  if constexpr (requires { to->parts; }) {
    to->parts.count = static_cast<int>(info->parts.size());
    std::copy(info->parts.begin(), info->parts.end(), to->parts.devices);
    to->max_point_to_point = to->max_collective = kMaxMessage;
  }
  if constexpr (requires { to->max_multi_request; }) to->max_multi_request = 1;
  if constexpr (requires { to->rail; }) to->rail = to->plane = abi::kUndefined;
  return abi::kSuccess;
}

template <typename Parts>
abi::Result Plugin::make_virtual(int* device, const Parts* parts) {
  if (parts->count < 1 || parts->count > static_cast<int>(std::size(parts->devices))) return abi::kInvalidArgument;
  auto joined = join({parts->devices, parts->devices + parts->count});
  if (!joined) return complain(joined.error());
  *device = *joined;
  return abi::kSuccess;
}

}  // namespace rejoin::nccl
