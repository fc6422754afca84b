// `rejoin doctor` looks at RDMA devices and GPUs.
#include <filesystem>

#include "base/bytes.h"
#include "base/fail.h"
#include "daemon/doctor_probes.h"
#include "device/device.h"
#include "device/gpus.h"
#include "transport/factory.h"
#include "transport/ibverbs/factory.h"
#include "transport/ibverbs/port_health.h"

namespace rejoin::daemon {

namespace {

constexpr std::string_view kVerbs = "ibverbs";

// The rails that --transport names; none: all ports.
std::vector<std::string> named_rails(const std::string& transport) {
  const bool named = transport.starts_with(kVerbs) && transport.size() > kVerbs.size() + 1;
  return named ? split(transport.substr(kVerbs.size() + 1), ',') : std::vector<std::string>{};
}

// The way of transport/staged: by a dma-buf where there is one, otherwise as memory that the NIC's driver asks the
// GPU's for.
ReachFacts reach(const std::string& rail, std::span<std::byte> memory,
                 const Result<device::Device::Exported>& exported) {
  ReachFacts facts{.port = rail, .dma_buf = exported.has_value()};
  const auto engine = transport::make_engine(fmt::format("{}:{}", kVerbs, rail));
  if (!engine) {
    facts.why = engine.error().message;
    return facts;
  }
  constexpr auto access = transport::Access::remote_write;
  auto region = exported ? (*engine)->register_dma_buf({exported->fd.get(), exported->offset, memory}, access)
                         : (*engine)->register_region(memory, transport::MemoryKind::cuda, access);
  if (!region) facts.why = region.error().message;
  else (*engine)->deregister(*region);
  return facts;
}

Result<> try_reach(const std::string& transport, const std::string& library, GpuFacts& facts) {
  if (!transport.starts_with(kVerbs)) return {};
  auto rails = named_rails(transport);
  if (rails.empty()) rails = transport::ibverbs::active_ports();
  const auto gpu = device::open_cuda({.library = library});
  if (!gpu) return tl::unexpected(gpu.error());
  constexpr std::size_t tried = 2 * MiB;
  const auto memory = (*gpu)->allocate(tried);
  if (!memory) return tl::unexpected(memory.error());
  const auto exported = (*gpu)->export_dma_buf(memory->bytes);
  for (const auto& rail : rails) facts.reach.push_back(reach(rail, memory->bytes, exported));
  return {};
}

}  // namespace

Result<std::vector<PortFacts>> probe_ports(const std::string& transport) {
  return transport::ibverbs::examine_ports(named_rails(transport), kLocked);
}

Result<GpuFacts> probe_gpus(const std::string& transport, const std::string& library) {
  const auto gpus = device::list_gpus(library);
  if (!gpus) return tl::unexpected(gpus.error());
  GpuFacts facts;
  facts.dma_buf = !gpus->empty();
  for (const auto& gpu : *gpus) {
    facts.names.push_back(gpu.name);
    facts.dma_buf &= gpu.dma_buf;
  }
  std::error_code ignored;
  facts.peer_memory = std::filesystem::exists("/sys/module/nvidia_peermem", ignored);
  if (const auto tried = gpus->empty() ? Result<>() : try_reach(transport, library, facts); !tried)
    facts.untried = tried.error().message;
  return facts;
}

}  // namespace rejoin::daemon
