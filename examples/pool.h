// Memory as a framework's caching allocator hands it out: tensors beside each other in large blocks, or in one range of
// addresses that is mapped block by block ("expandable segments").
#pragma once

#include "device/device.h"

namespace rejoin::demo {

class Pool {
 public:
  // Zeroed. Errors: of the device.
  static Result<Pool> make(device::Device& device, bool expandable, std::size_t bytes);

  // Room for a tensor, from a multiple of 512 bytes on; there must be enough left.
  std::span<std::byte> take(std::size_t bytes);
  static constexpr std::size_t room(std::size_t bytes) { return round_up(bytes, 512); }

 private:
  device::Memory memory_;
  std::span<std::byte> rest_;
};

}  // namespace rejoin::demo
