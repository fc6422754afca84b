#include "transport/tcp/round_trip.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>

namespace rejoin::transport::tcp {

namespace {

std::optional<tcp_info> info_of(const Fd& socket, std::size_t needed) {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (::getsockopt(socket.get(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0 || length < needed) return std::nullopt;
  return info;
}

}  // namespace

std::optional<Duration> least_round_trip(const Fd& socket) {
  const auto info = info_of(socket, offsetof(tcp_info, tcpi_min_rtt) + sizeof tcp_info::tcpi_min_rtt);
  constexpr auto none = ~decltype(info->tcpi_min_rtt){0};
  if (!info || info->tcpi_min_rtt == none) return std::nullopt;
  return std::chrono::microseconds(info->tcpi_min_rtt);
}

std::optional<std::uint64_t> acknowledged_of_more(const Fd& socket) {
  const auto info = info_of(socket, offsetof(tcp_info, tcpi_bytes_acked) + sizeof tcp_info::tcpi_bytes_acked);
  if (!info || info->tcpi_unacked == 0 || info->tcpi_retransmits == 0) return std::nullopt;
  return info->tcpi_bytes_acked;
}

std::optional<Traffic> traffic_of(const Fd& socket) {
  const auto info = info_of(socket, offsetof(tcp_info, tcpi_snd_wnd) + sizeof tcp_info::tcpi_snd_wnd);  // Linux 5.4
  if (!info) return std::nullopt;
  // A kernel that is short of memory takes back the room for what is on its way, and acknowledges nothing of that.
  return Traffic{.under_way = info->tcpi_unacked > 0 || info->tcpi_notsent_bytes > 0,
                 .held_back = info->tcpi_unacked == 0 || info->tcpi_snd_wnd == 0,
                 .acknowledged = info->tcpi_bytes_acked,
                 .segments = info->tcpi_segs_in};
}

}  // namespace rejoin::transport::tcp
