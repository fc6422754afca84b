// What the parts of the software driver (fake_cuda.cc) share.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "device/tests/fake_streams.h"

namespace rejoin::device::fake {

constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidContext = 201, kNotReady = 600;
constexpr int kDeviceUnavailable = 46, kIllegalAddress = 700, kNotSupported = 801;

inline std::mutex mutex;  // of what the driver knows: its memory, its streams, its kernels
inline bool dma_buf = false;
inline thread_local std::vector<void*> contexts;
inline bool no_context() { return contexts.empty(); }
// Of a call that works with the context: why it can't; 0: it can.
inline int refusal() { return no_context() ? kInvalidContext : dead ? kIllegalAddress : kSuccess; }

// Captures of graphs in the mode that is the default: meanwhile no thread whose own mode is the default, too, may make
// a call that could be unsafe. It is refused, and the captures are spoilt.
constexpr int kCaptureUnsupported = 900;
inline std::atomic<int> captures{0};
inline std::atomic<bool> captures_spoilt{false};
inline thread_local int capture_mode = 0;
inline int capture_refusal() {
  if (captures == 0 || capture_mode != 0) return kSuccess;
  captures_spoilt = true;
  return kCaptureUnsupported;
}

// ---- memory

// Where a device address' bytes can be got at; any other is the host's.
char* resolve(unsigned long long address, std::size_t size);
bool is_pageable(unsigned long long address);
bool is_seqlocked(std::uintptr_t at, std::size_t size);

// ---- streams

// For everything that is queued on the device.
void wait_for_device();

}  // namespace rejoin::device::fake
