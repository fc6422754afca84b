// A CUDA driver made of software, for machines without a GPU: built as a libcuda.so.1 that the seam loads. Its device
// memory is mapped without any right at its device address, so that whoever touches it from the host dies at once; only
// its copies get at the bytes, through a second mapping, on a thread for each stream. Calls without a current context
// fail, as with the real one.
//
// It also stands still where a real one does (as seen on an H100, driver 580): while a thread is in a call that has to
// wait for the device (a copy from or to pageable memory, a stream that is full, many host functions, a free, a
// kernel's first launch),
// every call of other threads that queues something waits, too. The real one lets some pass; which, nobody may rely on.
// And it ends the program, or counts (fake_control.h), at what can end in a deadlock there: a call by a thread that
// hands nothing over while a stream waits for a flag that the CPU has yet to write ("no driver between hand-over and
// flag" in docs/design-notes.md). Who serves memory (device/remote.h) or audits may call, since nobody waits for them,
// but never what waits for the whole device, since all others wait then.
//
// Here: the device, contexts, modules and launches. fake_memory.cc: memory. fake_streams.h, .cc: streams and events.
// fake_check.h: what is refused. fake_kernels.cc: what kernels do.
#include <cstring>
#include <optional>
#include <set>
#include <sstream>
#include <string>

#include "device/tests/fake_driver.h"
#include "device/tests/fake_kernels.h"

namespace kernels = rejoin::device::kernels;
using namespace rejoin::device::fake;

namespace {

// Under `mutex`.
std::set<std::string> launched;  // kernels
std::optional<Options> chosen;

Options options_of_environment() {
  Options options;
  options.blocking = launches_block();
  const char* said = options_said();
  std::istringstream words(said == nullptr ? "" : said);
  for (std::string word; words >> word;) {
    const auto equals = word.find('=');
    const std::string name = word.substr(0, equals);
    const unsigned value = equals == word.npos ? 1 : std::strtoul(word.c_str() + equals + 1, nullptr, 10);
    if (name == "unordered") options.unordered = true;
    else if (name == "ordered") options.ordered = true;
    else if (name == "no_flags") options.no_flags = true;
    else if (name == "exclusive") options.exclusive = true;
    else if (name == "no_launch") options.no_launch = true;
    else if (name == "slow_digest") options.slow_digest = std::chrono::milliseconds(value);
    else std::fprintf(stderr, "fake CUDA driver: REJOIN_FAKE_CUDA has no '%s'\n", name.c_str()), std::abort();
  }
  return options;
}

void stand_if_wanted() {
  const auto time = options().slow_digest;
  static std::atomic<bool> stood = false;
  if (time.count() == 0 || hands_over || is_called("rejoin-memory") || counters.waits_for_flags == 0 ||
      stood.exchange(true))
    return;
  std::fprintf(stderr, "fake CUDA driver: a digest stands for %lld ms\n", static_cast<long long>(time.count()));
  stand(time);
  std::fprintf(stderr, "fake CUDA driver: the digest goes on\n");
}

}  // namespace

Options rejoin::device::fake::options() {
  std::scoped_lock lock(mutex);
  if (!chosen) chosen = options_of_environment();
  return *chosen;
}

extern "C" {

Counters& fake_cuda_counters() { return counters; }
void fake_cuda_set_hook(Hook given) { hook = given; }
void fake_cuda_count_only(bool only) { counts_only = only; }
void fake_cuda_set_options(Options given) {
  std::scoped_lock lock(mutex);
  chosen = given;
  dead = given.dead;
}
void fake_cuda_hands_over() { hands_over = true; }
void fake_cuda_forget_kernels() {
  std::scoped_lock lock(mutex);
  launched.clear();
}

int cuInit(unsigned) { return kSuccess; }
int cuGetErrorString(int status, const char** text) {
  *text = status == kOutOfMemory      ? "out of memory"
          : status == kInvalidContext ? "invalid context"
          : status == kIllegalAddress ? "an illegal memory access was encountered"
                                      : "some error";
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
  const Options now = options();
  *value = 0;
  switch (attribute) {
    case 16: *value = static_cast<int>(now.multiprocessors); break;
    case 20: *value = now.exclusive ? 3 : 0; break;   // the compute mode
    case 117: *value = now.unordered ? 0 : 1; break;  // flushes of NICs' writes
    case 118: *value = now.ordered ? 100 : 0; break;  // … which it needs for none of its owner's
    case 122: *value = now.no_flags ? 0 : 1; break;   // streams that wait for flags of 64 bits
    case 124: *value = dma_buf ? 1 : 0; break;
    default: break;
  }
  return kSuccess;
}
int cuDevicePrimaryCtxRetain(void** context, int) {
  check("cuDevicePrimaryCtxRetain");
  if (options().exclusive) return kDeviceUnavailable;
  static int primary;
  *context = &primary;
  return kSuccess;
}
int cuDevicePrimaryCtxRelease_v2(int) {
  check("cuDevicePrimaryCtxRelease");
  return kSuccess;
}
int cuCtxPushCurrent_v2(void* context) { return contexts.push_back(context), kSuccess; }
int cuCtxPopCurrent_v2(void** context) {
  if (no_context()) return kInvalidContext;
  *context = contexts.back();
  contexts.pop_back();
  return kSuccess;
}

int cuCtxSynchronize() {
  if (const int refused = refusal(); refused != kSuccess) return refused;
  if (captures > 0) return captures_spoilt = true, kCaptureUnsupported;  // whatever the thread's mode
  const Queueing call("cuCtxSynchronize");
  wait_for_device();
  return dead ? kIllegalAddress : kSuccess;
}

int cuFlushGPUDirectRDMAWrites(int, int) {
  check("cuFlushGPUDirectRDMAWrites");
  return no_context() ? kInvalidContext : kSuccess;
}

int cuModuleLoadData(void** module, const void* image) {
  check("cuModuleLoadData");
  static int loaded;
  if (no_context() || image == nullptr) return kInvalidContext;
  *module = &loaded;
  return kSuccess;
}
int cuModuleUnload(void*) {
  check("cuModuleUnload");
  return no_context() ? kInvalidContext : kSuccess;
}
int cuModuleGetFunction(const char** function, void*, const char* name) {
  check("cuModuleGetFunction");
  for (const char* known : {"rejoin_reduce", "rejoin_code", "rejoin_digest"})
    if (std::strcmp(name, known) == 0) return *function = known, kSuccess;
  return kInvalidValue;
}
int cuLaunchKernel(const char* function, unsigned blocks, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   Stream* stream, void** arguments, void**) {
  if (const int refused = refusal(); refused != kSuccess) return refused;
  if (options().no_launch) return kNotSupported;
  std::optional<Queueing> call(std::in_place, "cuLaunchKernel");
  bool first = false;
  {
    std::scoped_lock lock(mutex);
    first = launched.insert(function).second;
  }
  if (first) wait_for_device();  // it is loaded only now
  const std::string_view kernel = function;
  std::uint64_t number = 0;
  if (kernel == "rejoin_digest") {
    stand_if_wanted();
    number = stream->add([given = *static_cast<kernels::DigestArguments*>(arguments[0])] { run_digest(given); });
  } else {
    const auto run = kernel == "rejoin_code" ? run_code : run_reduce;
    number = stream->add([=, given = *static_cast<kernels::ReduceArguments*>(arguments[0])] { run(blocks, given); });
  }
  call.reset();
  if (options().blocking) stream->wait_for(number);
  return kSuccess;
}

}  // extern "C"
