// CUDA's driver behind the seam.
#include <unistd.h>

#include "device/cuda_context.h"

namespace rejoin::device {

namespace {

using cuda::Driver;

class CudaDevice final : public Device {
 public:
  CudaDevice(std::shared_ptr<const Primary> primary, std::string name, std::string pci)
      : primary_(std::move(primary)), driver_(*primary_->driver), name_(std::move(name)), pci_(std::move(pci)) {
    int ordering = 0, ways = 0;  // where it can't tell: none
    (void)driver_.device_attribute(&ordering, cuda::kAttributeRemoteWriteOrdering, primary_->device);
    (void)driver_.device_attribute(&ways, cuda::kAttributeRemoteWriteFlushes, primary_->device);
    flushes_ = ordering < cuda::kOrderedForOwner && (ways & cuda::kFlushByHost) != 0;
  }

  MemoryKind kind() const override { return MemoryKind::cuda; }
  std::string name() const override { return name_; }
  std::string address() const override { return "cuda:" + pci_; }

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

  Result<Shared> allocate_shared(std::size_t size) override {
    Current current(*primary_);
    const auto properties = shared_properties();
    const auto whole = granules(size, properties);
    if (!whole) return tl::unexpected(whole.error());
    cuda::Handle handle = 0;
    if (auto made = driver_.check(driver_.create(&handle, *whole, &properties, 0), "allocating GPU memory"); !made)
      return fail(made.error().code, "{} on {}, to be shared: {}", human_bytes(*whole), name_, made.error().message);
    int fd = -1;
    auto exported = driver_.check(driver_.export_handle(&fd, handle, cuda::kPosixDescriptor, 0), "sharing GPU memory");
    auto memory = exported ? map(handle, size, *whole) : tl::unexpected(exported.error());
    (void)driver_.release(handle);  // the mapping and the descriptor keep it
    if (!memory) return tl::unexpected(memory.error());
    return Shared{std::move(*memory), Fd(fd)};
  }

  Result<Memory> import_shared(const Fd& shared, std::size_t size) override {
    Current current(*primary_);
    const auto whole = granules(size, shared_properties());
    if (!whole) return tl::unexpected(whole.error());
    cuda::Handle handle = 0;
    auto* os_handle = reinterpret_cast<void*>(static_cast<std::intptr_t>(shared.get()));
    if (auto imported = driver_.check(driver_.import_handle(&handle, os_handle, cuda::kPosixDescriptor),
                                      "taking over another process's GPU memory");
        !imported)
      return fail(ErrorCode::corrupt, "{}: {}", name_, imported.error().message);
    auto memory = map(handle, size, *whole);
    (void)driver_.release(handle);  // the mapping keeps it
    return memory;
  }

  Result<std::unique_ptr<Stream>> make_stream() override {
    Current current(*primary_);
    cuda::StreamHandle stream = nullptr;
    // What others wait for goes first: the driver takes the highest priority that there is.
    constexpr int highest = -64;
    auto made =
        driver_.check(driver_.stream_create(&stream, cuda::kStreamNonBlocking, highest), "making a CUDA stream");
    if (!made) return tl::unexpected(made.error());
    return make_cuda_stream(primary_, stream, true);
  }

  Result<> prepare_kernels() override {
    Current current(*primary_);
    if (auto kernel = primary_->kernel(Kernel::reduce); !kernel) return tl::unexpected(kernel.error());
    return {};
  }

  Result<std::unique_ptr<Stream>> adopt_stream(void* handle) override {
    return make_cuda_stream(primary_, static_cast<cuda::StreamHandle>(handle), false);
  }

  Result<> flush_remote_writes() override {
    if (!flushes_) return {};
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
  cuda::AllocationProperties shared_properties() const {
    cuda::AllocationProperties properties;
    properties.location.id = primary_->device;
    int reachable = 0;  // by NICs, where the device can
    (void)driver_.device_attribute(&reachable, cuda::kAttributeRdmaOfMapped, primary_->device);
    properties.gpu_direct_rdma = reachable != 0 ? 1 : 0;
    return properties;
  }

  Result<std::size_t> granules(std::size_t size, const cuda::AllocationProperties& properties) const {
    std::size_t granule = 0;
    if (auto asked = driver_.check(driver_.granularity(&granule, &properties, cuda::kLeastGranularity),
                                   "asking how memory is shared");
        !asked)
      return tl::unexpected(asked.error());
    return round_up(size, granule);
  }

  // `whole` bytes of it, of which `size` are asked for.
  Result<Memory> map(cuda::Handle handle, std::size_t size, std::size_t whole) const {
    cuda::DevicePointer at = 0;
    auto done = driver_.check(driver_.reserve(&at, whole, 0, 0, 0), "reserving GPU addresses");
    if (!done) return tl::unexpected(done.error());
    done = driver_.check(driver_.map(at, whole, 0, handle, 0), "mapping GPU memory");
    if (!done) {
      (void)driver_.unreserve(at, whole);  // the first error tells
      return fail(ErrorCode::corrupt, "{} on {}: {}", human_bytes(whole), name_, done.error().message);
    }
    auto* bytes = reinterpret_cast<std::byte*>(at);
    Memory memory{{bytes, size}, {bytes, [primary = primary_, whole](std::byte* mapped) {
                                    Current here(*primary);
                                    (void)primary->driver->unmap(pointer(mapped), whole);  // nobody is left to tell
                                    (void)primary->driver->unreserve(pointer(mapped), whole);
                                  }}};
    cuda::AccessDescription access;
    access.location.id = primary_->device;
    done = driver_.check(driver_.set_access(at, whole, &access, 1), "getting at shared GPU memory");
    if (!done) return tl::unexpected(done.error());
    return memory;
  }

  std::shared_ptr<const Primary> primary_;
  const Driver& driver_;
  std::string name_, pci_;
  bool flushes_ = false;  // it does not see NICs' writes in order by itself; where it can't be asked to, none get there
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
  cuda::Ordinal device = 0;
  if (!options.pci.empty()) {
    if (auto done = d.check(d.device_by_pci(&device, options.pci.c_str()), "finding the device"); !done)
      return fail(ErrorCode::unavailable, "no CUDA device at {} can be used here ({} are there): {}", options.pci,
                  count, done.error().message);
  } else {
    if (options.ordinal < 0 || options.ordinal >= count)
      return fail(ErrorCode::invalid_argument, "no CUDA device {}: there are {}, counted from 0", options.ordinal,
                  count);
    if (auto done = d.check(d.device_get(&device, options.ordinal), "finding the device"); !done)
      return missing(done.error());
  }
  char name[128] = "GPU", pci[32] = "?";
  if (auto done = d.check(d.device_name(name, sizeof name, device), "asking for its name"); !done)
    return missing(done.error());
  if (auto done = d.check(d.device_pci(pci, sizeof pci, device), "asking where it is"); !done)
    return missing(done.error());
  auto primary = std::make_shared<Primary>(*driver, device);
  if (auto done = d.check(d.retain_context(&primary->context, device), "taking its primary context"); !done)
    return missing(done.error());
  const std::string number = options.pci.empty() ? fmt::format("{}, ", options.ordinal) : "";
  return std::make_shared<CudaDevice>(std::move(primary), fmt::format("{} (CUDA device {}{})", name, number, pci), pci);
}

}  // namespace rejoin::device
