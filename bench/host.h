// A network namespace as a host of its own, for benchmarks over links that are shaped.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace rejoin::bench {

// Of --hosts: none, or one for each of so many processes, "rank" or what they are, over a transport over TCP.
Result<> check_hosts(const std::vector<std::string>& hosts, std::uint32_t processes, std::string_view each,
                     const std::string& transport);

// This process's network is that namespace's (of `ip netns`) from now on. Returns its first IPv4 address there that is
// none of loopback's. Errors: there is no such namespace, this process may not enter it, or there is no address.
Result<std::string> enter_host(const std::string& name);

}  // namespace rejoin::bench
