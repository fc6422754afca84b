// The seam to accelerators: their memory, copies into and out of it in order of a stream, and how other devices reach
// it. One implementation for the host (memory is memory, a copy is over when it returns) and one for CUDA; nothing
// outside this folder knows CUDA. The CUDA driver is loaded when a device is opened, so that one binary serves machines
// with and without a GPU.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/result.h"
#include "device/memory.h"
#include "device/stream_handle.h"

namespace rejoin::device {

// Bytes that go when the last copy of this goes.
struct Memory {
  std::span<std::byte> bytes;
  std::shared_ptr<void> owner;
};

Memory on_heap(std::size_t size);  // the host's, like any other

// What a device's memory was allocated by, as one piece.
struct Allocation {
  std::span<std::byte> memory;
  bool mapped = false;  // to an address that was chosen for it: such neighbours are neighbours elsewhere, too
};

// What another process takes an allocation over by: a descriptor of the host's memory; of a GPU's the address that it
// has in the process that serves it (remote.h).
struct Handle {
  enum class Kind : std::uint8_t { descriptor, address };
  Kind kind = Kind::descriptor;
  std::uint64_t size = 0;  // bytes
  Fd fd;
  std::uint64_t address = 0;
};

// What runs where the memory is (kernels/), each with a struct of arguments of kernels/mailbox.h.
enum class Kernel : std::uint8_t { reduce, code, digest };
struct Grid {
  unsigned blocks = 1, threads = 1;  // threads in each block
};

// Among the streams of a GPU: what others wait for goes first, what they don't wait for takes what is left.
enum class Priority : std::uint8_t { high, low };

class Access;

// Work, one piece after the other. Thread: one at a time.
class Stream {
 public:
  virtual ~Stream() = default;  // waits for what is queued
  // Queues a copy; each end may be in the device's memory or the host's. Both stay as they are until it is done. Copies
  // are truly asynchronous only where the host's end is pinned.
  virtual Result<> copy(std::byte* to, const std::byte* from, std::size_t size) = 0;
  virtual Result<> clear(std::byte* memory, std::size_t size) = 0;  // … zeros into the device's memory
  // What is queued from now on waits for what is queued on the other, which is of the same device.
  virtual Result<> follow(Stream& other) = 0;
  // Queues a kernel; its arguments are copied. Errors: `unavailable` where there are none: on the host, or in a build
  // without nvcc.
  virtual Result<> launch(Kernel kernel, Grid grid, const void* arguments) = 0;
  // What is queued from now on waits until *flag ≥ value (as signed difference). `flag` is in pinned memory, and the
  // caller sees to it that it gets there.
  virtual Result<> wait_until(const std::uint64_t* flag, std::uint64_t value) = 0;
  // When the stream has come here, all that was queued before is done and seen by everybody, *flag = value. Likewise in
  // pinned memory.
  virtual Result<> write(std::uint64_t* flag, std::uint64_t value) = 0;
  // A mark behind all that is queued; marks count up from 1.
  virtual Result<std::uint64_t> mark() = 0;
  // The last mark before which everything is done. Errors: `io`: a copy failed; nothing on the device works any more.
  virtual Result<std::uint64_t> reached() = 0;
  // The eventfd is signalled when what is queued now is done. It must stay open until
  // synchronize() has returned, or the stream has gone.
  virtual Result<> signal(const Fd& eventfd) = 0;
  virtual Result<bool> idle() = 0;     // all that is queued is done; errors: as reached()
  virtual Result<> synchronize() = 0;  // waits for it
  virtual CudaStream handle() = 0;     // null on the host
  // Errors: `invalid_argument` where what is queued goes into a graph that is being captured; of the device.
  virtual Result<> takes_work() { return {}; }
};

// Any thread.
class Device {
 public:
  virtual ~Device() = default;
  virtual MemoryKind kind() const = 0;
  // "host", "cuda:0000:19:00.0": what open_device() opens the same device by, in any process of this machine.
  virtual std::string address() const = 0;
  virtual std::string name() const = 0;                          // "NVIDIA H200 (CUDA device 0, 0000:19:00.0)"
  virtual unsigned multiprocessors() const { return 0; }         // 0: it has none, or does not say
  virtual Result<Memory> allocate(std::size_t size) = 0;         // the device's own memory
  virtual Result<Memory> allocate_pinned(std::size_t size) = 0;  // the host's, which the device copies at full speed
  // The device's own memory in several allocations of this size side by side (a GPU's: a multiple of 2 MiB), as
  // frameworks with expandable segments have it.
  virtual Result<Memory> allocate_mapped(std::size_t size, std::size_t piece) = 0;
  // Pins the host's memory, which must be whole pages, until the result goes.
  virtual Result<Memory> pin(std::span<std::byte> memory) = 0;
  // The allocations that this memory lies in, in order: somebody else's too, a framework's. Errors: `unreachable` for
  // memory that other processes can't be given, with what to do.
  virtual Result<std::vector<Allocation>> allocations(std::span<std::byte> memory) = 0;
  virtual Result<Handle> share(const Allocation& allocation) = 0;  // errors: likewise
  // Another process's memory, allocations one behind the other (several only where they are `mapped`). It need not be
  // trusted: whatever the handles are, an error at most.
  virtual Result<Memory> import_shared(std::span<const Handle> handles) = 0;
  Result<std::unique_ptr<Stream>> make_stream() { return make_stream(Priority::high); }
  virtual Result<std::unique_ptr<Stream>> make_stream(Priority priority) = 0;
  // The CPU's looks into its memory (access.h). Errors: of the device, which must have kernels unless it is the host.
  Result<std::unique_ptr<Access>> make_access();
  virtual Result<std::unique_ptr<Access>> make_access(Priority priority) = 0;
  // Loads the kernels, which may wait for everything that runs on the device: before any of them is needed.
  virtual Result<> prepare_kernels() = 0;
  // Waits for all that this process has queued on the device, on whatever stream. The host queues nothing.
  virtual Result<> synchronize() { return {}; }
  // A stream of somebody else's, which must live as long as this. The host has none.
  virtual Result<std::unique_ptr<Stream>> adopt_stream(CudaStream handle) = 0;
  // Whether its streams can wait for flags and write them. Errors: `unavailable`.
  virtual Result<> has_stream_flags() = 0;
  // How a NIC's write into this device's memory, once it was seen to be complete, gets to whoever reads there: by
  // itself; by flush_remote_writes() before a kernel may read it; nobody knows, so that no NIC may write there; or only
  // the process that it belongs to can let one (Transport's register_dma_buf()).
  enum class RemoteWrites : std::uint8_t { ordered, flushed, unordered, elsewhere };
  virtual RemoteWrites remote_writes() const = 0;
  virtual Result<> flush_remote_writes() = 0;  // does nothing where there is nothing to be flushed
  // The memory, as a descriptor that a NIC's driver takes. The range may lie anywhere in an allocation. Errors:
  // `unreachable` where the device or its driver can't.
  struct Exported {
    Fd fd;
    std::uint64_t offset = 0;  // of the memory in it
  };
  virtual Result<Exported> export_dma_buf(std::span<std::byte> memory) = 0;
};

std::shared_ptr<Device> make_host();

struct CudaOptions {
  int ordinal = 0;                       // as CUDA counts, after CUDA_VISIBLE_DEVICES
  std::string pci;                       // by its place instead, where given: "0000:19:00.0"
  std::string library = "libcuda.so.1";  // the driver's
};
// Keeps the device's primary context, which the CUDA runtime and PyTorch share. Errors: `unavailable` with what is
// missing: the driver, a device, its permission.
Result<std::shared_ptr<Device>> open_cuda(const CudaOptions& options);

// By name, for settings and between processes: "host", "cuda" (device 0), "cuda:N", "cuda:PCI-ADDRESS".
Result<std::shared_ptr<Device>> open_device(const std::string& name);

// What handles of addresses stand for, where they are one behind the other. Errors: `corrupt`.
Result<Memory> side_by_side(std::span<const Handle> handles);

// Zeroes memory that the device has just allocated, and waits for it. The host's comes as zeros; it gets its pages now,
// and not when they are touched, in join() or a step, where others wait for this process.
Result<> zero_fresh(Device& device, std::span<std::byte> memory);

}  // namespace rejoin::device
