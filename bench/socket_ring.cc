#include "bench/socket_ring.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <numeric>
#include <set>

#include "base/clock.h"
#include "base/fail.h"
#include "ftar/reduce.h"

namespace rejoin::bench {

namespace {

using Direction = ftar::Schedule::Direction;

// One chunk's way over a socket.
struct Hop {
  std::uint32_t chunk = 0;
  bool scatter = false;
  bool own = false;  // it is sent out of the sender's input
  ftar::Range range;
};

// What goes over one socket in one direction, in order.
class Line {
 public:
  Line(int fd, std::vector<Hop> hops) : fd_(fd), hops_(std::move(hops)) {}
  int fd() const { return fd_; }
  bool done() const { return at_ == hops_.size(); }
  bool last() const { return at_ + 1 == hops_.size(); }
  const Hop& hop() const { return hops_[at_]; }
  std::size_t moved() const { return moved_; }  // of this hop
  // How many bytes on from here lie one after the other and can go, as far as `ready` says so.
  template <typename Ready>
  std::size_t contiguous(Ready ready) const {
    std::size_t length = 0;
    for (std::size_t i = at_; i < hops_.size() && ready(hops_[i]); ++i) {
      if (i > at_ && (hops_[i].range.offset != hops_[i - 1].range.offset + hops_[i - 1].range.length ||
                      hops_[i].own != hops_[i - 1].own))
        break;
      length += hops_[i].range.length - (i == at_ ? moved_ : 0);
    }
    return length;
  }
  // So many bytes have gone; `whole` is called for each hop that is complete.
  template <typename Whole>
  void advance(std::size_t bytes, Whole whole) {
    while (bytes > 0) {
      const std::size_t step = std::min(bytes, hop().range.length - moved_);
      moved_ += step, bytes -= step;
      if (moved_ < hop().range.length) return;
      whole(hop());
      moved_ = 0, ++at_;
    }
  }

 private:
  int fd_;
  std::vector<Hop> hops_;
  std::size_t at_ = 0, moved_ = 0;
};

// The reduce-scatter's chunks, and from the last round on a gathered one after each, two behind: those have just been
// added up then, and are sent while the cache has them.
std::vector<Hop> hops_to_the_right(const ftar::Schedule& schedule, std::uint32_t rank, std::uint32_t ranks) {
  constexpr std::size_t behind = 2;
  std::vector<Hop> hops;
  const auto scatters = schedule.reduce_scatter_sends(rank),
             gathers = schedule.all_gather_sends(rank, Direction::right);
  const std::size_t own = schedule.chunks_of((rank + ranks - 1) % ranks);
  const std::size_t last_round = scatters.size() - std::min(scatters.size(), std::size_t{schedule.chunks_of(rank)});
  std::size_t gathered = 0;
  const auto gather = [&] {
    const auto chunk = gathers[gathered++];
    hops.push_back({.chunk = chunk, .scatter = false, .own = false, .range = schedule.chunk(chunk)});
  };
  for (std::size_t i = 0; i < scatters.size(); ++i) {
    hops.push_back({.chunk = scatters[i], .scatter = true, .own = i < own, .range = schedule.chunk(scatters[i])});
    if (i >= last_round + behind && gathered < gathers.size() && gathered < schedule.chunks_of(rank)) gather();
  }
  while (gathered < gathers.size()) gather();
  std::erase_if(hops, [](const Hop& hop) { return hop.range.length == 0; });
  return hops;
}

std::vector<Hop> hops_to_the_left(const ftar::Schedule& schedule, std::uint32_t rank) {
  std::vector<Hop> hops;
  for (const auto chunk : schedule.all_gather_sends(rank, Direction::left))
    hops.push_back({.chunk = chunk, .scatter = false, .own = false, .range = schedule.chunk(chunk)});
  std::erase_if(hops, [](const Hop& hop) { return hop.range.length == 0; });
  return hops;
}

bool would_wait(ssize_t result) { return result < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR); }

}  // namespace

SocketRing::SocketRing(Meeting& meeting, std::uint32_t rank, std::uint32_t ranks,
                       const std::vector<std::pair<Fd, Fd>>& pairs)
    : meeting_(meeting),
      rank_(rank),
      ranks_(ranks),
      right_(ranks == 2 && rank == 1 ? pairs[0].second.get() : pairs[rank].first.get()),
      left_(ranks == 2 ? right_ : pairs[(rank + ranks - 1) % ranks].second.get()) {}

Result<std::uint64_t> SocketRing::all_reduce(const Operation& o) {
  const ftar::Schedule schedule({.bytes = o.input.size(),
                                 .element = size_of(o.type),
                                 .contributors = ranks_,
                                 .members = ranks_,
                                 .chunk_bytes = o.chunk_bytes,
                                 .both_ways = o.both_ways});
  const std::uint32_t left_rank = (rank_ + ranks_ - 1) % ranks_, right_rank = (rank_ + 1) % ranks_;
  Line to_right(right_, hops_to_the_right(schedule, rank_, ranks_)), to_left(left_, hops_to_the_left(schedule, rank_));
  Line from_left(left_, hops_to_the_right(schedule, left_rank, ranks_));
  Line from_right(right_, hops_to_the_left(schedule, right_rank));
  if (staging_.size() < o.chunk_bytes) {  // of whole pages, as our own staging is
    auto staging = Mapping::shareable(o.chunk_bytes);
    if (!staging) return tl::unexpected(staging.error());
    staging_ = std::move(*staging);
  }
  std::vector<std::uint8_t> partial(std::size_t{ranks_} * schedule.stride()), final(partial.size());
  std::uint64_t received = 0;

  const auto can_go = [&](const Line& line) {
    return line.contiguous(
        [&](const Hop& hop) { return hop.scatter ? hop.own || partial[hop.chunk] != 0 : final[hop.chunk] != 0; });
  };
  const auto send = [&](Line& line) -> Result<> {
    const std::size_t length = can_go(line);
    const std::byte* from = (line.hop().own ? o.input.data() : o.output.data()) + line.hop().range.offset;
    const ssize_t sent = ::send(line.fd(), from + line.moved(), length, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (would_wait(sent)) return {};
    if (sent < 0) return fail_errno("send");
    line.advance(static_cast<std::size_t>(sent), [](const Hop&) {});
    return {};
  };
  const auto arrived = [&](const Hop& hop) {
    if (!hop.scatter) {
      final[hop.chunk] = 1;
      return;
    }
    const bool last = schedule.receive_round(rank_, schedule.segment_of(hop.chunk)) + 2 == ranks_;
    ftar::add(o.type, o.output.data() + hop.range.offset, staging_.data(), o.input.data() + hop.range.offset,
              hop.range.length / size_of(o.type), last ? o.divisor : 0);
    (last ? final : partial)[hop.chunk] = 1;
  };
  const auto receive = [&](Line& line) -> Result<> {
    const Hop& hop = line.hop();
    std::byte* to = hop.scatter ? staging_.data() : o.output.data() + hop.range.offset;
    const std::size_t length =
        hop.scatter ? hop.range.length - line.moved() : line.contiguous([](const Hop& next) { return !next.scatter; });
    const ssize_t got = ::recv(line.fd(), to + line.moved(), length, MSG_DONTWAIT);
    if (would_wait(got)) return {};
    if (got < 0) return fail_errno("recv");
    if (got == 0) return fail(ErrorCode::unavailable, "another rank has closed its socket");
    received += static_cast<std::uint64_t>(got);
    line.advance(static_cast<std::size_t>(got), arrived);
    return {};
  };
  // Much as our own progress threads wait (transport/idle.h): they poll for a while, let others run, and then sleep.
  const int spins = ranks_ <= cores() ? 2000 : 20;
  const SteadyClock clock;
  int idle = 0;
  TimePoint since{};
  const auto patience = [&]() -> int {  // of poll()
    if (idle++ == 0) since = clock.now();
    if (idle <= spins && idle % 64 != 0) return 0;
    if (clock.now() - since > std::chrono::microseconds(300)) return 20;  // then it is seen whether another has failed
    if (idle > spins) ::sched_yield();
    return 0;
  };
  std::array<Line*, 2> in{&from_right, &from_left}, out{&to_right, &to_left};  // by socket
  while (!to_right.done() || !to_left.done() || !from_left.done() || !from_right.done()) {
    std::array<pollfd, 2> waiting{};
    for (std::size_t i = 0; i < 2; ++i) {
      if (!in[i]->done()) wait_for(i, in[i]->hop().range.length - in[i]->moved(), in[i]->last());
      waiting[i] = {
          i == 0 ? right_ : left_,
          static_cast<short>((in[i]->done() ? 0 : POLLIN) | (!out[i]->done() && can_go(*out[i]) > 0 ? POLLOUT : 0)), 0};
    }
    if (::poll(waiting.data(), waiting.size(), patience()) > 0) idle = 0;
    for (std::size_t i = 0; i < 2; ++i) {
      if ((waiting[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0 && !in[i]->done())
        if (auto done = receive(*in[i]); !done) return tl::unexpected(done.error());
      if ((waiting[i].revents & POLLOUT) != 0)
        if (auto done = send(*out[i]); !done) return tl::unexpected(done.error());
    }
    if (meeting_.failed.load() != 0) return another_failed();
  }
  return received;
}

// Of a chunk with others behind it nothing can be done before it is whole: until then the socket is left alone, since
// each call holds up its other end.
void SocketRing::wait_for(std::size_t socket, std::size_t missing, bool last) {
  constexpr std::size_t kWorthWaiting = 64 * KiB, kTogether = 128 * KiB;
  const int wanted = missing >= kWorthWaiting && !last ? static_cast<int>(std::min(missing, kTogether)) : 1;
  if (std::exchange(low_water_[socket], wanted) == wanted) return;
  // Where it can't be set, each call just brings less.
  (void)::setsockopt(socket == 0 ? right_ : left_, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted);
}

double SocketLimit::Variant::mean() const {
  return std::accumulate(seconds.begin(), seconds.end(), 0.0) / static_cast<double>(seconds.size());
}

SocketLimit::SocketLimit(SocketRing& ring, std::uint32_t ranks, const SocketRing::Operation& operation,
                         std::size_t chunk_bytes)
    : ring_(ring), ranks_(ranks) {
  // Our own chunks and others, none larger than a segment.
  const std::size_t segment = round_up((operation.input.size() + ranks - 1) / ranks, 64);
  std::set<std::size_t> chunks;
  for (const std::size_t each : {chunk_bytes, 512 * KiB, 2 * MiB, 4 * MiB}) chunks.insert(std::min(each, segment));
  for (const auto each : chunks)
    for (const bool both_ways : {true, false}) {
      if (both_ways && ranks == 2) continue;  // there are no two ways
      Variant variant{.operation = operation, .seconds = {}};
      variant.operation.chunk_bytes = each;
      variant.operation.both_ways = both_ways;
      variants_.push_back(std::move(variant));
    }
}

Result<> SocketLimit::turn(Meeting& meeting, std::uint32_t rank, int operations) {
  const SteadyClock clock;
  for (auto& variant : variants_) {
    if (!meet(meeting, ranks_)) return another_failed();
    const TimePoint start = clock.now();
    for (int i = 0; i < operations; ++i)
      if (auto done = ring_.all_reduce(variant.operation); !done) return tl::unexpected(done.error());
    const auto all = gather(meeting, rank, ranks_, seconds(clock.now() - start) / operations);
    if (all.empty()) return another_failed();
    variant.seconds.push_back(*std::max_element(all.begin(), all.end()));
  }
  return {};
}

const SocketLimit::Variant& SocketLimit::fastest() const {
  return *std::min_element(variants_.begin(), variants_.end(),
                           [](const Variant& a, const Variant& b) { return a.mean() < b.mean(); });
}

double SocketLimit::mean_seconds() const { return fastest().mean(); }
std::size_t SocketLimit::chunk_bytes() const { return fastest().operation.chunk_bytes; }

double SocketLimit::best_seconds() const {
  double best = variants_.front().seconds.front();
  for (const auto& variant : variants_)
    best = std::min(best, *std::min_element(variant.seconds.begin(), variant.seconds.end()));
  return best;
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
    constexpr std::string_view reno = "reno";  // as our own connections within a machine: it does not pace
    for (const int fd : {out.get(), in.get()})
      if (::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) != 0 ||
          ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, reno.data(), reno.size()) != 0)
        return fail_errno("TCP_NODELAY, reno");
    pairs.emplace_back(std::move(out), std::move(in));
  }
  return pairs;
}

}  // namespace rejoin::bench
