// CUDA's driver behind the seam.
#include <unistd.h>

#include <algorithm>

#include "base/fail.h"
#include "device/access.h"
#include "device/cuda_context.h"

namespace rejoin::device {

namespace {

using cuda::Driver;

class CudaDevice final : public Device {
 public:
  CudaDevice(std::shared_ptr<const Primary> primary, std::string name, std::string pci)
      : primary_(std::move(primary)), driver_(*primary_->driver), name_(std::move(name)), pci_(std::move(pci)) {
    const int ways = attribute(cuda::kAttributeRemoteWriteFlushes);
    if (attribute(cuda::kAttributeRemoteWriteOrdering) >= cuda::kOrderedForOwner)
      remote_writes_ = RemoteWrites::ordered;
    else if ((ways & cuda::kFlushByHost) != 0) remote_writes_ = RemoteWrites::flushed;
  }

  MemoryKind kind() const override { return MemoryKind::cuda; }
  std::string name() const override { return name_; }
  std::string address() const override { return "cuda:" + pci_; }
  unsigned multiprocessors() const override {
    return static_cast<unsigned>(std::max(0, attribute(cuda::kAttributeMultiprocessors)));
  }

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

  Result<Memory> pin(std::span<std::byte> memory) override {
    Current current(*primary_);
    auto done = driver_.check(driver_.register_host(memory.data(), memory.size(), cuda::kHostRegisterPortable),
                              "pinning the host's memory");
    if (!done) return fail(done.error().code, "{} for {}: {}", human_bytes(memory.size()), name_, done.error().message);
    Memory pinned{memory, {memory.data(), [primary = primary_](std::byte* registered) {
                             Current here(*primary);
                             (void)primary->driver->unregister_host(registered);  // nobody is left to tell
                           }}};
    cuda::DevicePointer seen = 0;
    done = driver_.check(driver_.device_pointer(&seen, memory.data(), 0), "finding pinned memory");
    if (!done) return tl::unexpected(done.error());
    if (seen != pointer(memory.data()))
      return fail(ErrorCode::unavailable, "{} has the host's memory at other addresses than the host", name_);
    return pinned;
  }

  Result<Memory> allocate_mapped(std::size_t size, std::size_t piece) override {
    Current current(*primary_);
    cuda::AllocationProperties properties;
    properties.location.id = primary_->device;
    properties.gpu_direct_rdma = attribute(cuda::kAttributeRdmaOfMapped) != 0 ? 1 : 0;  // by NICs, where the device can
    std::size_t granule = 0;
    if (auto asked = driver_.check(driver_.granularity(&granule, &properties, cuda::kLeastGranularity),
                                   "asking how memory is mapped");
        !asked)
      return tl::unexpected(asked.error());
    const std::size_t each = round_up(std::max<std::size_t>(piece, 1), granule);
    std::vector<Physical> made;
    Result<> done;
    for (std::size_t got = 0; got < size && done; got += each) {
      Physical physical{.size = each};
      done = driver_.check(driver_.create(&physical.handle, each, &properties, 0), "allocating GPU memory");
      if (done) made.push_back(physical);
    }
    auto memory =
        done ? map(made)
             : fail(done.error().code, "{} on {}, in pieces: {}", human_bytes(size), name_, done.error().message);
    for (const auto& physical : made) (void)driver_.release(physical.handle);  // the mapping keeps it
    if (memory) memory->bytes = memory->bytes.first(size);
    return memory;
  }

  // Of memory that is mapped by hand ("expandable segments") each mapping is an allocation.
  Result<std::vector<Allocation>> allocations(std::span<std::byte> memory) override {
    Current current(*primary_);
    std::vector<Allocation> found;
    const cuda::DevicePointer end = pointer(memory.data()) + memory.size();
    for (cuda::DevicePointer at = pointer(memory.data()); at < end;) {
      cuda::DevicePointer base = 0;
      std::size_t size = 0;
      cuda::Ordinal device = -1;
      if (driver_.address_range(&base, &size, at) != cuda::kSuccess || base + size <= at ||
          driver_.pointer_attribute(&device, cuda::kPointerDevice, at) != cuda::kSuccess)
        return fail(ErrorCode::unreachable, "{} at {:#x} are not all in a GPU's memory", human_bytes(memory.size()),
                    pointer(memory.data()));
      if (device != primary_->device)
        return fail(ErrorCode::unreachable, "{} at {:#x} are on CUDA device {}, not on {}", human_bytes(memory.size()),
                    pointer(memory.data()), device, name_);
      auto* bytes = reinterpret_cast<std::byte*>(base);
      cuda::Handle handle = 0;
      const bool mapped = driver_.retain_handle(&handle, bytes) == cuda::kSuccess;
      if (mapped) (void)driver_.release(handle);
      found.push_back({{bytes, size}, mapped});
      at = base + size;
    }
    return found;
  }

  Result<Handle> share(const Allocation& allocation) override {
    return Handle{
        .kind = Handle::Kind::address, .size = allocation.memory.size(), .address = pointer(allocation.memory.data())};
  }
  // In this process, where it is what it was: others have a RemoteDevice.
  Result<Memory> import_shared(std::span<const Handle> handles) override { return side_by_side(handles); }

  Result<std::unique_ptr<Stream>> make_stream(Priority priority) override {
    Current current(*primary_);
    cuda::StreamHandle stream = nullptr;
    // The driver takes the nearest priority that there is.
    const int level = priority == Priority::high ? -64 : 64;
    auto made = driver_.check(driver_.stream_create(&stream, cuda::kStreamNonBlocking, level), "making a CUDA stream");
    if (!made) return tl::unexpected(made.error());
    return make_cuda_stream(primary_, stream, true);
  }

  Result<std::unique_ptr<Access>> make_access(Priority priority) override { return make_cuda_access(*this, priority); }

  Result<> prepare_kernels() override {
    Current current(*primary_);
    if (auto kernel = primary_->kernel(Kernel::reduce); !kernel) return tl::unexpected(kernel.error());
    return {};
  }

  Result<> synchronize() override {
    Current current(*primary_);
    return driver_.check(driver_.synchronize_context(), "waiting for all work on the GPU");
  }

  Result<std::unique_ptr<Stream>> adopt_stream(CudaStream handle) override {
    return make_cuda_stream(primary_, handle, false);
  }

  Result<> has_stream_flags() override {
    if (attribute(cuda::kAttributeStreamFlags) != 0) return {};
    return fail(ErrorCode::unavailable,
                "the streams of {} can't wait for flags of 64 bits: hand buckets over without a stream, after an event "
                "of your own",
                name_);
  }
  RemoteWrites remote_writes() const override { return remote_writes_; }
  Result<> flush_remote_writes() override {
    if (remote_writes_ != RemoteWrites::flushed) return {};
    Current current(*primary_);
    return driver_.check(driver_.flush_remote_writes(cuda::kFlushCurrentContext, cuda::kFlushToOwner),
                         "flushing a NIC's writes");
  }

  // The driver takes whole pages only: the range is widened to them. Of memory that is mapped piece by piece it may lie
  // over several; whether the driver takes that is its own matter.
  Result<Exported> export_dma_buf(std::span<std::byte> memory) override {
    Current current(*primary_);
    if (attribute(cuda::kAttributeDmaBuf) == 0)
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
  struct Physical {
    cuda::Handle handle = 0;
    std::size_t size = 0;  // bytes
  };

  // What the driver does not know of is 0.
  int attribute(int which) const {
    int value = 0;
    return driver_.device_attribute(&value, which, primary_->device) == cuda::kSuccess ? value : 0;
  }

  // Addresses with what is mapped there.
  struct Reserved {
    std::shared_ptr<const Primary> primary;
    cuda::DevicePointer at = 0;
    std::size_t whole = 0;
    std::vector<std::pair<cuda::DevicePointer, std::size_t>> mapped{};
    explicit Reserved(std::shared_ptr<const Primary> of) : primary(std::move(of)) {}
    Reserved(const Reserved&) = delete;
    ~Reserved() {
      Current here(*primary);
      for (const auto& [base, size] : mapped) (void)primary->driver->unmap(base, size);  // nobody is left to tell
      if (at != 0) (void)primary->driver->unreserve(at, whole);
    }
  };

  Result<Memory> map(std::span<const Physical> pieces) const {
    auto reserved = std::make_shared<Reserved>(primary_);
    for (const auto& piece : pieces) reserved->whole += piece.size;
    auto done = driver_.check(driver_.reserve(&reserved->at, reserved->whole, 0, 0, 0), "reserving GPU addresses");
    if (!done) return tl::unexpected(done.error());
    cuda::DevicePointer at = reserved->at;
    for (const auto& piece : pieces) {
      done = driver_.check(driver_.map(at, piece.size, 0, piece.handle, 0), "mapping GPU memory");
      if (!done) return fail(ErrorCode::corrupt, "{} on {}: {}", human_bytes(piece.size), name_, done.error().message);
      reserved->mapped.emplace_back(at, piece.size);
      at += piece.size;
    }
    cuda::AccessDescription access;
    access.location.id = primary_->device;
    done = driver_.check(driver_.set_access(reserved->at, reserved->whole, &access, 1), "getting at mapped GPU memory");
    if (!done) return tl::unexpected(done.error());
    return Memory{{reinterpret_cast<std::byte*>(reserved->at), reserved->whole}, reserved};
  }

  std::shared_ptr<const Primary> primary_;
  const Driver& driver_;
  std::string name_, pci_;
  RemoteWrites remote_writes_ = RemoteWrites::unordered;
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
  if (auto done = d.check(d.retain_context(&primary->context, device), "taking its primary context"); !done) {
    int mode = 0;
    if (d.device_attribute(&mode, cuda::kAttributeComputeMode, device) == cuda::kSuccess &&
        mode == cuda::kExclusiveProcess)
      return fail(
          ErrorCode::unavailable,
          "{} at {} is in compute mode EXCLUSIVE_PROCESS, in which one process has it alone, and another one has "
          "it; 'nvidia-smi -c DEFAULT' ends that ({})",
          name, pci, done.error().message);
    return missing(done.error());
  }
  const std::string number = options.pci.empty() ? fmt::format("{}, ", options.ordinal) : "";
  return std::make_shared<CudaDevice>(std::move(primary), fmt::format("{} (CUDA device {}{})", name, number, pci), pci);
}

}  // namespace rejoin::device
