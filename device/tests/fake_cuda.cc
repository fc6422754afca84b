// A CUDA driver made of software, for machines without a GPU: built as a libcuda.so.1 that the seam loads. Its device
// memory is mapped without any right at its device address, so that whoever touches it from the host dies at once; only
// its copies get at the bytes, through a second mapping, on a thread for each stream. Calls without a current context
// fail, as with the real one.
//
// It also stands still where a real one does (as seen on an H100, driver 580): while a thread is in a call that has to
// wait for the device (a copy from or to pageable memory, a stream that is full, a free, a kernel's first launch),
// every call of other threads that queues something waits, too. The real one lets some pass; which, nobody may rely on.
// And it ends the program at what can end in a deadlock there: a call by a thread that hands nothing over while a
// stream waits for a word that the CPU has yet to write ("no driver between hand-over and word" in
// docs/design-notes.md). The thread that serves memory (device/remote.h) may: nobody waits for it.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "device/kernels/reduce.h"
#include "device/kernels/xxh3.h"
#include "device/tests/cuda_language/device/kernels/ptx.h"
#include "device/tests/fake_streams.h"

namespace kernels = rejoin::device::kernels;
using namespace rejoin::device::fake;

#ifdef __SANITIZE_THREAD__
extern "C" void AnnotateIgnoreWritesBegin(const char* file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char* file, int line);
#endif

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidContext = 201, kNotReady = 600;
constexpr int kNotSupported = 801;
constexpr std::size_t kDeviceBytes = std::size_t{4} << 30;

struct Allocation {
  std::size_t size = 0;
  int fd = -1;
  char* bytes = nullptr;
  bool mapped = false;  // by cuMemMap()
};
// Addresses for cuMemMap(), and as many where the bytes can be got at.
struct Reservation {
  std::size_t size = 0;
  char* bytes = nullptr;
};
std::mutex mutex;
std::map<std::uintptr_t, Allocation> allocations;  // by device address
std::map<std::uintptr_t, std::size_t> seqlocked;   // fake_cuda_seqlocked()
std::map<std::uintptr_t, Reservation> reservations;
std::size_t allocated = 0;
bool dma_buf = false;
thread_local std::vector<void*> contexts;

// What holds the address; null: nothing does.
template <typename Of>
const std::pair<const std::uintptr_t, Of>* holder(const std::map<std::uintptr_t, Of>& all, std::uintptr_t address) {
  auto next = all.upper_bound(address);
  if (next == all.begin() || address >= std::prev(next)->first + std::prev(next)->second.size) return nullptr;
  return &*std::prev(next);
}

char* resolve(unsigned long long address, std::size_t size) {
  std::scoped_lock lock(mutex);
  const auto in = [&](const auto& all) {
    const auto* at = holder(all, address);
    return at != nullptr && address + size <= at->first + at->second.size ? at->second.bytes + (address - at->first)
                                                                          : nullptr;
  };
  if (char* bytes = in(reservations)) return bytes;
  if (char* bytes = in(allocations)) return bytes;
  return reinterpret_cast<char*>(address);
}

// Under `mutex`; as the program ends, streams may still be at work.
std::map<Stream*, std::shared_ptr<Stream>>& streams = *new std::map<Stream*, std::shared_ptr<Stream>>;
std::map<std::uintptr_t, std::size_t> pinned;  // the host's memory that is not pageable
std::set<std::string> launched;                // kernels

// For everything that is queued on the device.
void wait_for_device() {
  std::vector<std::shared_ptr<Stream>> all;
  {
    std::scoped_lock lock(mutex);
    for (const auto& [at, stream] : streams) all.push_back(stream);
  }
  for (const auto& stream : all) stream->wait();
}

bool is_pageable(unsigned long long address) {
  std::scoped_lock lock(mutex);
  if (holder(reservations, address) != nullptr || holder(allocations, address) != nullptr) return false;
  auto next = pinned.upper_bound(address);
  return next == pinned.begin() || address >= std::prev(next)->first + std::prev(next)->second;
}

struct Event {
  std::mutex lock;
  std::condition_variable changed;
  std::uint64_t recorded = 0, done = 0;
};

bool no_context() { return contexts.empty(); }

// A warp of a kernel, of one lane: one thread of the CPU, which does what all of a block's would.
struct Warp {
  unsigned count = 1;
  unsigned looks = 0;  // at nothing new

  unsigned lane() const { return 0; }
  unsigned lanes() const { return 1; }
  unsigned workers() const { return count; }
  std::uint64_t now() const { return kernels::ptx::nanoseconds(); }
  void relax(unsigned) { look_away(++looks); }
  std::uint64_t acquire(const std::uint64_t& from) const { return kernels::ptx::acquire_system(from); }
  void release(std::uint64_t& to, std::uint64_t value) const { kernels::ptx::release_system(to, value); }
  std::uint64_t acquire_device(const std::uint64_t& from) const { return kernels::ptx::acquire_device(from); }
  void release_device(std::uint64_t& to, std::uint64_t value) {
    kernels::ptx::release_device(to, value);
    looks = 0;
  }
  std::uint64_t peek(const std::uint64_t& from) const { return kernels::ptx::peek(from); }
  void poke(std::uint64_t& to, std::uint64_t value) const { kernels::ptx::poke(to, value); }
  std::uint64_t claim(std::uint64_t& from) const { return kernels::ptx::claim(from); }
  std::uint64_t add(std::uint64_t& to, std::uint64_t more) const { return kernels::ptx::add(to, more); }
  template <typename T>
  T load(std::uint64_t address) const {
    T value;
    std::memcpy(&value, reinterpret_cast<const void*>(address), sizeof value);
    return value;
  }
  template <typename T>
  void store(std::uint64_t address, T value) const {
    std::memcpy(reinterpret_cast<void*>(address), &value, sizeof value);
  }
  kernels::Work work(const kernels::Work& passed) {
    looks = 0;
    kernels::Work work = passed;
    const std::size_t size = work.type == kernels::Work::kCopy
                                 ? work.count
                                 : work.count * rejoin::size_of(static_cast<rejoin::DataType>(work.type));
    for (auto* address : {&work.out, &work.a, &work.b})
      *address = reinterpret_cast<std::uintptr_t>(resolve(*address, size));
    return work;
  }
  template <typename Element>
  auto value(typename Element::Storage stored) const {
    return Element::load(stored);
  }
  template <typename Element>
  auto stored(typename Element::Value value) const {
    return Element::store(value);
  }
  template <unsigned kCount, typename Body>
  void unrolled(Body body) const {
    for (unsigned i = 0; i < kCount; ++i) body(i);
  }
  void meet() const {}
  std::uint64_t of_first(std::uint64_t value) const { return value; }
  struct Both {
    std::uint64_t one, other;
  };
  Both both(const std::uint64_t& one, const std::uint64_t& other) const { return {acquire(one), acquire(other)}; }
  std::uint32_t most(std::uint32_t value) const { return value; }
  std::uint32_t least(std::uint32_t value) const { return value; }
  template <typename Find>
  std::uint64_t one(Find find) const {
    return find();
  }
  template <typename Tell>
  void tell(Tell tell) const {
    tell();
  }
};

void run_reduce(unsigned blocks, kernels::ReduceArguments arguments) {
  const auto relay = reinterpret_cast<std::uintptr_t>(arguments.relay);
  arguments.relay = reinterpret_cast<kernels::Relay*>(resolve(relay, sizeof(kernels::Relay)));
  std::vector<std::thread> running;
  for (unsigned b = 0; b < blocks; ++b)
    running.emplace_back([=] {
      Warp warp{.count = blocks};
      kernels::serve(warp, arguments);
    });
  Warp warp{.count = blocks};
  kernels::watch(warp, arguments);
  for (auto& thread : running) thread.join();
}

bool is_seqlocked(std::uintptr_t at, std::size_t size) {
  std::scoped_lock lock(mutex);
  auto found = seqlocked.upper_bound(at);
  return found != seqlocked.begin() && at + size <= (--found)->first + found->second;
}
void copy_unseen(void* to, const void* from, std::size_t size) {
#ifdef __SANITIZE_THREAD__
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
  std::memcpy(to, from, size);
#ifdef __SANITIZE_THREAD__
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
#endif
}

void run_digest(const kernels::DigestArguments& arguments) {
  constexpr std::size_t block = kernels::xxh3::kBytes;
  const auto* keys = reinterpret_cast<const kernels::xxh3::Keys*>(
      resolve(arguments.keys, kernels::xxh3::kLanes * sizeof(kernels::xxh3::Keys)));
  auto* hashes = reinterpret_cast<std::uint64_t*>(resolve(arguments.hashes, arguments.items * 8));
  char* tails = resolve(arguments.tails, arguments.count * block);
  for (std::uint64_t i = 0; i < arguments.items; ++i) {
    const std::uint64_t number = kernels::piece_of(arguments, i);
    const auto& piece = arguments.pieces[number];
    const std::size_t before = (i - piece.first) * block;
    const char* data = resolve(piece.data, piece.size) + before;
    if (piece.size - before < block) {
      std::memcpy(tails + number * block, data, piece.size - before);
      continue;
    }
    hashes[i] = kernels::xxh3::hash(
        [&](unsigned offset) {
          kernels::xxh3::Pair pair;
          std::memcpy(&pair, data + offset, sizeof pair);
          return pair;
        },
        keys);
  }
}

}  // namespace

extern "C" {

// For tests: memory that others read while it is written, and look at a version afterwards (a seqlock). What copies
// write there is kept from TSan.
void fake_cuda_seqlocked(const void* at, std::size_t size) {
  std::scoped_lock lock(mutex);
  seqlocked[reinterpret_cast<std::uintptr_t>(at)] = size;
}
// For tests: whether memory can be exported.
void fake_cuda_set_dma_buf(bool supported) { dma_buf = supported; }

int cuInit(unsigned) { return kSuccess; }
int cuGetErrorString(int status, const char** text) {
  *text = status == kOutOfMemory ? "out of memory" : status == kInvalidContext ? "invalid context" : "some error";
  return kSuccess;
}
int cuDeviceGetCount(int* count) { return *count = 1, kSuccess; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ordinal == 0 ? kSuccess : kInvalidValue; }
int cuDeviceGetByPCIBusId(int* device, const char* id) {
  return *device = 0, std::strcmp(id, "0000:00:00.0") == 0 ? kSuccess : kInvalidValue;
}
int cuDeviceGetName(char* name, int size, int) {
  std::strncpy(name, "GPU of software", static_cast<std::size_t>(size));
  return kSuccess;
}
int cuDeviceGetPCIBusId(char* id, int size, int) {
  std::strncpy(id, "0000:00:00.0", static_cast<std::size_t>(size));
  return kSuccess;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  // Dma-bufs; flushes of NICs' writes; streams that wait for words of 64 bits.
  const bool can = (attribute == 124 && dma_buf) || attribute == 117 || attribute == 122;
  *value = can ? 1 : 0;
  return kSuccess;
}
int cuDevicePrimaryCtxRetain(void** context, int) {
  static int primary;
  *context = &primary;
  return kSuccess;
}
int cuDevicePrimaryCtxRelease_v2(int) { return kSuccess; }
int cuCtxPushCurrent_v2(void* context) { return contexts.push_back(context), kSuccess; }
int cuCtxPopCurrent_v2(void** context) {
  if (no_context()) return kInvalidContext;
  *context = contexts.back();
  contexts.pop_back();
  return kSuccess;
}

namespace {
// Maps a file of this size as memory of the device.
bool add(Allocation made, unsigned long long* address) {
  const std::size_t mapped = rejoin::round_up(made.size, 4096);
  void* device = ::mmap(nullptr, mapped, PROT_NONE, MAP_SHARED, made.fd, 0);
  void* bytes = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, made.fd, 0);
  if (device == MAP_FAILED || bytes == MAP_FAILED) return false;
  made.bytes = static_cast<char*>(bytes);
  *address = reinterpret_cast<std::uintptr_t>(device);
  allocations[*address] = made;
  return true;
}
bool take(unsigned long long address, std::size_t* size) {
  auto found = allocations.find(address);
  if (found == allocations.end() || found->second.mapped) return false;
  const auto& gone = found->second;
  const std::size_t mapped = rejoin::round_up(gone.size, 4096);
  ::munmap(reinterpret_cast<void*>(address), mapped);
  ::munmap(gone.bytes, mapped);
  ::close(gone.fd);
  *size = gone.size;
  allocations.erase(found);
  return true;
}
}  // namespace

int cuMemAlloc_v2(unsigned long long* address, std::size_t size) {
  check("cuMemAlloc");
  if (no_context()) return kInvalidContext;
  std::scoped_lock lock(mutex);
  if (size == 0) return kInvalidValue;
  if (allocated + size > kDeviceBytes) return kOutOfMemory;
  const int fd = ::memfd_create("fake device memory", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(rejoin::round_up(size, 4096))) != 0) return kOutOfMemory;
  if (!add({.size = size, .fd = fd}, address)) return kOutOfMemory;
  allocated += size;
  return kSuccess;
}

int cuMemFree_v2(unsigned long long address) {
  if (no_context()) return kInvalidContext;
  const Queueing call("cuMemFree");
  wait_for_device();
  std::scoped_lock lock(mutex);
  std::size_t size = 0;
  if (!take(address, &size)) return kInvalidValue;
  allocated -= size;
  return kSuccess;
}

int cuMemGetAddressRange_v2(unsigned long long* base, std::size_t* size, unsigned long long address) {
  check("cuMemGetAddressRange");
  if (no_context()) return kInvalidContext;
  std::scoped_lock lock(mutex);
  const auto* at = holder(allocations, address);
  if (at == nullptr) return kInvalidValue;
  return *base = at->first, *size = at->second.size, kSuccess;
}
int cuPointerGetAttribute(void* value, int attribute, unsigned long long address) {
  std::scoped_lock lock(mutex);
  if (no_context() || attribute != 9 || holder(allocations, address) == nullptr) return kInvalidValue;
  return *static_cast<int*>(value) = 0, kSuccess;
}

// Memory that is mapped by hand: the handle is a descriptor, of a memfd.
int cuMemGetAllocationGranularity(std::size_t* granularity, const void*, int) {
  check("cuMemGetAllocationGranularity");
  return *granularity = 65536, no_context() ? kInvalidContext : kSuccess;
}
int cuMemCreate(unsigned long long* handle, std::size_t size, const void*, unsigned long long) {
  check("cuMemCreate");
  if (no_context()) return kInvalidContext;
  if (size == 0 || size % 65536 != 0) return kInvalidValue;
  const int fd = ::memfd_create("fake device memory", MFD_CLOEXEC);
  if (fd < 0 || size > kDeviceBytes || ::ftruncate(fd, static_cast<off_t>(size)) != 0) return kOutOfMemory;
  return *handle = static_cast<unsigned>(fd), kSuccess;
}
int cuMemRelease(unsigned long long handle) { return ::close(static_cast<int>(handle)), kSuccess; }
int cuMemAddressReserve(unsigned long long* address, std::size_t size, std::size_t, unsigned long long,
                        unsigned long long) {
  if (size == 0 || size % 65536 != 0) return kInvalidValue;
  void* reserved = ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  void* bytes = ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reserved == MAP_FAILED || bytes == MAP_FAILED) return kOutOfMemory;
  std::scoped_lock lock(mutex);
  *address = reinterpret_cast<std::uintptr_t>(reserved);
  reservations[*address] = {.size = size, .bytes = static_cast<char*>(bytes)};
  return kSuccess;
}
int cuMemAddressFree(unsigned long long address, std::size_t size) {
  std::scoped_lock lock(mutex);
  auto found = reservations.extract(address);
  if (found.empty() || found.mapped().size != size) return kInvalidValue;
  ::munmap(found.mapped().bytes, size);
  return ::munmap(reinterpret_cast<void*>(address), size), kSuccess;
}
int cuMemMap(unsigned long long address, std::size_t size, std::size_t offset, unsigned long long handle,
             unsigned long long) {
  const int fd = ::dup(static_cast<int>(handle));
  std::scoped_lock lock(mutex);
  const auto* at = holder(reservations, address);
  if (at == nullptr || address + size > at->first + at->second.size || size == 0 || size % 65536 != 0 || offset != 0 ||
      ::lseek(fd, 0, SEEK_END) < static_cast<off_t>(size))
    return ::close(fd), kInvalidValue;
  char* bytes = at->second.bytes + (address - at->first);
  if (::mmap(bytes, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
    return ::close(fd), kOutOfMemory;
  allocations[address] = {.size = size, .fd = fd, .bytes = bytes, .mapped = true};
  return kSuccess;
}
int cuMemSetAccess(unsigned long long, std::size_t, const void*, std::size_t) { return kSuccess; }
int cuMemUnmap(unsigned long long address, std::size_t size) {
  std::scoped_lock lock(mutex);
  auto found = allocations.find(address);
  if (found == allocations.end() || !found->second.mapped || found->second.size != size) return kInvalidValue;
  ::mmap(found->second.bytes, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  ::close(found->second.fd);
  allocations.erase(found);
  return kSuccess;
}
int cuMemRetainAllocationHandle(unsigned long long* handle, void* address) {
  check("cuMemRetainAllocationHandle");
  if (no_context()) return kInvalidContext;
  std::scoped_lock lock(mutex);
  const auto* at = holder(allocations, reinterpret_cast<std::uintptr_t>(address));
  if (at == nullptr || !at->second.mapped) return kInvalidValue;
  return *handle = static_cast<unsigned>(::dup(at->second.fd)), kSuccess;
}

int cuMemHostAlloc(void** address, std::size_t size, unsigned) {
  if (no_context()) return kInvalidContext;
  check("cuMemHostAlloc");
  *address = ::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  if (*address == nullptr) return kOutOfMemory;
  std::scoped_lock lock(mutex);
  pinned[reinterpret_cast<std::uintptr_t>(*address)] = size;
  return kSuccess;
}
int cuMemFreeHost(void* address) {
  if (no_context()) return kInvalidContext;
  const Queueing call("cuMemFreeHost");
  wait_for_device();
  std::scoped_lock lock(mutex);
  pinned.erase(reinterpret_cast<std::uintptr_t>(address));
  ::free(address);
  return kSuccess;
}

// The host's memory, by whole pages.
int cuMemHostRegister_v2(void* address, std::size_t size, unsigned) {
  check("cuMemHostRegister");
  if (no_context()) return kInvalidContext;
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  if (at % 4096 != 0 || size == 0) return kInvalidValue;
  std::scoped_lock lock(mutex);
  return pinned.emplace(at, size).second ? kSuccess : kInvalidValue;
}
int cuMemHostUnregister(void* address) {
  if (no_context()) return kInvalidContext;
  const Queueing call("cuMemHostUnregister");
  wait_for_device();
  std::scoped_lock lock(mutex);
  return pinned.erase(reinterpret_cast<std::uintptr_t>(address)) == 1 ? kSuccess : kInvalidValue;
}
int cuMemHostGetDevicePointer_v2(unsigned long long* device, void* address, unsigned) {
  return *device = reinterpret_cast<std::uintptr_t>(address), kSuccess;
}

int cuStreamCreateWithPriority(Stream** stream, unsigned, int) {
  if (no_context()) return kInvalidContext;
  check("cuStreamCreateWithPriority");
  std::scoped_lock lock(mutex);
  auto made = std::make_shared<Stream>(next_hardware_queue());
  *stream = made.get();
  streams[made.get()] = std::move(made);
  return kSuccess;
}
int cuStreamDestroy_v2(Stream* stream) {
  std::shared_ptr<Stream> gone;
  std::scoped_lock lock(mutex);
  gone = std::move(streams.extract(stream).mapped());
  return kSuccess;
}
int cuStreamQuery(Stream* stream) {
  check("cuStreamQuery");
  std::scoped_lock lock(stream->lock);
  return stream->done == stream->queued ? kSuccess : kNotReady;
}
int cuStreamSynchronize(Stream* stream) {
  check("cuStreamSynchronize");
  stream->wait();
  return kSuccess;
}
int cuLaunchHostFunc(Stream* stream, void (*function)(void*), void* data) {
  const Queueing call("cuLaunchHostFunc");
  stream->add([=] { function(data); });
  return kSuccess;
}
int cuMemcpyAsync(unsigned long long to, unsigned long long from, std::size_t size, Stream* stream) {
  if (no_context()) return kInvalidContext;
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
  if (no_context()) return kInvalidContext;
  hands_over = true;
  const Queueing call("cuStreamWaitValue64");
  const Awaited wait{reinterpret_cast<const std::uint64_t*>(address), value};
  std::list<Awaited>::iterator listed;
  {
    std::scoped_lock lock(awaited_mutex);
    listed = awaited.insert(awaited.end(), wait);
  }
  stream->add(
      [=] {
        while (!wait.written()) look_away();
        std::scoped_lock lock(awaited_mutex);
        awaited.erase(listed);
      },
      true);
  return kSuccess;
}
int cuStreamWriteValue64_v2(Stream* stream, unsigned long long address, std::uint64_t value, unsigned) {
  if (no_context()) return kInvalidContext;
  const Queueing call("cuStreamWriteValue64");
  stream->add([=] {
    words_written.fetch_add(1, std::memory_order_release);
    std::atomic_ref(*reinterpret_cast<std::uint64_t*>(address)).store(value, std::memory_order_release);
  });
  return kSuccess;
}
int cuFlushGPUDirectRDMAWrites(int, int) {
  check("cuFlushGPUDirectRDMAWrites");
  return no_context() ? kInvalidContext : kSuccess;
}

int cuModuleLoadData(void** module, const void* image) {
  static int loaded;
  if (no_context() || image == nullptr) return kInvalidContext;
  *module = &loaded;
  return kSuccess;
}
int cuModuleUnload(void*) { return no_context() ? kInvalidContext : kSuccess; }
int cuModuleGetFunction(const char** function, void*, const char* name) {
  *function = std::strcmp(name, "rejoin_reduce") == 0 ? "reduce" : "digest";
  return kSuccess;
}
int cuLaunchKernel(const char* function, unsigned blocks, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   Stream* stream, void** arguments, void**) {
  if (no_context()) return kInvalidContext;
  const Queueing call("cuLaunchKernel");
  bool first = false;
  {
    std::scoped_lock lock(mutex);
    first = launched.insert(function).second;
  }
  if (first) wait_for_device();  // it is loaded only now
  if (std::strcmp(function, "reduce") == 0)
    stream->add([=, given = *static_cast<kernels::ReduceArguments*>(arguments[0])] { run_reduce(blocks, given); });
  else stream->add([given = *static_cast<kernels::DigestArguments*>(arguments[0])] { run_digest(given); });
  return kSuccess;
}

int cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
  if (no_context()) return kInvalidContext;
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
  if (no_context()) return kInvalidContext;
  const Queueing call("cuMemsetD8Async");
  stream->add([=, target = resolve(to, size)] { std::memset(target, value, size); });
  return kSuccess;
}

int cuEventCreate(Event** event, unsigned) { return *event = new Event, kSuccess; }
int cuEventDestroy_v2(Event* event) {
  static std::mutex lock;
  static std::vector<std::unique_ptr<Event>> destroyed;  // streams may still wait for them
  std::scoped_lock held(lock);
  destroyed.emplace_back(event);
  return kSuccess;
}
int cuEventRecord(Event* event, Stream* stream) {
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
  check("cuEventQuery");
  std::scoped_lock lock(event->lock);
  return event->done == event->recorded ? kSuccess : kNotReady;
}

int cuMemGetHandleForAddressRange(void* handle, unsigned long long address, std::size_t size, int type,
                                  unsigned long long) {
  check("cuMemGetHandleForAddressRange");
  if (no_context()) return kInvalidContext;
  if (!dma_buf || type != 1) return kNotSupported;
  if (address % 4096 != 0 || size % 4096 != 0) return kInvalidValue;
  std::scoped_lock lock(mutex);
  const auto* at = holder(allocations, address);
  if (at == nullptr || address + size > at->first + rejoin::round_up(at->second.size, 4096)) return kInvalidValue;
  // The real one exports the range; a memfd can only be had from its start on.
  if (address != at->first) return kNotSupported;
  *static_cast<int*>(handle) = ::dup(at->second.fd);
  return kSuccess;
}

}  // extern "C"
