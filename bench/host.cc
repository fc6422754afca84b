#include "bench/host.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <unistd.h>

#include <cstring>
#include <memory>

#include "base/bytes.h"
#include "base/fail.h"
#include "base/fd.h"

namespace rejoin::bench {

Result<> check_memory(std::uint64_t buffers, std::uint64_t bytes) {
  const auto pages = ::sysconf(_SC_PHYS_PAGES), page = ::sysconf(_SC_PAGESIZE);
  if (pages < 0 || page < 0) return {};
  const auto there = static_cast<std::uint64_t>(pages) * static_cast<std::uint64_t>(page);
  if (bytes <= there / buffers) return {};
  return fail(ErrorCode::invalid_argument,
              "{} buffers of {} do not fit into this machine's memory, which is {}: take a smaller size", buffers,
              human_bytes(bytes), human_bytes(there));
}

Result<> check_hosts(const std::vector<std::string>& hosts, std::uint32_t processes, std::string_view each,
                     const std::string& transport) {
  if (hosts.empty() || (hosts.size() == processes && transport.starts_with("tcp"))) return {};
  return fail(ErrorCode::invalid_argument,
              "--hosts names {} and the transport is {}; there must be {}, one for each {}, and a transport over TCP",
              hosts.size(), transport, processes, each);
}

Result<std::string> enter_host(const std::string& name) {
  const std::string path = "/run/netns/" + name;
  const Fd there(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!there)
    return fail_errno(fmt::format("--hosts: {} is no network namespace here ('ip netns list' names them)", name));
  if (::setns(there.get(), CLONE_NEWNET) != 0) return fail_errno(fmt::format("--hosts: entering {} needs root", name));
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return fail_errno("--hosts: the addresses of " + name);
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owned(all, ::freeifaddrs);
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != AF_INET || (one->ifa_flags & IFF_LOOPBACK) != 0)
      continue;
    char text[INET_ADDRSTRLEN] = {};
    sockaddr_in address{};
    std::memcpy(&address, one->ifa_addr, sizeof address);
    if (::inet_ntop(AF_INET, &address.sin_addr, text, sizeof text) != nullptr) return std::string(text);
  }
  return fail(ErrorCode::not_found,
              "--hosts: {} has no IPv4 address but loopback's: give it one with 'ip -n {} addr add …'", name, name);
}

}  // namespace rejoin::bench
