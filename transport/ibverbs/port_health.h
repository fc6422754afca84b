// How the ports of RDMA devices are: what an engine would find on each, tried as it does. For people.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"

namespace rejoin::transport::ibverbs {

struct PortHealth {
  std::string name;                                    // "DEVICE:PORT"
  std::string why;                                     // it can't be used; the rest is known where it is empty
  std::string unregistered;                            // why so much memory can't be registered; empty: it was
  std::string gid;                                     // that is chosen
  std::uint32_t gid_index = 0, mtu = 0, most_mtu = 0;  // bytes
  bool ethernet = false, link_local = false;           // RoCE; its GID has no meaning beyond its own link
};

// Of these rails, each with settings as in factory.h; none: of all ports, also of those that are down. Registers
// `bytes` of memory with each, for a moment. Errors: `unavailable` where there is no libibverbs.
Result<std::vector<PortHealth>> examine_ports(const std::vector<std::string>& rails, std::size_t bytes);

}  // namespace rejoin::transport::ibverbs
