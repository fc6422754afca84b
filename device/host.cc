// The host as a device: for code that is written once for both.
#include <algorithm>
#include <cstring>

#include "base/digest.h"
#include "base/fail.h"
#include "device/access.h"
#include "device/device.h"

namespace rejoin::device {

namespace {

class HostStream final : public Stream {
 public:
  Result<> copy(std::byte* to, const std::byte* from, std::size_t size) override {
    if (size > 0) std::memcpy(to, from, size);
    return {};
  }
  Result<> clear(std::byte* memory, std::size_t size) override {
    if (size > 0) std::memset(memory, 0, size);
    return {};
  }
  Result<> follow(Stream&) override { return {}; }
  Result<> launch(Kernel, Grid, const void*) override {
    return fail(ErrorCode::unavailable, "kernels run on GPUs; the host's memory is for the CPU's own code");
  }
  Result<> wait_until(const std::uint64_t*, std::uint64_t) override {
    return fail(ErrorCode::unavailable, "the host's streams do their work at once and wait for nothing");
  }
  Result<> write(std::uint64_t*, std::uint64_t) override {
    return fail(ErrorCode::unavailable, "the host's streams do their work at once and tell nobody");
  }
  Result<std::uint64_t> mark() override { return ++marks_; }
  Result<std::uint64_t> reached() override { return marks_; }
  Result<> signal(const Fd& eventfd) override {
    signal_eventfd(eventfd);
    return {};
  }
  Result<bool> idle() override { return true; }
  Result<> synchronize() override { return {}; }
  CudaStream handle() override { return nullptr; }

 private:
  std::uint64_t marks_ = 0;
};

class HostAccess final : public Access {
 public:
  Result<> read(BytesView from, std::byte* to) override {
    std::copy(from.begin(), from.end(), to);
    return {};
  }
  Result<> write(std::byte* to, BytesView from) override { return read(from, to); }
  Result<std::vector<std::uint64_t>> digests(std::span<const BytesView> ranges) override {
    std::vector<std::uint64_t> digests;
    for (const auto range : ranges) digests.push_back(digest(range));
    return digests;
  }
};

class HostDevice final : public Device {
 public:
  MemoryKind kind() const override { return MemoryKind::host; }
  std::string name() const override { return "host"; }
  std::string address() const override { return "host"; }
  Result<Memory> allocate(std::size_t size) override {
    auto made = Mapping::shareable(size);
    if (!made) return tl::unexpected(made.error());
    auto mapping = std::make_shared<Mapping>(std::move(*made));
    return Memory{mapping->span(), mapping};
  }
  Result<Memory> allocate_mapped(std::size_t size, std::size_t) override { return allocate(size); }
  Result<Memory> pin(std::span<std::byte> memory) override { return Memory{memory, nullptr}; }
  Result<std::vector<Allocation>> allocations(std::span<std::byte> memory) override {
    const auto file = shared_file_of(memory);
    if (!file)
      return fail(ErrorCode::unreachable,
                  "{} of host memory at {} are this process's alone: let the session allocate them",
                  human_bytes(memory.size()), static_cast<const void*>(memory.data()));
    return std::vector<Allocation>{{.memory = {memory.data() - file->offset, file->size}}};
  }
  Result<Handle> share(const Allocation& allocation) override {
    const auto file = shared_file_of(allocation.memory);
    if (!file) return fail(ErrorCode::unreachable, "host memory that is not shared");
    auto fd = duplicate(file->fd);
    if (!fd) return tl::unexpected(fd.error());
    return Handle{.size = allocation.memory.size(), .fd = std::move(*fd)};
  }
  Result<Memory> import_shared(std::span<const Handle> handles) override {
    if (handles.size() != 1 || handles[0].kind != Handle::Kind::descriptor)
      return fail(ErrorCode::corrupt, "{} handles for one piece of host memory", handles.size());
    const auto actual = sealed_size(handles[0].fd);
    if (!actual) return tl::unexpected(actual.error());
    if (*actual < handles[0].size)
      return fail(ErrorCode::corrupt, "it has {} bytes and should have {}", *actual, handles[0].size);
    auto made = Mapping::shareable_of(handles[0].fd, handles[0].size);
    if (!made) return tl::unexpected(made.error());
    auto mapping = std::make_shared<Mapping>(std::move(*made));
    return Memory{mapping->span(), mapping};
  }
  Result<Memory> allocate_pinned(std::size_t size) override { return allocate(size); }
  Result<std::unique_ptr<Stream>> make_stream(Priority) override { return std::make_unique<HostStream>(); }
  Result<std::unique_ptr<Access>> make_access(Priority) override { return std::make_unique<HostAccess>(); }
  Result<> prepare_kernels() override {
    return fail(ErrorCode::unavailable, "kernels run on GPUs; the host's memory is for the CPU's own code");
  }
  Result<std::unique_ptr<Stream>> adopt_stream(CudaStream) override {
    return fail(ErrorCode::invalid_argument, "a CUDA stream given to the host");
  }
  Result<> has_stream_flags() override { return fail(ErrorCode::unavailable, "the host has no streams that wait"); }
  RemoteWrites remote_writes() const override { return RemoteWrites::ordered; }
  Result<> flush_remote_writes() override { return {}; }
  Result<Exported> export_dma_buf(std::span<std::byte> memory) override {
    return fail(ErrorCode::unreachable, "{} of host memory are no dma-buf: register them as they are",
                human_bytes(memory.size()));
  }
};

}  // namespace

std::shared_ptr<Device> make_host() { return std::make_shared<HostDevice>(); }

}  // namespace rejoin::device
