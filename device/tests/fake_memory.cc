// The software driver's memory: the device's, and the host's that is pinned.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <map>

#include "base/bytes.h"
#include "device/tests/fake_driver.h"

namespace rejoin::device::fake {

namespace {

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
// Under `mutex`.
std::map<std::uintptr_t, Allocation> allocations;  // by device address
std::map<std::uintptr_t, std::size_t> seqlocked;   // fake_cuda_seqlocked()
std::map<std::uintptr_t, Reservation> reservations;
std::size_t allocated = 0;
std::map<std::uintptr_t, std::size_t> pinned;  // the host's memory that is not pageable

// What holds the address; null: nothing does.
template <typename Of>
const std::pair<const std::uintptr_t, Of>* holder(const std::map<std::uintptr_t, Of>& all, std::uintptr_t address) {
  auto next = all.upper_bound(address);
  if (next == all.begin() || address >= std::prev(next)->first + std::prev(next)->second.size) return nullptr;
  return &*std::prev(next);
}

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

bool is_pageable(unsigned long long address) {
  std::scoped_lock lock(mutex);
  if (holder(reservations, address) != nullptr || holder(allocations, address) != nullptr) return false;
  auto next = pinned.upper_bound(address);
  return next == pinned.begin() || address >= std::prev(next)->first + std::prev(next)->second;
}

bool is_seqlocked(std::uintptr_t at, std::size_t size) {
  std::scoped_lock lock(mutex);
  auto found = seqlocked.upper_bound(at);
  return found != seqlocked.begin() && at + size <= (--found)->first + found->second;
}

}  // namespace rejoin::device::fake

using namespace rejoin::device::fake;

extern "C" {

// For tests: memory that others read while it is written, and look at a version afterwards (a seqlock). What copies
// write there is kept from TSan.
void fake_cuda_seqlocked(const void* at, std::size_t size) {
  std::scoped_lock lock(mutex);
  seqlocked[reinterpret_cast<std::uintptr_t>(at)] = size;
}
// For tests: whether memory can be exported.
void fake_cuda_set_dma_buf(bool supported) { dma_buf = supported; }

int cuMemAlloc_v2(unsigned long long* address, std::size_t size) {
  check("cuMemAlloc");
  if (const int refused = refusal(); refused != kSuccess) return refused;
  if (const int refused = capture_refusal(); refused != kSuccess) return refused;
  if (options().full) return kOutOfMemory;
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
  check("cuPointerGetAttribute");
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
  if (const int refused = refusal(); refused != kSuccess) return refused;
  if (size == 0 || size % 65536 != 0) return kInvalidValue;
  const int fd = ::memfd_create("fake device memory", MFD_CLOEXEC);
  if (fd < 0 || size > kDeviceBytes || ::ftruncate(fd, static_cast<off_t>(size)) != 0) return kOutOfMemory;
  return *handle = static_cast<unsigned>(fd), kSuccess;
}
int cuMemRelease(unsigned long long handle) {
  check("cuMemRelease");
  return ::close(static_cast<int>(handle)), kSuccess;
}
int cuMemAddressReserve(unsigned long long* address, std::size_t size, std::size_t, unsigned long long,
                        unsigned long long) {
  check("cuMemAddressReserve");
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
  check("cuMemAddressFree");
  std::scoped_lock lock(mutex);
  auto found = reservations.extract(address);
  if (found.empty() || found.mapped().size != size) return kInvalidValue;
  ::munmap(found.mapped().bytes, size);
  return ::munmap(reinterpret_cast<void*>(address), size), kSuccess;
}
int cuMemMap(unsigned long long address, std::size_t size, std::size_t offset, unsigned long long handle,
             unsigned long long) {
  check("cuMemMap");
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
int cuMemSetAccess(unsigned long long, std::size_t, const void*, std::size_t) {
  check("cuMemSetAccess");
  return kSuccess;
}
int cuMemUnmap(unsigned long long address, std::size_t size) {
  check("cuMemUnmap");
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
  if (const int refused = refusal(); refused != kSuccess) return refused;
  if (const int refused = capture_refusal(); refused != kSuccess) return refused;
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
  if (const int refused = refusal(); refused != kSuccess) return refused;
  if (const int refused = capture_refusal(); refused != kSuccess) return refused;
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
  check("cuMemHostGetDevicePointer");
  return *device = reinterpret_cast<std::uintptr_t>(address), kSuccess;
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
