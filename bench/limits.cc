#include "bench/limits.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/fail.h"
#include "ftar/reduce.h"

namespace rejoin::bench {

bool meet(Meeting& meeting, std::uint32_t count) {
  const std::uint32_t round = meeting.round.load();
  if (meeting.arrived.fetch_add(1) + 1 == count) {
    meeting.arrived.store(0);
    meeting.round.fetch_add(1);
    return meeting.failed.load() == 0;
  }
  for (int spins = 0; meeting.round.load() == round; ++spins) {
    if (meeting.failed.load() != 0) return false;
    if (spins > 1000) ::sched_yield();
  }
  return true;
}

double shared_memory_all_reduce(Meeting& meeting, std::uint32_t rank, std::uint32_t count, std::span<std::byte> shared,
                                std::span<const float> input, std::span<float> output) {
  const std::size_t bytes = input.size_bytes();
  const auto part = [&](std::uint32_t i) { return shared.data() + i * bytes; };
  meet(meeting, count);
  const auto start = std::chrono::steady_clock::now();
  std::memcpy(part(rank), input.data(), bytes);
  meet(meeting, count);
  const std::size_t share = (input.size() + count - 1) / count;
  const std::size_t begin = std::min(input.size(), rank * share), end = std::min(input.size(), begin + share);
  std::byte* result = part(count) + begin * 4;
  constexpr std::size_t block = 32768;  // elements: the sum of a block stays in cache over all parts
  for (std::size_t at = begin; at < end; at += block) {
    const std::size_t length = std::min(block, end - at);
    std::byte* out = result + (at - begin) * 4;
    for (std::uint32_t i = 1; i < count; ++i)
      ftar::add(DataType::float32, out, i == 1 ? part(0) + at * 4 : out, part(i) + at * 4, length);
  }
  meet(meeting, count);
  std::memcpy(output.data(), part(count), bytes);
  meet(meeting, count);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double socket_ring(Meeting& meeting, std::uint32_t count, int to, int from, std::span<const std::byte> source,
                   std::span<std::byte> target, std::size_t bytes) {
  meet(meeting, count);
  const auto start = std::chrono::steady_clock::now();
  std::size_t sent = 0, received = 0;
  while (sent < bytes || received < bytes) {
    pollfd waiting[2] = {{sent < bytes ? to : -1, POLLOUT, 0}, {received < bytes ? from : -1, POLLIN, 0}};
    ::poll(waiting, 2, 1000);
    const std::size_t piece = 1 << 20;
    if (waiting[0].revents != 0) {
      const std::size_t at = sent % source.size();
      const ssize_t n = ::send(to, source.data() + at, std::min({piece, bytes - sent, source.size() - at}),
                               MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n > 0) sent += static_cast<std::size_t>(n);
    }
    if (waiting[1].revents != 0) {
      const std::size_t at = received % target.size();
      const ssize_t n =
          ::recv(from, target.data() + at, std::min({piece, bytes - received, target.size() - at}), MSG_DONTWAIT);
      if (n > 0) received += static_cast<std::size_t>(n);
    }
  }
  meet(meeting, count);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Result<std::vector<std::pair<Fd, Fd>>> tcp_pairs(std::uint32_t count) {
  Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  if (!listener || ::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::listen(listener.get(), 64) != 0 ||
      ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0)
    return fail_errno("loopback sockets");
  std::vector<std::pair<Fd, Fd>> pairs;
  for (std::uint32_t i = 0; i < count; ++i) {
    Fd out(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!out || ::connect(out.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) return fail_errno("connect");
    Fd in(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!in) return fail_errno("accept");
    const int one = 1;
    ::setsockopt(out.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    pairs.emplace_back(std::move(out), std::move(in));
  }
  return pairs;
}

}  // namespace rejoin::bench
