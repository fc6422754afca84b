#include "transport/advertise.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <functional>
#include <optional>

#include "base/fail.h"
#include "base/fd.h"
#include "base/text.h"
#include "transport/socket_address.h"

namespace rejoin::transport {

namespace {

constexpr char kBorder = '|';  // between the rails' addresses: see striped/factory.h

bool is_any(const std::string& host) { return host == "0.0.0.0" || host == "::"; }

std::string without_brackets(const std::string& host) {
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  return bracketed ? host.substr(1, host.size() - 2) : host;
}

// Of each rail's address that has a host, the host is replaced where `host_of` gives one.
Address replaced(const Address& listening,
                 const std::function<std::optional<std::string>(std::size_t rail, const HostPort&)>& host_of) {
  Address all;
  std::size_t rail = 0;
  for (const auto& one : split(listening.text, kBorder)) {
    const auto parts = SocketAddress::split(one);
    const auto host = parts ? host_of(rail, *parts) : std::nullopt;
    all.text += (rail++ > 0 ? std::string(1, kBorder) : "") + (host ? with_port(*host, parts->port) : one);
  }
  return all;
}

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET6) {
    const auto& in6 = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
    return IN6_IS_ADDR_LOOPBACK(&in6) || (IN6_IS_ADDR_V4MAPPED(&in6) && in6.s6_addr[12] == 127);  // ::ffff:127.0.0.1
  }
  return ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr) >> 24 == 127;
}

// Of IPv6, where it takes an interface to reach one; those of IPv4 are used as any.
bool is_link_local(const sockaddr* address) {
  return address->sa_family == AF_INET6 &&
         IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

std::string host_of(const sockaddr* address) {
  const std::size_t length = address->sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  sockaddr_storage storage{};
  std::copy_n(reinterpret_cast<const char*>(address), length, reinterpret_cast<char*>(&storage));
  return SocketAddress::split(SocketAddress::format(storage)).value().host;
}

// The address that the system would send from, of this machine's for others. Connecting a datagram socket sends
// nothing.
std::optional<std::string> sent_from(const std::string& peer) {
  const auto there = SocketAddress::numeric(peer);
  if (!there) return std::nullopt;
  const Fd socket(::socket(there->get()->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage here{};
  socklen_t length = sizeof here;
  auto* address = reinterpret_cast<sockaddr*>(&here);
  if (!socket || ::connect(socket.get(), there->get(), there->length()) != 0 ||
      ::getsockname(socket.get(), address, &length) != 0 || is_loopback(address))
    return std::nullopt;
  return host_of(address);
}

bool is_for_others(const sockaddr* address) {
  return !is_loopback(address) && !is_link_local(address) && !is_any(host_of(address));
}

std::string of_an_interface(int family) {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return "";
  std::string found;
  for (const auto* one = all; one != nullptr && found.empty(); one = one->ifa_next)
    if (one->ifa_addr != nullptr && one->ifa_addr->sa_family == family && (one->ifa_flags & IFF_UP) != 0 &&
        is_for_others(one->ifa_addr))
      found = host_of(one->ifa_addr);
  ::freeifaddrs(all);
  return found;
}

struct OwnHost {
  std::string host;
  bool routed = false;  // on the default route
};

// Addresses for examples are of no machine: the way there is the default route.
OwnHost of_family(int family) {
  const auto host = sent_from(family == AF_INET6 ? "[2001:db8::1]:9" : "192.0.2.1:9");
  const auto address = host ? SocketAddress::numeric(with_port(*host, 0)) : tl::unexpected(Error{});
  if (address && is_for_others(address->get())) return {*host, true};
  return {of_an_interface(family), false};
}

bool any_of(const Address& address, const std::function<bool(const sockaddr*)>& condition) {
  bool any = false;
  (void)replaced(address, [&](std::size_t, const HostPort& parts) {
    if (const auto one = SocketAddress::numeric(with_port(parts.host, parts.port))) any |= condition(one->get());
    return std::optional<std::string>();
  });
  return any;
}

}  // namespace

Result<Address> listen_as(Engine& engine, const Address& where, const std::string& setting) {
  auto listening = engine.listen(where);
  if (!listening) return fail(listening.error().code, "{}: {}", setting, listening.error().message);
  return listening;
}

Result<> check_advertised(const std::string& hosts) {
  for (const auto& given : split(hosts, ',')) {
    const std::string host = without_brackets(given);
    if (host.empty())
      return fail(ErrorCode::invalid_argument,
                  "'{}': a host is missing; it is HOST, or HOST,HOST… with one for each rail", hosts);
    if (is_any(host))
      return fail(ErrorCode::invalid_argument,
                  "'{}': nobody can be reached at {}; give an address of this machine that its peers reach", hosts,
                  host);
    if (std::count(host.begin(), host.end(), ':') == 1 ||
        host != given.substr(given.front() == '[' ? 1 : 0, host.size()))
      return fail(ErrorCode::invalid_argument,
                  "'{}': it is a host without a port; peers are told the port that is listened on", hosts);
    if (const auto address = SocketAddress::numeric(with_port(host, 0));
        address && is_link_local(address->get()) && host.find('%') == std::string::npos)
      return fail(ErrorCode::invalid_argument,
                  "'{}': {} is a link-local address, at which nobody can be reached without an interface: give an "
                  "address of this machine that its peers reach, or {}%INTERFACE",
                  hosts, host, host);
    if (host.find_first_of("|/ []") != std::string::npos || !is_utf8(host))
      return fail(ErrorCode::invalid_argument, "'{}' is not the name or the address of a host",
                  printable(host, host.size()));
  }
  return {};
}

Result<Address> advertised(const Address& listening, const std::string& hosts) {
  if (hosts.empty()) return listening;
  if (auto right = check_advertised(hosts); !right) return tl::unexpected(right.error());
  const auto given = split(hosts, ',');
  const auto rails = split(listening.text, kBorder).size();
  if (given.size() != 1 && given.size() != rails)
    return fail(ErrorCode::invalid_argument,
                "--advertise '{}' names {} hosts, and there are {} rails: give one for all, or one for each", hosts,
                given.size(), rails);
  return replaced(listening, [&](std::size_t rail, const HostPort&) {
    return std::optional(without_brackets(given[given.size() == 1 ? 0 : rail]));
  });
}

OwnHosts own_hosts(const std::string& here) {
  OwnHosts hosts;
  if (const auto end = SocketAddress::numeric(here); end && is_for_others(end->get())) {
    const auto& in6 = reinterpret_cast<const sockaddr_in6*>(end->get())->sin6_addr;
    hosts.v6_first = end->get()->sa_family == AF_INET6 && !IN6_IS_ADDR_V4MAPPED(&in6);
    (hosts.v6_first ? hosts.v6 : hosts.v4) = host_of(end->get());
  }
  const bool shown = !hosts.v4.empty() || !hosts.v6.empty();
  const OwnHost v4 = hosts.v4.empty() ? of_family(AF_INET) : OwnHost();
  const OwnHost v6 = hosts.v6.empty() ? of_family(AF_INET6) : OwnHost();
  if (hosts.v4.empty()) hosts.v4 = v4.host;
  if (hosts.v6.empty()) hosts.v6 = v6.host;
  if (!shown) hosts.v6_first = v6.routed && !v4.routed;  // an interface without a route may be a bridge of containers
  return hosts;
}

OwnHosts own_hosts_towards(const std::string& peer) {
  const auto host = sent_from(peer);
  return own_hosts(host ? with_port(*host, 0) : "");
}

OwnHosts or_loopback(OwnHosts hosts) {
  hosts.v6_first |= hosts.v4.empty() && !hosts.v6.empty();  // what others can use goes before what they can't
  if (hosts.v4.empty()) hosts.v4 = "127.0.0.1";
  if (hosts.v6.empty()) hosts.v6 = "::1";
  return hosts;
}

Address with_own_host_for_any(const Address& listening, const OwnHosts& hosts) {
  const auto& both = hosts.v6.empty() || (!hosts.v6_first && !hosts.v4.empty()) ? hosts.v4 : hosts.v6;
  return replaced(listening, [&](std::size_t, const HostPort& parts) {
    const auto& host = parts.host == "0.0.0.0" ? hosts.v4 : both;
    return is_any(parts.host) && !host.empty() ? std::optional(host) : std::nullopt;
  });
}

Address with_host_for_any(const Address& listening, const std::string& host) {
  return replaced(listening, [&](std::size_t, const HostPort& parts) {
    return is_any(parts.host) ? std::optional(without_brackets(host)) : std::nullopt;
  });
}

bool listens_everywhere(const Address& listening) {
  bool any = false;
  (void)replaced(listening, [&](std::size_t, const HostPort& parts) {
    any |= is_any(parts.host);
    return std::optional<std::string>();
  });
  return any;
}

bool is_loopback(const Address& address) {
  return any_of(address, [](const sockaddr* one) { return is_loopback(one); });
}

bool is_link_local(const Address& address) {
  return any_of(address, [](const sockaddr* one) { return is_link_local(one); });
}

std::optional<std::string> own_host_towards(const std::string& peer) { return sent_from(peer); }

}  // namespace rejoin::transport
