// CUDA's driver behind the seam.
#include <unistd.h>

#include <deque>
#include <map>
#include <mutex>

#include "device/cuda_driver.h"
#include "device/device.h"
#include "device/kernels/image.h"

namespace rejoin::device {

namespace {

using cuda::Driver;

cuda::DevicePointer pointer(const void* address) { return reinterpret_cast<cuda::DevicePointer>(address); }

// The device's primary context, for as long as anything of it is held, and the kernels in it.
struct Primary {
  std::shared_ptr<const Driver> driver;
  cuda::Ordinal device = 0;
  cuda::Context context = nullptr;
  mutable std::once_flag kernels_loaded;
  mutable cuda::Module module = nullptr;
  mutable std::map<Kernel, cuda::Function> kernels;
  mutable Result<> loaded;
  Primary(std::shared_ptr<const Driver> d, cuda::Ordinal o) : driver(std::move(d)), device(o) {}
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
      for (const auto& [id, name] : {std::pair{Kernel::reduce, "rejoin_reduce"}, {Kernel::digest, "rejoin_digest"}})
        if (loaded) loaded = driver->check(driver->module_function(&kernels[id], module, name), "finding a kernel");
    });
    if (!loaded) return tl::unexpected(loaded.error());
    return kernels[which];
  }
};

// The calling thread's context, while this lives.
class Current {
 public:
  explicit Current(const Primary& primary)
      : driver_(*primary.driver), pushed_(driver_.push_context(primary.context) == cuda::kSuccess) {}
  Current(const Current&) = delete;
  ~Current() {
    cuda::Context popped = nullptr;
    if (pushed_) (void)driver_.pop_context(&popped);
  }

 private:
  const Driver& driver_;
  bool pushed_;  // if not, the call that follows says why
};

class CudaStream final : public Stream {
 public:
  CudaStream(std::shared_ptr<const Primary> primary, cuda::StreamHandle stream, bool owned)
      : primary_(std::move(primary)), driver_(*primary_->driver), stream_(stream), owned_(owned) {}
  ~CudaStream() override {
    Current current(*primary_);
    if (owned_) (void)driver_.stream_synchronize(stream_);  // an error has been told by the calls before
    for (const auto& mark : marks_) (void)driver_.event_destroy(mark.event);
    for (auto* event : spare_) (void)driver_.event_destroy(event);
    if (owned_) (void)driver_.stream_destroy(stream_);
  }

  Result<> copy(std::byte* to, const std::byte* from, std::size_t size) override {
    Current current(*primary_);
    return driver_.check(driver_.copy(pointer(to), pointer(from), size, stream_), "copying on a CUDA stream");
  }

  Result<> launch(Kernel which, Grid grid, const void* arguments) override {
    Current current(*primary_);
    const auto kernel = primary_->kernel(which);
    if (!kernel) return tl::unexpected(kernel.error());
    void* list[] = {const_cast<void*>(arguments)};  // the driver copies what it points to
    return driver_.check(driver_.launch(*kernel, grid.blocks, 1, 1, grid.threads, 1, 1, 0, stream_, list, nullptr),
                         "launching a kernel");
  }

  Result<> wait_until(const std::uint64_t* word, std::uint64_t value) override {
    Current current(*primary_);
    return driver_.check(driver_.stream_wait_value(stream_, pointer(word), value, cuda::kWaitGreaterOrEqual),
                         "letting a CUDA stream wait");
  }

  Result<std::uint64_t> mark() override {
    Current current(*primary_);
    cuda::EventHandle event = nullptr;
    if (!spare_.empty()) {
      event = spare_.back();
      spare_.pop_back();
    } else if (auto made = driver_.check(driver_.event_create(&event, cuda::kEventNoTiming), "making a CUDA event");
               !made) {
      return tl::unexpected(made.error());
    }
    marks_.push_back({++last_, event});
    if (auto recorded = driver_.check(driver_.event_record(event, stream_), "recording a CUDA event"); !recorded)
      return tl::unexpected(recorded.error());
    return last_;
  }

  Result<std::uint64_t> reached() override {
    if (marks_.empty()) return last_;
    Current current(*primary_);
    while (!marks_.empty()) {
      const auto status = driver_.event_query(marks_.front().event);
      if (status == cuda::kNotReady) break;
      if (auto asked = driver_.check(status, "work on a CUDA stream"); !asked) return tl::unexpected(asked.error());
      spare_.push_back(marks_.front().event);
      marks_.pop_front();
    }
    return marks_.empty() ? last_ : marks_.front().number - 1;
  }

  Result<> signal(const Fd& eventfd) override {
    Current current(*primary_);
    const auto raise = [](void* fd) {
      const std::uint64_t one = 1;
      (void)!::write(static_cast<int>(reinterpret_cast<std::intptr_t>(fd)), &one, sizeof one);  // full is signalled too
    };
    return driver_.check(
        driver_.launch_host(stream_, raise, reinterpret_cast<void*>(static_cast<std::intptr_t>(eventfd.get()))),
        "a CUDA stream's host function");
  }

  Result<> synchronize() override {
    Current current(*primary_);
    return driver_.check(driver_.stream_synchronize(stream_), "work on a CUDA stream");
  }

 private:
  struct Mark {
    std::uint64_t number = 0;
    cuda::EventHandle event = nullptr;
  };
  std::shared_ptr<const Primary> primary_;
  const Driver& driver_;
  cuda::StreamHandle stream_;
  const bool owned_;
  std::uint64_t last_ = 0;
  std::deque<Mark> marks_;
  std::vector<cuda::EventHandle> spare_;
};

class CudaDevice final : public Device {
 public:
  CudaDevice(std::shared_ptr<const Primary> primary, std::string name)
      : primary_(std::move(primary)), driver_(*primary_->driver), name_(std::move(name)) {
    int ordering = 0;  // where it can't tell: none
    (void)driver_.device_attribute(&ordering, cuda::kAttributeRemoteWriteOrdering, primary_->device);
    ordered_ = ordering >= cuda::kOrderedForOwner;
  }

  MemoryKind kind() const override { return MemoryKind::cuda; }
  std::string name() const override { return name_; }

  Result<Memory> allocate(std::size_t size) override {
    Current current(*primary_);
    cuda::DevicePointer at = 0;
    if (auto done = driver_.check(driver_.allocate(&at, size), "allocating GPU memory"); !done)
      return fail(done.error().code, "{} on {}: {}", human_bytes(size), name_, done.error().message);
    auto* bytes = reinterpret_cast<std::byte*>(at);
    return Memory{{bytes, size}, {bytes, [primary = primary_](std::byte* memory) {
                                    Current here(*primary);
                                    (void)primary->driver->free(pointer(memory));  // nobody is left to tell
                                  }}};
  }

  Result<Memory> allocate_pinned(std::size_t size) override {
    Current current(*primary_);
    void* at = nullptr;
    if (auto done =
            driver_.check(driver_.allocate_host(&at, size, cuda::kHostAllocPortable), "allocating pinned memory");
        !done)
      return fail(done.error().code, "{} for {}: {}", human_bytes(size), name_, done.error().message);
    auto* bytes = static_cast<std::byte*>(at);
    return Memory{{bytes, size}, {bytes, [primary = primary_](std::byte* memory) {
                                    Current here(*primary);
                                    (void)primary->driver->free_host(memory);  // nobody is left to tell
                                  }}};
  }

  Result<std::unique_ptr<Stream>> make_stream() override {
    Current current(*primary_);
    cuda::StreamHandle stream = nullptr;
    // What others wait for goes first: the driver takes the highest priority that there is.
    constexpr int highest = -64;
    auto made =
        driver_.check(driver_.stream_create(&stream, cuda::kStreamNonBlocking, highest), "making a CUDA stream");
    if (!made) return tl::unexpected(made.error());
    return std::make_unique<CudaStream>(primary_, stream, true);
  }

  Result<> prepare_kernels() override {
    Current current(*primary_);
    if (auto kernel = primary_->kernel(Kernel::reduce); !kernel) return tl::unexpected(kernel.error());
    return {};
  }

  Result<std::unique_ptr<Stream>> adopt_stream(void* handle) override {
    return std::make_unique<CudaStream>(primary_, static_cast<cuda::StreamHandle>(handle), false);
  }

  Result<> flush_remote_writes() override {
    if (ordered_) return {};
    Current current(*primary_);
    return driver_.check(driver_.flush_remote_writes(cuda::kFlushCurrentContext, cuda::kFlushToOwner),
                         "flushing a NIC's writes");
  }

  // The driver takes whole pages only: the range is widened to them, inside its allocation. Of memory that is mapped
  // piece by piece (VMM, "expandable segments") each piece is an allocation; a range over several is refused by it.
  Result<Exported> export_dma_buf(std::span<std::byte> memory) override {
    Current current(*primary_);
    int supported = 0;
    if (driver_.device_attribute(&supported, cuda::kAttributeDmaBuf, primary_->device) != cuda::kSuccess ||
        supported == 0)
      return fail(ErrorCode::unreachable, "{} has no dma-buf support (the open kernel modules have it)", name_);
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const std::uint64_t begin = pointer(memory.data()), end = begin + memory.size();
    const std::uint64_t from = begin / page * page, to = round_up(end, page);
    int fd = -1;
    auto done = driver_.check(driver_.range_handle(&fd, from, to - from, cuda::kRangeHandleDmaBuf, 0),
                              "exporting GPU memory as a dma-buf");
    if (!done)
      return fail(ErrorCode::unreachable, "{} of {}: {}", human_bytes(memory.size()), name_, done.error().message);
    return Exported{Fd(fd), begin - from};
  }

 private:
  std::shared_ptr<const Primary> primary_;
  const Driver& driver_;
  std::string name_;
  bool ordered_ = false;  // it sees NICs' writes in order by itself
};

}  // namespace

Result<std::shared_ptr<Device>> open_cuda(const CudaOptions& options) {
  auto driver = cuda::load_driver(options.library);
  if (!driver) return tl::unexpected(driver.error());
  const Driver& d = **driver;
  const auto missing = [&](const Error& error) {
    return fail(ErrorCode::unavailable, "no CUDA device can be used here: {}; see what nvidia-smi says", error.message);
  };
  if (auto done = d.check(d.init(0), "starting the driver"); !done) return missing(done.error());
  int count = 0;
  if (auto done = d.check(d.device_count(&count), "counting devices"); !done) return missing(done.error());
  if (options.ordinal < 0 || options.ordinal >= count)
    return fail(ErrorCode::invalid_argument, "no CUDA device {}: there are {}, counted from 0", options.ordinal, count);
  cuda::Ordinal device = 0;
  if (auto done = d.check(d.device_get(&device, options.ordinal), "finding the device"); !done)
    return missing(done.error());
  char name[128] = "GPU", pci[32] = "?";
  if (auto done = d.check(d.device_name(name, sizeof name, device), "asking for its name"); !done)
    return missing(done.error());
  if (auto done = d.check(d.device_pci(pci, sizeof pci, device), "asking where it is"); !done)
    return missing(done.error());
  auto primary = std::make_shared<Primary>(*driver, device);
  if (auto done = d.check(d.retain_context(&primary->context, device), "taking its primary context"); !done)
    return missing(done.error());
  return std::make_shared<CudaDevice>(std::move(primary),
                                      fmt::format("{} (CUDA device {}, {})", name, options.ordinal, pci));
}

}  // namespace rejoin::device
