// Digests of a GPU's memory, by its own kernel: the same numbers as base/digest.h gives for the same bytes. The kernel
// hashes the whole blocks of 4 KiB; the hashes, and what is left at the end, come to the host, which does the rest
// while the kernel is at the next batch.
#pragma once

#include "device/device.h"
#include "device/kernels/mailbox.h"

namespace rejoin::device {

// Thread: one at a time.
class Digester {
 public:
  // Launches the kernel once, so that it is loaded. Errors: `unavailable` (no kernels); of the device.
  static Result<std::unique_ptr<Digester>> make(Device& device, Priority priority = Priority::high);

  // Several pieces of device memory, each with a digest of its own; waits for them. They begin at multiples of 16 bytes
  // and are written by nobody meanwhile. Errors: of the device; nothing works on it any more.
  Result<std::vector<std::uint64_t>> digests(std::span<const std::span<const std::byte>> ranges);

 private:
  // What one launch has to do, and where its results come.
  struct Batch {
    kernels::DigestArguments arguments;
    std::size_t of[kernels::DigestArguments::kRanges] = {};  // the piece that each is, or is a part of
    Memory pinned;
    std::uint64_t mark = 0;
  };
  // What is still to be given to the kernel.
  struct Rest {
    std::span<const std::span<const std::byte>> ranges;
    std::size_t range = 0, offset = 0, items = 0;
  };
  Digester() = default;
  Result<> start(Batch& batch, Rest& rest);
  Result<> finish(Batch& batch, std::vector<std::uint64_t>& digests);

  Memory keys_;  // on the device
  Batch batches_[2];
  std::unique_ptr<Stream> stream_;
};

}  // namespace rejoin::device
