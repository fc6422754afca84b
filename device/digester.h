// Digests of a GPU's memory, by its own kernel: the same numbers as base/digest.h gives for the same bytes. The kernel
// hashes the whole blocks of 4 KiB; the hashes, and what is left at the end, come to the host, which does the rest.
#pragma once

#include "device/device.h"

namespace rejoin::device {

// Thread: one at a time.
class Digester {
 public:
  // Errors: `unavailable` (no kernels); of the device.
  static Result<std::unique_ptr<Digester>> make(Device& device);

  // Several pieces of device memory, each with a digest of its own; waits for them. They begin at multiples of 16 bytes
  // and are written by nobody meanwhile. Errors: of the device; nothing works on it any more.
  Result<std::vector<std::uint64_t>> digests(std::span<const std::span<const std::byte>> pieces);

 private:
  // Of one launch: room for their hashes and ends is kept.
  static constexpr std::size_t kBlocks = 65536, kPieces = 1024;
  Digester() = default;
  Result<> batch(std::span<const std::span<const std::byte>> pieces, std::vector<std::uint64_t>& digests);

  Memory pieces_, keys_;  // on the device
  Memory pinned_;         // pieces on their way there; hashes and ends on theirs here
  std::unique_ptr<Stream> stream_;
};

}  // namespace rejoin::device
