#include "transport/tcp/round_trip.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>

namespace rejoin::transport::tcp {

std::optional<Duration> least_round_trip(const Fd& socket) {
  tcp_info info{};
  socklen_t length = sizeof info;
  constexpr std::size_t needed = offsetof(tcp_info, tcpi_min_rtt) + sizeof info.tcpi_min_rtt;
  if (::getsockopt(socket.get(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0 || length < needed) return std::nullopt;
  constexpr auto none = ~decltype(info.tcpi_min_rtt){0};
  if (info.tcpi_min_rtt == none) return std::nullopt;
  return std::chrono::microseconds(info.tcpi_min_rtt);
}

}  // namespace rejoin::transport::tcp
