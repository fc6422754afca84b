// `rejoin doctor` looks at RDMA devices and GPUs.
#include <filesystem>

#include "base/bytes.h"
#include "daemon/doctor_probes.h"
#include "device/gpus.h"
#include "transport/ibverbs/port_health.h"

namespace rejoin::daemon {

Result<std::vector<PortFacts>> probe_ports(const std::string& transport) {
  constexpr std::string_view named = "ibverbs:";
  const auto rails =
      transport.starts_with(named) ? split(transport.substr(named.size()), ',') : std::vector<std::string>{};
  const auto ports = transport::ibverbs::examine_ports(rails, kLocked);
  if (!ports) return tl::unexpected(ports.error());
  std::vector<PortFacts> all;
  for (const auto& port : *ports)
    all.push_back({.name = port.name,
                   .why = port.why,
                   .unregistered = port.unregistered,
                   .gid = port.gid,
                   .gid_index = port.gid_index,
                   .mtu = port.mtu,
                   .most_mtu = port.most_mtu,
                   .ethernet = port.ethernet,
                   .link_local = port.link_local});
  return all;
}

Result<GpuFacts> probe_gpus() {
  const auto gpus = device::list_gpus();
  if (!gpus) return tl::unexpected(gpus.error());
  GpuFacts facts;
  facts.dma_buf = !gpus->empty();
  for (const auto& gpu : *gpus) {
    facts.names.push_back(gpu.name);
    facts.dma_buf &= gpu.dma_buf;
  }
  std::error_code ignored;
  facts.peer_memory = std::filesystem::exists("/sys/module/nvidia_peermem", ignored);
  return facts;
}

}  // namespace rejoin::daemon
