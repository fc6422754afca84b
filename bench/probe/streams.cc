// What stands still while a stream waits for a flag: calls of other threads, and other streams.
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <thread>

#include "base/fd.h"
#include "bench/probe/gpu.h"
#include "device/kernels/mailbox.h"

namespace rejoin::bench {

using device::Memory, device::Stream;

namespace {

void launch_nothing(Stream& stream, const Memory& keys) {
  device::kernels::DigestArguments arguments{};
  arguments.keys = reinterpret_cast<std::uint64_t>(keys.bytes.data());
  must(stream.launch(device::Kernel::digest, {1, 32}, &arguments));
}

}  // namespace

std::string name_of_gpu(const Settings& s) { return open(s)->name(); }

double stands(const Settings& s, Does does, std::size_t call) {
  const auto gpu = open(s);
  if (does != Does::first_launch) must(gpu->prepare_kernels());
  const auto waiting = must(gpu->make_stream()), side = must(gpu->make_stream()), other = must(gpu->make_stream());
  const auto flag = must(gpu->allocate_pinned(4096)), pinned = must(gpu->allocate_pinned(64 * KiB));
  const auto memory = must(gpu->allocate(64 * MiB)), keys = must(gpu->allocate(64 * KiB));
  auto gone = must(gpu->allocate(1 * MiB));
  const Fd eventfd = must(make_eventfd());
  if (does != Does::first_launch) launch_nothing(*other, keys);
  must(other->synchronize());
  auto& value = *reinterpret_cast<std::uint64_t*>(flag.bytes.data());
  value = 0;
  must(waiting->wait_until(&value, 1));
  Bytes pageable(64 * MiB);
  Memory kept;  // freeing would wait for the stream
  std::atomic<double> took = -1;
  std::thread observer([&] {
    (void)::pthread_setname_np(::pthread_self(), "rejoin-memory");  // the driver of software lets that one be
    pause(s.wait / 5);                                              // the other thread is in its call by then
    const SteadyClock clock;
    const TimePoint before = clock.now();
    switch (call) {
      case 0: (void)other->mark(); break;
      case 1: (void)other->copy(pinned.bytes.data(), memory.bytes.data(), 4096); break;
      case 2: launch_nothing(*other, keys); break;
      case 3: kept = must(gpu->allocate(1 * MiB)); break;
      default: kept = must(gpu->allocate_pinned(64 * KiB)); break;
    }
    took = milliseconds(clock.now() - before);
  });
  std::thread releaser([&] {
    pause(s.wait);
    std::atomic_ref(value).store(1, std::memory_order_release);
  });
  switch (does) {
    case Does::nothing: break;
    case Does::small_copy: must(waiting->copy(pageable.data(), memory.bytes.data(), 4)); break;
    case Does::large_copy: must(waiting->copy(pageable.data(), memory.bytes.data(), pageable.size())); break;
    case Does::many_launches:
      for (int i = 0; i < 5000; ++i) must(waiting->clear(memory.bytes.data(), 4));
      break;
    case Does::events:
      for (int i = 0; i < 200; ++i) {
        must(side->follow(*waiting));
        must(side->signal(eventfd));
      }
      break;
    case Does::frees: gone = {}; break;
    case Does::first_launch: launch_nothing(*waiting, keys); break;
    case Does::synchronize: must(waiting->synchronize()); break;
  }
  observer.join();
  releaser.join();
  return took;
}

double stopped_streams(const Settings& s, const Queues& queues) {
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", std::to_string(queues.connections).c_str(), 1);
  const auto gpu = open(s);
  const auto flag = must(gpu->allocate_pinned(4096));
  const auto memory = must(gpu->allocate(64 * KiB));
  auto& value = *reinterpret_cast<std::uint64_t*>(flag.bytes.data());
  value = 0;
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < queues.streams; ++i) streams.push_back(must(gpu->make_stream()));
  for (int i = 0; i < queues.waiting; ++i) must(streams[static_cast<std::size_t>(i)]->wait_until(&value, 1));
  std::vector<std::uint64_t> marks;
  const auto others = std::span(streams).subspan(static_cast<std::size_t>(queues.waiting));
  for (const auto& stream : others) {
    must(stream->clear(memory.bytes.data(), 4));
    marks.push_back(must(stream->mark()));
  }
  const auto behind = [&] {
    int count = 0;
    for (std::size_t i = 0; i < others.size(); ++i) count += must(others[i]->reached()) < marks[i] ? 1 : 0;
    return count;
  };
  const SteadyClock clock;
  for (const TimePoint until = clock.now() + s.wait; clock.now() < until && behind() > 0;) pause(s.wait / 50);
  const int stopped = behind();
  std::atomic_ref(value).store(1, std::memory_order_release);
  for (const auto& stream : streams) must(stream->synchronize());
  return stopped;
}

}  // namespace rejoin::bench
