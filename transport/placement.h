// What is near on this machine: on which NUMA node a device or rail is, which RDMA ports are behind a GPU's PCIe
// switch, and running there. All of it only helps: where something is not known, nothing is done.
#pragma once

#include <sched.h>

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace rejoin::transport {

constexpr std::string_view kNear = "near";  // as ibverbs' list of rails

// The NUMA node for threads that use this transport (a name as of factory.h) for memory of this device
// (device::Device::address()): the GPU's, otherwise that of the rails. Nothing: it is not known, rails are on several,
// or the machine has one node.
std::optional<int> numa_node_for(const std::string& transport, const std::string& device,
                                 const std::filesystem::path& sys = "/sys");

// Of these ports ("DEVICE:PORT") those that the fewest PCIe bridges lie between them and this device; where all are
// behind another root, those on its NUMA node; otherwise, and for the host's memory, all.
std::vector<std::string> nearest_ports(const std::vector<std::string>& ports, const std::string& device,
                                       const std::filesystem::path& sys = "/sys");

// While it lives the calling thread, and those that it starts, run on this NUMA node's CPUs, as far as they may; and so
// memory that they are the first to touch is there. Nothing happens without a node, where they may run on none of its
// CPUs, or where the system does not allow it.
class RunNear {
 public:
  explicit RunNear(std::optional<int> numa_node, const std::filesystem::path& sys = "/sys");
  ~RunNear();
  RunNear(const RunNear&) = delete;
  bool moved() const { return before_.has_value(); }  // for tests

 private:
  std::optional<cpu_set_t> before_;
};

}  // namespace rejoin::transport
