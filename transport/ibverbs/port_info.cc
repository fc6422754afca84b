#include <cerrno>
#include <cstdlib>
#include <memory>

#include "base/fail.h"
#include "transport/ibverbs/device.h"

namespace rejoin::transport::ibverbs {

namespace {

// Mb/s of one lane, by what a port says of its speed (InfiniBand's encoding).
std::uint32_t lane_speed(std::uint8_t active) {
  switch (active) {
    case 1: return 2500;
    case 2: return 5000;
    case 4:
    case 8: return 10000;
    case 16: return 14000;
    case 32: return 25000;
    case 64: return 50000;
    case 128: return 100000;
    default: return 10000;
  }
}
std::uint32_t lanes(std::uint8_t width) {
  switch (width) {
    case 2: return 4;
    case 4: return 8;
    case 8: return 12;
    case 16: return 2;
    default: return 1;
  }
}

// Asked with a descriptor that is none: a driver that takes dma-bufs complains of it, another of the question.
bool takes_dma_bufs(ibv_context* context) {
  const ProtectionDomain domain(verbs().alloc_pd(context));
  if (domain == nullptr) return false;
  errno = 0;
  const MemoryRegion region(verbs().reg_dmabuf_mr(domain.get(), 0, 0, 0, -1, 0));
  return errno != EOPNOTSUPP && errno != EPROTONOSUPPORT && errno != ENOSYS;
}

}  // namespace

Result<PortInfo> describe_port(const std::string& name) {
  auto options = parse_options(name);
  if (!options) return tl::unexpected(options.error());
  if (auto there = load_verbs(); !there) return tl::unexpected(there.error());
  const auto colon = options->device.find(':');
  const std::string device = options->device.substr(0, colon);
  PortInfo info;
  if (colon != std::string::npos)
    info.port = static_cast<std::uint32_t>(std::strtoul(options->device.c_str() + colon + 1, nullptr, 10));
  int count = 0;
  const std::unique_ptr<ibv_device*[], void (*)(ibv_device**)> list(verbs().get_device_list(&count),
                                                                    verbs().free_device_list);
  for (int i = 0; i < count; ++i) {
    if (device != verbs().get_device_name(list[i])) continue;
    const Context context(verbs().open_device(list[i]));
    if (context == nullptr) return fail_errno(fmt::format("opening RDMA device {}", device));
    ibv_port_attr port{};
    if (verbs().query_port(context.get(), static_cast<std::uint8_t>(info.port), port) != 0)
      return fail(ErrorCode::not_found, "RDMA device {} has no port {}", device, info.port);
    info.guid = verbs().get_device_guid(list[i]);
    info.speed_mbps = lane_speed(port.active_speed) * lanes(port.active_width);
    info.dma_buf = takes_dma_bufs(context.get());
    const std::unique_ptr<char, void (*)(void*)> path(
        ::realpath(fmt::format("{}/device", list[i]->ibdev_path).c_str(), nullptr), std::free);
    if (path != nullptr && std::string_view(path.get()).find("/pci") != std::string_view::npos)
      info.pci_path = path.get();
    return info;
  }
  return fail(ErrorCode::not_found, "no RDMA device '{}': 'ibv_devices' shows what there is", device);
}

}  // namespace rejoin::transport::ibverbs
