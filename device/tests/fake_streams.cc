// The software driver's streams and events, and what is queued on them.
#include "device/tests/fake_streams.h"

#include <condition_variable>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "device/tests/fake_driver.h"

#ifdef __SANITIZE_THREAD__
extern "C" void AnnotateIgnoreWritesBegin(const char* file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char* file, int line);
#endif

namespace rejoin::device::fake {

namespace {

// Under `mutex`; as the program ends, streams may still be at work.
std::map<Stream*, std::shared_ptr<Stream>>& streams = *new std::map<Stream*, std::shared_ptr<Stream>>;

struct Event {
  std::mutex lock;
  std::condition_variable changed;
  std::uint64_t recorded = 0, done = 0;
};

// Host functions that are queued, on all streams: the driver has room for so many.
struct HostFunctions {
  static constexpr int kRoom = 128;
  std::mutex lock;
  std::condition_variable changed;
  int queued = 0;
  void enter() {
    std::unique_lock held(lock);
    changed.wait(held, [&] { return queued < kRoom; });
    ++queued;
  }
  void leave() {
    std::scoped_lock held(lock);
    --queued;
    changed.notify_all();
  }
};
HostFunctions& host_functions = *new HostFunctions;

void copy_unseen(void* to, const void* from, std::size_t size) {
#ifdef __SANITIZE_THREAD__
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
  std::memcpy(to, from, size);
#ifdef __SANITIZE_THREAD__
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
#endif
}

}  // namespace

void wait_for_device() {
  check_wait();
  std::vector<std::shared_ptr<Stream>> all;
  {
    std::scoped_lock lock(mutex);
    for (const auto& [at, stream] : streams) all.push_back(stream);
  }
  for (const auto& stream : all) stream->wait();
}

}  // namespace rejoin::device::fake

using namespace rejoin::device::fake;

extern "C" {

void fake_cuda_begin_capture(void* stream) {
  static_cast<Stream*>(stream)->captured = true;
  captures_spoilt = false;
  ++captures;
}
bool fake_cuda_end_capture(void* stream) {
  static_cast<Stream*>(stream)->captured = false;
  --captures;
  return !captures_spoilt;
}

int cuStreamCreateWithPriority(Stream** stream, unsigned, int priority) {
  if (const int refused = refusal(); refused != kSuccess) return refused;
  check("cuStreamCreateWithPriority");
  std::scoped_lock lock(mutex);
  auto made = std::make_shared<Stream>(next_hardware_queue(), priority < 0);
  ++counters.streams;
  counters.high_streams += made->high ? 1 : 0;
  *stream = made.get();
  streams[made.get()] = std::move(made);
  return kSuccess;
}
int cuStreamDestroy_v2(Stream* stream) {
  check("cuStreamDestroy");
  std::shared_ptr<Stream> gone;
  std::scoped_lock lock(mutex);
  gone = std::move(streams.extract(stream).mapped());
  --counters.streams;
  counters.high_streams -= gone->high ? 1 : 0;
  return kSuccess;
}
int cuStreamQuery(Stream* stream) {
  if (dead) return kIllegalAddress;
  if (const int refused = capture_refusal(); refused != kSuccess) return refused;
  if (!may_look()) check("cuStreamQuery");
  std::scoped_lock lock(stream->lock);
  return stream->done == stream->queued ? kSuccess : kNotReady;
}
int cuStreamSynchronize(Stream* stream) {
  if (const int refused = capture_refusal(); refused != kSuccess) return refused;
  if (!dead) check("cuStreamSynchronize");
  stream->wait();  // where it is dead, until its kernel has stopped, too
  return dead ? kIllegalAddress : kSuccess;
}
int cuThreadExchangeStreamCaptureMode(int* mode) { return std::swap(capture_mode, *mode), kSuccess; }
int cuStreamIsCapturing(Stream* stream, int* status) {
  return *status = stream->captured ? 1 : 0, no_context() ? kInvalidContext : kSuccess;
}
int cuLaunchHostFunc(Stream* stream, void (*function)(void*), void* data) {
  if (dead) return kIllegalAddress;
  const Queueing call("cuLaunchHostFunc");
  host_functions.enter();
  stream->add([=] {
    function(data);
    host_functions.leave();
  });
  return kSuccess;
}
int cuMemcpyAsync(unsigned long long to, unsigned long long from, std::size_t size, Stream* stream) {
  if (const int refused = refusal(); refused != kSuccess) return refused;
  const Queueing call("cuMemcpyAsync");
  const auto number =
      stream->add([=, target = resolve(to, size), source = resolve(from, size), in_the_open = !is_seqlocked(to, size)] {
        if (in_the_open) std::memcpy(target, source, size);
        else copy_unseen(target, source, size);
      });
  if (is_pageable(to) || is_pageable(from)) stream->wait_for(number);
  return kSuccess;
}

int cuStreamWaitValue64_v2(Stream* stream, unsigned long long address, std::uint64_t value, unsigned) {
  if (const int refused = refusal(); refused != kSuccess) return refused;
  if (options().no_flags) return kNotSupported;
  hands_over = true;
  ++counters.waits_for_flags;
  const Queueing call("cuStreamWaitValue64");
  const Awaited wait{reinterpret_cast<const std::uint64_t*>(address), value};
  std::list<Awaited>::iterator listed;
  {
    std::scoped_lock lock(awaited_mutex);
    listed = awaited.insert(awaited.end(), wait);
  }
  stream->add(
      [=] {
        while (!wait.written() && !dead) look_away();
        std::scoped_lock lock(awaited_mutex);
        awaited.erase(listed);
      },
      true);
  return kSuccess;
}
int cuStreamWriteValue64_v2(Stream* stream, unsigned long long address, std::uint64_t value, unsigned) {
  if (const int refused = refusal(); refused != kSuccess) return refused;
  const Queueing call("cuStreamWriteValue64");
  stream->add([=] {
    flags_written.fetch_add(1, std::memory_order_release);
    std::atomic_ref(*reinterpret_cast<std::uint64_t*>(address)).store(value, std::memory_order_release);
  });
  return kSuccess;
}

int cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
  if (const int refused = refusal(); refused != kSuccess) return refused;
  const Queueing call("cuStreamWaitEvent");
  std::uint64_t until = 0;
  {
    std::scoped_lock lock(event->lock);
    until = event->recorded;
  }
  stream->add(
      [event, until] {
        std::unique_lock held(event->lock);
        event->changed.wait(held, [&] { return event->done >= until; });
      },
      true);
  return kSuccess;
}
int cuMemsetD8Async(unsigned long long to, unsigned char value, std::size_t size, Stream* stream) {
  if (const int refused = refusal(); refused != kSuccess) return refused;
  const Queueing call("cuMemsetD8Async");
  stream->add([=, target = resolve(to, size)] { std::memset(target, value, size); });
  return kSuccess;
}

int cuEventCreate(Event** event, unsigned) {
  check("cuEventCreate");
  return *event = new Event, kSuccess;
}
int cuEventDestroy_v2(Event* event) {
  check("cuEventDestroy");
  static std::mutex lock;
  static std::vector<std::unique_ptr<Event>> destroyed;  // streams may still wait for them
  std::scoped_lock held(lock);
  destroyed.emplace_back(event);
  return kSuccess;
}
int cuEventRecord(Event* event, Stream* stream) {
  if (dead) return kIllegalAddress;
  const Queueing call("cuEventRecord");
  std::uint64_t number = 0;
  {
    std::scoped_lock lock(event->lock);
    number = ++event->recorded;
  }
  stream->add([event, number] {
    std::scoped_lock held(event->lock);
    event->done = number;
    event->changed.notify_all();
  });
  return kSuccess;
}
int cuEventQuery(Event* event) {
  if (dead) return kIllegalAddress;
  if (const int refused = capture_refusal(); refused != kSuccess) return refused;
  check("cuEventQuery");
  std::scoped_lock lock(event->lock);
  return event->done == event->recorded ? kSuccess : kNotReady;
}

}  // extern "C"
