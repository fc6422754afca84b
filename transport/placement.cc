#include "transport/placement.h"

#include <arpa/inet.h>
#include <ifaddrs.h>

#include <algorithm>
#include <cctype>
#include <memory>
#include <set>

#include "base/bytes.h"
#include "base/sys_files.h"
#include "transport/ibverbs/factory.h"

namespace rejoin::transport {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kGpu = "cuda:", kVerbs = "ibverbs";

fs::path directory_of_gpu(const std::string& device, const fs::path& sys) {
  std::string address = device.substr(kGpu.size());
  std::ranges::transform(address, address.begin(), [](unsigned char c) { return std::tolower(c); });
  return sys / "bus/pci/devices" / address;
}

// "mlx5_0:1;gid=3" is of mlx5_0.
fs::path directory_of_rail(const std::string& rail, const fs::path& sys) {
  return sys / "class/infiniband" / rail.substr(0, rail.find_first_of(":;")) / "device";
}

// The interface that has this address; empty: none.
std::string interface_of(const std::string& address) {
  ifaddrs* raw = nullptr;
  if (::getifaddrs(&raw) != 0) return "";
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> all(raw, &::freeifaddrs);
  for (const ifaddrs* one = all.get(); one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr) continue;
    char text[INET6_ADDRSTRLEN] = "";
    if (one->ifa_addr->sa_family == AF_INET)
      ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(one->ifa_addr)->sin_addr, text, sizeof text);
    if (one->ifa_addr->sa_family == AF_INET6)
      ::inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(one->ifa_addr)->sin6_addr, text, sizeof text);
    if (address == text) return one->ifa_name;
  }
  return "";
}

std::vector<fs::path> directories_of_rails(const std::string& transport, const fs::path& sys) {
  std::vector<fs::path> all;
  const bool listed = transport.find(':') != std::string::npos;
  const std::string list = listed ? transport.substr(transport.find(':') + 1) : "";
  if (transport.starts_with(kVerbs)) {
    const auto rails = listed && list != kNear ? split(list, ',') : ibverbs::find_ports().names;
    for (const auto& rail : rails) all.push_back(directory_of_rail(rail, sys));
  } else if (transport.starts_with("tcp") && listed) {
    for (const auto& local : split(list.substr(0, list.find(';')), ','))
      if (const auto name = interface_of(local); !name.empty()) all.push_back(sys / "class/net" / name / "device");
  }
  return all;
}

// What lies between the root of its bus and the device, as directories; empty: it is not known.
std::vector<fs::path> way_to(const fs::path& directory) {
  std::error_code none;
  const fs::path whole = fs::canonical(directory, none);
  return none ? std::vector<fs::path>{} : std::vector<fs::path>(whole.begin(), whole.end());
}

}  // namespace

std::optional<int> numa_node_for(const std::string& transport, const std::string& device, const fs::path& sys) {
  if (sys_files::numa_nodes(sys) < 2) return std::nullopt;
  if (device.starts_with(kGpu))
    if (const auto node = sys_files::numa_node(directory_of_gpu(device, sys))) return node;
  std::set<std::optional<int>> nodes;
  for (const auto& rail : directories_of_rails(transport, sys)) nodes.insert(sys_files::numa_node(rail));
  return nodes.size() == 1 ? *nodes.begin() : std::nullopt;
}

std::vector<std::string> nearest_ports(const std::vector<std::string>& ports, const std::string& device,
                                       const fs::path& sys) {
  if (!device.starts_with(kGpu)) return ports;
  const fs::path gpu = directory_of_gpu(device, sys);
  const auto to_gpu = way_to(gpu);
  std::vector<std::string> nearest, on_node;
  // Devices of one root have the directories of /sys/devices/pciDOMAIN:BUS in common.
  const auto root = std::ranges::find_if(to_gpu, [](const fs::path& one) { return one.string().starts_with("pci"); });
  std::ptrdiff_t most = root == to_gpu.end() ? 0 : root - to_gpu.begin() + 1;
  const bool known = most > 0;
  for (const auto& port : ports) {
    const fs::path directory = directory_of_rail(port, sys);
    const auto to_port = way_to(directory);
    const auto common = std::ranges::mismatch(to_gpu, to_port).in1 - to_gpu.begin();
    if (known && common > most) nearest.clear();
    if (known && common >= most) nearest.push_back(port), most = common;
    const auto node = sys_files::numa_node(directory);
    if (node && node == sys_files::numa_node(gpu)) on_node.push_back(port);
  }
  if (!nearest.empty()) return nearest;
  return on_node.empty() ? ports : on_node;
}

RunNear::RunNear(std::optional<int> numa_node, const fs::path& sys) {
  if (!numa_node) return;
  cpu_set_t allowed, both;
  CPU_ZERO(&allowed);
  CPU_ZERO(&both);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  for (auto cpu : sys_files::numbers_in(sys_files::cpus_of(sys, *numa_node), CPU_SETSIZE - 1))
    if (CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &both);
  if (CPU_COUNT(&both) == 0 || CPU_EQUAL(&both, &allowed)) return;
  if (::sched_setaffinity(0, sizeof both, &both) == 0) before_ = allowed;
}

RunNear::~RunNear() {
  if (before_) (void)::sched_setaffinity(0, sizeof *before_, &*before_);
}

}  // namespace rejoin::transport
