// The CUDA device's primary context, which its streams and its memory hold.
#pragma once

#include <map>
#include <mutex>

#include "base/fail.h"
#include "device/cuda_driver.h"
#include "device/device.h"
#include "device/kernels/image.h"

namespace rejoin::device {

inline cuda::DevicePointer pointer(const void* address) { return reinterpret_cast<cuda::DevicePointer>(address); }

// The device's primary context, for as long as anything of it is held, and the kernels in it.
struct Primary {
  std::shared_ptr<const cuda::Driver> driver;
  cuda::Ordinal device = 0;
  cuda::Context context = nullptr;
  mutable std::once_flag kernels_loaded;
  mutable cuda::Module module = nullptr;
  mutable std::map<Kernel, cuda::Function> kernels;
  mutable Result<> loaded;
  Primary(std::shared_ptr<const cuda::Driver> d, cuda::Ordinal o) : driver(std::move(d)), device(o) {}
  Primary(const Primary&) = delete;
  ~Primary() {
    if (module != nullptr && driver->push_context(context) == cuda::kSuccess) {
      (void)driver->module_unload(module);  // nobody is left to tell
      cuda::Context popped = nullptr;
      (void)driver->pop_context(&popped);
    }
    if (context != nullptr) (void)driver->release_context(device);  // likewise
  }
  // With the context current. The first use loads them.
  Result<cuda::Function> kernel(Kernel which) const {
    std::call_once(kernels_loaded, [this] {
      loaded = driver->check(driver->module_load(&module, kernels::image().data()), "loading the kernels");
      if (!loaded && !kernels::built())
        loaded = fail(ErrorCode::unavailable,
                      "this build has no GPU kernels: no nvcc was found when it was configured; install the CUDA "
                      "toolkit (12 or later) and build again");
      for (const auto& [id, name] : {std::pair{Kernel::reduce, "rejoin_reduce"},
                                     {Kernel::code, "rejoin_code"},
                                     {Kernel::digest, "rejoin_digest"}})
        if (loaded) loaded = driver->check(driver->module_function(&kernels[id], module, name), "finding a kernel");
    });
    if (!loaded) return tl::unexpected(loaded.error());
    return kernels[which];
  }
};

// The calling thread's context, while this lives. The trainer may be capturing a graph meanwhile, on any thread: what
// is called here is no part of that, and the driver would otherwise refuse it and spoil the graph.
class Current {
 public:
  explicit Current(const Primary& primary)
      : driver_(*primary.driver), pushed_(driver_.push_context(primary.context) == cuda::kSuccess) {
    exchanged_ = driver_.exchange_capture_mode(&capture_mode_) == cuda::kSuccess;
  }
  Current(const Current&) = delete;
  ~Current() {
    if (exchanged_) (void)driver_.exchange_capture_mode(&capture_mode_);
    cuda::Context popped = nullptr;
    if (pushed_) (void)driver_.pop_context(&popped);
  }

 private:
  const cuda::Driver& driver_;
  bool pushed_;  // if not, the call that follows says why
  bool exchanged_ = false;
  int capture_mode_ = cuda::kCaptureRelaxed;  // from then on the thread's own
};

// cuda_access.cc.
Result<std::unique_ptr<Access>> make_cuda_access(Device& device, Priority priority);

// `owned`: ended with this; else somebody else's. cuda_stream.cc.
std::unique_ptr<Stream> make_cuda_stream(std::shared_ptr<const Primary> primary, cuda::StreamHandle stream, bool owned);

}  // namespace rejoin::device
