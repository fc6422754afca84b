// `rejoin doctor` looks at where RDMA devices and GPUs are: at their PCIe links, NUMA nodes and ports, in /sys.
#include <sched.h>

#include <algorithm>
#include <charconv>
#include <fstream>

#include "base/bytes.h"
#include "daemon/doctor_probes.h"

namespace rejoin::daemon {

namespace {

namespace fs = std::filesystem;

std::string line_in(const fs::path& file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  return line;
}

// What a line begins with: of "16.0 GT/s PCIe" 16, of "Unknown" nothing.
double number_in(const fs::path& file) {
  const std::string line = line_in(file);
  double value = 0;
  std::from_chars(line.data(), line.data() + line.size(), value);
  return value;
}

std::vector<fs::path> sorted_entries(const fs::path& directory) {
  std::error_code none;
  std::vector<fs::path> all;
  for (fs::directory_iterator at(directory, none), end; !none && at != end; at.increment(none))
    all.push_back(at->path());
  std::ranges::sort(all);
  return all;
}

// Whether this process may run on one of these CPUs: "0-3,8-11".
bool may_run_on(const std::string& list) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return true;
  for (const auto& range : split(list, ',')) {
    std::size_t first = 0;
    const char* end = range.data() + range.size();
    const auto read = std::from_chars(range.data(), end, first);
    std::size_t last = first;
    if (read.ec != std::errc()) continue;
    if (read.ptr != end) std::from_chars(read.ptr + 1, end, last);
    for (auto cpu = first; cpu <= std::min<std::size_t>(last, CPU_SETSIZE - 1); ++cpu)
      if (CPU_ISSET(cpu, &allowed)) return true;
  }
  return false;
}

BusFacts on_bus(const fs::path& sys, const fs::path& device, std::string name) {
  BusFacts facts{.name = std::move(name)};
  facts.lanes = static_cast<std::uint32_t>(number_in(device / "current_link_width"));
  facts.most_lanes = static_cast<std::uint32_t>(number_in(device / "max_link_width"));
  facts.speed = number_in(device / "current_link_speed");
  facts.most_speed = number_in(device / "max_link_speed");
  const std::string node = line_in(device / "numa_node");
  if (node.empty() || node.front() == '-') return facts;
  facts.numa_node = static_cast<int>(number_in(device / "numa_node"));
  const std::string cpus = line_in(sys / "devices/system/node" / ("node" + node) / "cpulist");
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
