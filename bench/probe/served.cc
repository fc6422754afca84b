// A trainer that fills the card, and a daemon that its memory is served to.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <iostream>
#include <thread>

#include "base/unix_socket.h"
#include "bench/probe/gpu.h"
#include "device/reducer.h"
#include "device/remote.h"

namespace rejoin::bench {

using device::Memory;

namespace {

// In the daemon's process: copies the state out, again and again, from one flag of the trainer's to the next, which it
// answers with the bytes.
void be_daemon(const Fd& line, std::uint64_t bytes) {
  const auto next = [&] {
    for (;;) {
      auto received = receive_with_fds(line, 64);
      if (!received) ::_exit(0);  // the trainer has ended
      if (*received) return std::move(**received);
      pollfd there{line.get(), POLLIN, 0};
      (void)::poll(&there, 1, -1);
    }
  };
  auto offer = next();
  std::uint64_t address = 0;
  BytesView rest = offer.bytes;
  if (!take(rest, address) || offer.fds.size() != 2) ::_exit(1);
  auto remote = must(device::connect_remote({std::move(offer.fds[0]), std::move(offer.fds[1])}, "the trainer's GPU"));
  auto stream = must(remote->make_stream());
  constexpr std::size_t slots = 8, block = 1 * MiB;
  const auto pinned = must(remote->allocate_pinned(slots * block));
  const device::Handle handle{.kind = device::Handle::Kind::address, .size = bytes, .address = address};
  const auto memory = must(remote->import_shared({&handle, 1}));
  const auto* state = memory.bytes.data();
  for (;;) {
    (void)next();
    std::uint64_t copied = 0, marks[slots] = {};
    for (std::uint64_t i = 0;; ++i) {
      if (i > 0 && i % slots == 0) {  // so that there is a rate, however short the time was
        auto received = must(receive_with_fds(line, 64));
        if (received) break;
      }
      while (must(stream->reached()) < marks[i % slots]) std::this_thread::yield();
      must(stream->copy(pinned.bytes.data() + i % slots * block, state + i * block % bytes, block));
      marks[i % slots] = must(stream->mark());
      copied += block;
    }
    must(stream->synchronize());
    must(send_with_fds(line, bytes_of(copied), {}));
  }
}

}  // namespace

std::vector<double> beside(const Settings& s) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) throw std::runtime_error("no sockets");
  Fd line(ends[0]), its(ends[1]);
  if (::fork() == 0) {  // before the driver is loaded: the daemon has none
    line.reset();
    try {
      be_daemon(its, s.bytes);
    } catch (const std::exception& failure) {
      std::cerr << "the daemon: " << failure.what() << "\n";
    }
    ::_exit(1);
  }
  its.reset();
  const auto gpu = open(s);
  const auto state = must(gpu->allocate(s.bytes));
  const auto server = must(device::MemoryServer::make(gpu, {state.bytes}));
  const auto offer = server->next();
  must(send_with_fds(line, bytes_of(reinterpret_cast<std::uint64_t>(state.bytes.data())),
                     {offer->socket.get(), offer->memory.get()}));
  Memory a = must(gpu->allocate(s.bytes)), b = must(gpu->allocate(s.bytes));
  must(device::zero_fresh(*gpu, a.bytes));
  must(device::zero_fresh(*gpu, b.bytes));
  const auto reducer = must(device::Reducer::make(*gpu, {.blocks = s.blocks, .threads = 512}));
  const SteadyClock clock;
  const auto train = [&] {  // GB/s of results
    const std::uint64_t work = std::min<std::uint64_t>(s.bytes, 64 * MiB);
    std::uint64_t added = 0;
    const TimePoint begin = clock.now();
    while (clock.now() - begin < s.wait) {
      must(reducer->add(DataType::float32, b.bytes.data(), a.bytes.data(), b.bytes.data(), work / 4, 0));
      added += work;
      while (!reducer->idle()) (void)must(reducer->done());
    }
    return static_cast<double>(added) / seconds(clock.now() - begin) * 1e-9;
  };
  TimePoint served_at{};
  const auto notify_daemon = [&] {
    served_at = clock.now();
    must(send_with_fds(line, as_bytes("x"), {}));
  };
  const auto stop = [&] {
    const TimePoint from = served_at;
    notify_daemon();
    for (;;) {
      auto received = must(receive_with_fds(line, 64));
      std::uint64_t bytes = 0;
      if (received) {
        BytesView rest = received->bytes;
        if (!take(rest, bytes)) throw std::runtime_error("the daemon has written nothing");
        return static_cast<double>(bytes) / seconds(clock.now() - from) * 1e-9;
      }
      pollfd there{line.get(), POLLIN, 0};
      (void)::poll(&there, 1, -1);
    }
  };
  (void)train();
  const double trainer_alone = train();
  notify_daemon();
  pause(s.wait);
  const double daemon_alone = stop();
  notify_daemon();
  const double trainer = train();
  const double daemon = stop();
  return {trainer_alone, daemon_alone, trainer, daemon};
}

}  // namespace rejoin::bench
