// What `rejoin doctor` makes of the buses that RDMA devices and GPUs are on.
#include <algorithm>
#include <set>

#include "base/bytes.h"
#include "base/fail.h"
#include "daemon/doctor.h"

namespace rejoin::daemon {

using Verdict = Finding::Verdict;

namespace {

// Of the devices that --transport names, or of all.
bool is_named(const DoctorSettings& s, const BusFacts& device) {
  constexpr std::string_view verbs = "ibverbs:";
  if (!s.transport.starts_with(verbs)) return true;
  const auto rails = split(s.transport.substr(verbs.size()), ',');
  return std::ranges::any_of(rails,
                             [&](const auto& rail) { return rail.substr(0, rail.find_first_of(":;")) == device.name; });
}

// A GPU with nothing to do lets its link go slower, but not narrower.
void examine_link(const BusFacts& one, Findings& findings) {
  const bool narrow = one.lanes < one.most_lanes, slow = !one.gpu && one.speed < one.most_speed;
  if (one.lanes == 0 || (!narrow && !slow)) return;
  findings.push_back({Verdict::warn, "pci",
                      fmt::format("{}: its PCIe link has {} lanes of {} GT/s, and it could {} of {}", one.name,
                                  one.lanes, one.speed, one.most_lanes, one.most_speed),
                      "give it a slot that has them: 'lspci -vv' (LnkCap, LnkSta) shows which side of the slot it is; "
                      "see to risers, to how the BIOS divides lanes, and whether the card sits well"});
}

void examine_numa(const BusFacts& one, const std::vector<BusFacts>& all, Findings& findings) {
  if (!one.numa_node) return;
  if (!one.own_cpus)
    findings.push_back(
        {Verdict::warn, "numa",
         fmt::format("{} is on NUMA node {}, and this process may run on none of its CPUs", one.name, *one.numa_node),
         fmt::format("'numactl --cpunodebind={}' for who uses it, or the CPU set of its container, job "
                     "or unit",
                     *one.numa_node)});
  std::set<int> of_gpus;
  for (const auto& other : all)
    if (other.gpu && other.numa_node) of_gpus.insert(*other.numa_node);
  if (!one.gpu && !of_gpus.empty() && !of_gpus.contains(*one.numa_node))
    findings.push_back({Verdict::warn, "numa",
                        fmt::format("{} is on NUMA node {}, and every GPU on another: {}", one.name, *one.numa_node,
                                    fmt::join(of_gpus, ", ")),
                        "use a device that is near the GPUs: 'nvidia-smi topo -m' shows it"});
}

}  // namespace

void examine_buses(const DoctorSettings& s, const Probes& probes, Findings& findings) {
  std::vector<BusFacts> all;
  if (uses_rdma(s)) all = probes.buses();
  std::erase_if(all, [&](const auto& one) { return !one.gpu && !is_named(s, one); });
  if (std::ranges::none_of(all, [](const auto& one) { return !one.gpu; }))
    return findings.push_back({Verdict::skipped, "pci", "no RDMA device is used", ""});
  std::map<double, std::string> speeds;
  for (const auto& one : all) {
    const auto before = findings.size();
    examine_link(one, findings);
    examine_numa(one, all, findings);
    std::vector<std::string> words;
    if (one.lanes != 0) words.push_back(fmt::format("{} lanes of {} GT/s", one.lanes, one.speed));
    if (one.numa_node) words.push_back(fmt::format("NUMA node {}", *one.numa_node));
    for (const auto& [port, speed] : one.port_speeds) {
      words.push_back(fmt::format("port {} at {} Gb/s", port, speed));
      speeds.emplace(speed, fmt::format("{}:{}", one.name, port));
    }
    if (findings.size() == before && !words.empty())
      findings.push_back({Verdict::ok, "pci", fmt::format("{}: {}", one.name, fmt::join(words, ", ")), ""});
  }
  if (speeds.size() > 1)
    findings.push_back({Verdict::warn, "pci",
                        fmt::format("{} runs at {} Gb/s, and {} at {}", speeds.begin()->second, speeds.begin()->first,
                                    speeds.rbegin()->second, speeds.rbegin()->first),
                        "look at the slower one's cable and switch port ('ethtool', 'iblinkinfo'), or leave it out of "
                        "--transport"});
}

}  // namespace rejoin::daemon
