// What kinds of memory there are, as registration needs to know them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#pragma GCC visibility push(default)
namespace rejoin::device {

enum class MemoryKind : std::uint8_t { host, cuda };

// Memory of a device, a GPU's, that other devices reach by dma-buf (Device::export_dma_buf gives it out).
struct DmaBuf {
  int fd = -1;                  // stays the caller's; may be closed after the call
  std::uint64_t offset = 0;     // bytes, of the memory in it
  std::span<std::byte> memory;  // by its device address: nobody here looks inside
};

}  // namespace rejoin::device

#pragma GCC visibility pop
