// A CUDA driver made of software, for machines without a GPU: built as a libcuda.so.1 that the seam loads. Its device
// memory is mapped without any right at its device address, so that whoever touches it from the host dies at once; only
// its copies get at the bytes, through a second mapping, on a thread for each stream. Calls without a current context
// fail, as with the real one.
//
// It also stands still where a real one does (as seen on an H100, driver 580): while a thread is in a call that has to
// wait for the device (a copy from or to pageable memory, a stream that is full, a free, a kernel's first launch),
// every call of other threads that queues something waits, too. The real one lets some pass; which, nobody may rely on.
// And it ends the program at what can end in a deadlock there: a call by a thread that hands nothing over while a
// stream waits for a flag that the CPU has yet to write ("no driver between hand-over and flag" in
// docs/design-notes.md). The thread that serves memory (device/remote.h) may: nobody waits for it.
//
// Here: the device, contexts, modules and launches. fake_memory.cc: memory. fake_streams.h, .cc: streams and events.
// fake_kernels.cc: what kernels do.
#include <cstring>
#include <set>
#include <string>

#include "device/tests/fake_driver.h"
#include "device/tests/fake_kernels.h"

namespace kernels = rejoin::device::kernels;
using namespace rejoin::device::fake;

namespace {

std::set<std::string> launched;  // kernels; under `mutex`

}  // namespace

extern "C" {

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
  // Dma-bufs; flushes of NICs' writes; streams that wait for flags of 64 bits.
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

}  // extern "C"
