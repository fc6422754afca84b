#include "transport/ibverbs/port_health.h"

#include <arpa/inet.h>

#include <memory>

#include "base/fail.h"
#include "base/fd.h"
#include "transport/ibverbs/device.h"

namespace rejoin::transport::ibverbs {

namespace {

std::vector<std::string> all_ports() {
  std::vector<std::string> names;
  int count = 0;
  const std::unique_ptr<ibv_device*[], void (*)(ibv_device**)> list(verbs().get_device_list(&count),
                                                                    verbs().free_device_list);
  for (int i = 0; list != nullptr && i < count; ++i) {
    const std::string name = verbs().get_device_name(list[i]);
    const Context context(verbs().open_device(list[i]));
    ibv_device_attr limits{};
    // Of one that can't be opened the first port stands for all: examining it says why.
    const bool known = context && verbs().query_device(context.get(), &limits) == 0;
    for (int port = 1; port <= (known ? limits.phys_port_cnt : 1); ++port)
      names.push_back(fmt::format("{}:{}", name, port));
  }
  return names;
}

PortHealth examine_port(const std::string& rail, std::size_t bytes) {
  PortHealth health;
  health.name = rail;
  const auto options = parse_options(rail);
  auto device = options ? Device::open(*options) : tl::unexpected(options.error());
  const auto active = device ? device->refresh() : tl::unexpected(device.error());
  if (!active) {
    health.why = active.error().message;
    return health;
  }
  health.name = device->name();
  std::array<char, INET6_ADDRSTRLEN> text{};
  health.gid = ::inet_ntop(AF_INET6, device->gid().raw, text.data(), text.size()) != nullptr ? text.data() : "?";
  health.gid_index = device->gid_index();
  health.mtu = 128u << device->port().active_mtu;
  health.most_mtu = 128u << device->port().max_mtu;
  health.ethernet = device->ethernet();
  health.link_local = device->link_local();
  const auto memory = Mapping::anonymous(bytes);
  if (!memory) health.unregistered = memory.error().message;
  else if (auto region = device->register_memory(memory->span(), MemoryKind::host, Access::remote_write); !region)
    health.unregistered = region.error().message;
  return health;
}

}  // namespace

Result<std::vector<PortHealth>> examine_ports(const std::vector<std::string>& rails, std::size_t bytes) {
  if (auto there = available(); !there) return tl::unexpected(there.error());
  std::vector<PortHealth> all;
  for (const auto& rail : rails.empty() ? all_ports() : rails) all.push_back(examine_port(rail, bytes));
  return all;
}

}  // namespace rejoin::transport::ibverbs
