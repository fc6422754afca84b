#include "transport/socket_address.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>
#include <cctype>
#include <cstring>

#include "base/fail.h"
#include "base/fd.h"
#include "base/number.h"

namespace rejoin::transport {

namespace {

// Not what the name server says of a name, but that it, or this machine, can't say anything.
bool is_of_server(int error) {
  return error == EAI_AGAIN || error == EAI_FAIL || error == EAI_MEMORY || error == EAI_SYSTEM;
}

// Names and addresses have none of that, and a resolver may take it for something else, as '*' for the loopback.
std::string wrong_in(const std::string& host, bool bracketed) {
  if (host == "*") return "names no machine; to listen on all addresses write 0.0.0.0 or [::]";
  if (std::ranges::any_of(host, [](unsigned char one) { return std::isspace(one) != 0; })) return "has a blank in it";
  if (host.find('/') != std::string::npos) return "has a '/' in it; write HOST:PORT alone, without http://";
  in6_addr ignored{};
  const bool ipv6 = ::inet_pton(AF_INET6, host.substr(0, host.find('%')).c_str(), &ignored) == 1;
  if (!bracketed && !ipv6 && host.find(':') != std::string::npos)
    return "has a ':' in it; write HOST:PORT alone, an IPv6 address in brackets";
  return {};
}

}  // namespace

std::string with_port(const std::string& host, std::uint16_t port) {
  return host.find(':') == std::string::npos ? fmt::format("{}:{}", host, port) : fmt::format("[{}]:{}", host, port);
}

Result<HostPort> SocketAddress::split(const std::string& text) {
  const auto colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == text.size() || text.back() == ']')
    return fail(ErrorCode::invalid_argument, "address '{}' is not of the form host:port", text);
  HostPort parts{.host = text.substr(0, colon)};
  if (!parse_number(std::string_view(text).substr(colon + 1), parts.port))
    return fail(ErrorCode::invalid_argument, "address '{}': its port '{}' is not a number from 0 to 65535", text,
                text.substr(colon + 1));
  const bool bracketed = parts.host.size() > 2 && parts.host.front() == '[' && parts.host.back() == ']';
  if (bracketed) parts.host = parts.host.substr(1, parts.host.size() - 2);
  if (const std::string wrong = wrong_in(parts.host, bracketed); !wrong.empty())
    return fail(ErrorCode::invalid_argument, "address '{}': its host '{}' {}", text, parts.host, wrong);
  return parts;
}

Result<SocketAddress> SocketAddress::resolve(const std::string& text) {
  return resolve_all(text).map([](const auto& all) { return all.front(); });
}

Result<std::deque<SocketAddress>> SocketAddress::resolve_all(const std::string& text) {
  return find(text, AI_NUMERICSERV);
}

Result<SocketAddress> SocketAddress::numeric(const std::string& text) {
  return find(text, AI_NUMERICSERV | AI_NUMERICHOST).map([](const auto& all) { return all.front(); });
}

Result<std::deque<SocketAddress>> SocketAddress::find(const std::string& text, int flags) {
  const auto parts = split(text);
  if (!parts) return tl::unexpected(parts.error());
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  if (int error = ::getaddrinfo(parts->host.c_str(), std::to_string(parts->port).c_str(), &hints, &found); error != 0)
    return fail(is_of_server(error) ? ErrorCode::unavailable : ErrorCode::invalid_argument, "address '{}': {}", text,
                ::gai_strerror(error));
  std::deque<SocketAddress> all;
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    SocketAddress& address = all.emplace_back();
    std::memcpy(&address.storage_, each->ai_addr, each->ai_addrlen);
    address.length_ = each->ai_addrlen;
  }
  ::freeaddrinfo(found);
  return all;
}

Result<> SocketAddress::check_own(const HostPort& parts) {
  const auto address = resolve(with_port(parts.host, 0));
  if (!address) return tl::unexpected(address.error());
  const Fd socket(::socket(address->get()->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) return fail_errno("socket");
  if (::bind(socket.get(), address->get(), address->length()) != 0)
    return fail_errno(fmt::format("this machine can't listen on {}", parts.host));
  return {};
}

std::string SocketAddress::format(const sockaddr_storage& address) {
  char host[INET6_ADDRSTRLEN] = "?";
  if (address.ss_family == AF_INET6) {
    const auto& in6 = reinterpret_cast<const sockaddr_in6&>(address);
    ::inet_ntop(AF_INET6, &in6.sin6_addr, host, sizeof host);
    std::string scope;
    if (in6.sin6_scope_id != 0) {
      char name[IF_NAMESIZE] = "";
      scope = ::if_indextoname(in6.sin6_scope_id, name) != nullptr ? fmt::format("%{}", name)
                                                                   : fmt::format("%{}", in6.sin6_scope_id);
    }
    return fmt::format("[{}{}]:{}", host, scope, ntohs(in6.sin6_port));
  }
  const auto& in4 = reinterpret_cast<const sockaddr_in&>(address);
  ::inet_ntop(AF_INET, &in4.sin_addr, host, sizeof host);
  return fmt::format("{}:{}", host, ntohs(in4.sin_port));
}

}  // namespace rejoin::transport
