// `rejoin doctor` looks at where RDMA devices and GPUs are: at their PCIe links, NUMA nodes and ports, in /sys.
#include <sched.h>

#include "base/sys_files.h"
#include "daemon/doctor_probes.h"

namespace rejoin::daemon {

namespace {

namespace fs = std::filesystem;
using sys_files::line_in, sys_files::number_in, sys_files::sorted_entries;

// Whether this process may run on one of these CPUs: "0-3,8-11".
bool may_run_on(const std::string& list) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return true;
  for (auto cpu : sys_files::numbers_in(list, CPU_SETSIZE - 1))
    if (CPU_ISSET(cpu, &allowed)) return true;
  return false;
}

BusFacts on_bus(const fs::path& sys, const fs::path& device, std::string name) {
  BusFacts facts{.name = std::move(name)};
  facts.lanes = static_cast<std::uint32_t>(number_in(device / "current_link_width"));
  facts.most_lanes = static_cast<std::uint32_t>(number_in(device / "max_link_width"));
  facts.speed = number_in(device / "current_link_speed");
  facts.most_speed = number_in(device / "max_link_speed");
  facts.numa_node = sys_files::numa_node(device);
  if (!facts.numa_node) return facts;
  const std::string cpus = sys_files::cpus_of(sys, *facts.numa_node);
  facts.own_cpus = cpus.empty() || may_run_on(cpus);
  return facts;
}

}  // namespace

std::vector<BusFacts> probe_buses(const fs::path& sys) {
  std::vector<BusFacts> all;
  for (const auto& device : sorted_entries(sys / "class/infiniband")) {
    auto facts = on_bus(sys, device / "device", device.filename().string());
    for (const auto& port : sorted_entries(device / "ports"))
      if (line_in(port / "state").ends_with("ACTIVE"))
        facts.port_speeds[static_cast<std::uint32_t>(std::atoi(port.filename().c_str()))] = number_in(port / "rate");
    all.push_back(std::move(facts));
  }
  for (const auto& device : sorted_entries(sys / "bus/pci/devices")) {
    if (line_in(device / "vendor") != "0x10de" || !line_in(device / "class").starts_with("0x03")) continue;
    all.push_back(on_bus(sys, device, "GPU " + device.filename().string()));
    all.back().gpu = true;
  }
  return all;
}

}  // namespace rejoin::daemon
