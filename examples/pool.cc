#include "examples/pool.h"

#include "base/fail.h"

namespace rejoin::demo {

Result<Pool> Pool::make(device::Device& device, bool expandable, std::size_t bytes) {
  constexpr std::size_t kBlock = 2 * MiB;  // PyTorch's small ones
  auto memory = expandable ? device.allocate_mapped(bytes, kBlock) : device.allocate(bytes);
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
