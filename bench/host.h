// What a benchmark asks of the machine: memory, and network namespaces as hosts of their own, whose links are shaped.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace rejoin::bench {

// Of so many buffers of `bytes` each that a benchmark is about to fill: they have to fit into the machine's memory.
Result<> check_memory(std::uint64_t buffers, std::uint64_t bytes);

// Of --hosts: none, or one for each of so many processes, "rank" or what they are, over a transport over TCP.
Result<> check_hosts(const std::vector<std::string>& hosts, std::uint32_t processes, std::string_view each,
                     const std::string& transport);

// This process's network is that namespace's (of `ip netns`) from now on. Returns its first IPv4 address there that is
// none of loopback's. Errors: there is no such namespace, this process may not enter it, or there is no address.
Result<std::string> enter_host(const std::string& name);

}  // namespace rejoin::bench
