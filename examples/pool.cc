#include "examples/pool.h"

namespace rejoin::demo {

namespace {

Result<device::Memory> map_piece_by_piece(device::Device& device, std::size_t bytes) {
  constexpr std::size_t piece = 2 * MiB;  // of PyTorch's small ones
  std::vector<device::Handle> handles;
  for (std::size_t got = 0; got < bytes; got += piece) {
    auto memory = device.allocate_shared(piece);
    if (!memory) return memory;
    auto allocations = device.allocations(memory->bytes);
    if (!allocations) return tl::unexpected(allocations.error());
    for (const auto& allocation : *allocations) {
      auto handle = device.share(allocation);
      if (!handle) return tl::unexpected(handle.error());
      handles.push_back(std::move(*handle));
    }
  }
  return device.import_shared(handles);
}

}  // namespace

Result<Pool> Pool::make(device::Device& device, bool expandable, std::size_t bytes) {
  auto memory = expandable ? map_piece_by_piece(device, bytes) : device.allocate(bytes);
  if (!memory) return tl::unexpected(memory.error());
  if (auto zeroed = device::zero_fresh(device, memory->bytes); !zeroed) return tl::unexpected(zeroed.error());
  Pool pool;
  pool.memory_ = std::move(*memory);
  pool.rest_ = pool.memory_.bytes;
  return pool;
}

std::span<std::byte> Pool::take(std::size_t bytes) {
  REJOIN_CHECK(room(bytes) <= rest_.size(), "{} of {} left in a pool", bytes, rest_.size());
  const auto taken = rest_.first(bytes);
  rest_ = rest_.subspan(room(bytes));
  return taken;
}

}  // namespace rejoin::demo
