#include "local/owner.h"

#include <sys/resource.h>

#include <algorithm>
#include <map>

#include "base/fail.h"

namespace rejoin::local {

Result<Owner> Owner::make(Manifest manifest, std::shared_ptr<device::Device> device, const std::vector<Own>& own) {
  Owner owner(std::move(manifest));
  owner.device_ = std::move(device);
  const auto slices = static_cast<std::uint32_t>(owner.manifest_.slices().size());
  if (auto placed = owner.location(own); !placed) return tl::unexpected(placed.error());
  auto shadow = owner.device_->allocate(shadow_bytes());
  if (!shadow) return tl::unexpected(shadow.error());
  auto allocations = owner.device_->allocations(shadow->bytes);
  if (!allocations) return tl::unexpected(allocations.error());
  owner.shadow_range_ = {shadow->bytes, std::move(*allocations)};
  owner.shadow_ = std::move(*shadow);
  auto stream = owner.device_->make_stream();
  if (!stream) return tl::unexpected(stream.error());
  owner.stream_ = std::move(*stream);
  auto page_fd = make_sealed_memfd("rejoin-page", page_bytes(slices));
  if (!page_fd) return tl::unexpected(page_fd.error());
  auto mapped = Mapping::of(*page_fd, page_bytes(slices));
  if (!mapped) return tl::unexpected(mapped.error());
  owner.page_fd_ = std::move(*page_fd);
  owner.page_ = std::move(*mapped);
  auto doorbell = make_eventfd();
  if (!doorbell) return tl::unexpected(doorbell.error());
  owner.doorbell_ = std::move(*doorbell);
  // What can't be shared is an error now, not when the daemon asks.
  if (auto offered = owner.offer(); !offered) return tl::unexpected(offered.error());
  Page& page = *new (owner.page_.data()) Page{};
  page.layout = kLayoutVersion;
  page.slices = slices;
  page.magic = kPageMagic;
  return owner;
}

Result<> Owner::check(const Tensor& tensor, const Own& own) {
  if (own.size() != tensor.columns)
    return fail(ErrorCode::invalid_argument,
                "tensor '{}' has {} columns and memory for {}: the weight takes one, and so does each moment",
                tensor.name, tensor.columns, own.size());
  for (std::uint32_t c = 0; c < tensor.columns; ++c)
    if (own[c].size() != tensor.bytes(c) || reinterpret_cast<std::uintptr_t>(own[c].data()) % Layout::kAlignment)
      return fail(ErrorCode::invalid_argument,
                  "column {} of tensor '{}' takes {} bytes from a multiple of {} on; its memory has {} at {}", c,
                  tensor.name, tensor.bytes(c), Layout::kAlignment, own[c].size(),
                  static_cast<const void*>(own[c].data()));
  return {};
}

// Allocates what is not there, and finds the memory ranges that all of it lies in.
Result<> Owner::location(const std::vector<Own>& own) {
  const auto& tensors = manifest_.tensors();
  const auto has_own = [&](std::size_t t) { return t < own.size() && !own[t].empty(); };
  const auto room = [](const Tensor& tensor, std::uint32_t column) { return round_up(tensor.bytes(column), 64); };
  std::uint64_t missing = 0;
  for (std::size_t t = 0; t < tensors.size(); ++t)
    for (std::uint32_t c = 0; c < tensors[t].columns && !has_own(t); ++c) missing += room(tensors[t], c);
  if (missing > 0) {
    auto state = device_->allocate(missing);
    if (!state) return tl::unexpected(state.error());
    if (auto zeroed = device::zero_fresh(*device_, state->bytes); !zeroed) return zeroed;
    state_ = std::move(*state);
  }
  std::vector<std::span<std::byte>> columns;
  std::map<std::byte*, device::Allocation> found;
  std::span<std::byte> rest = state_.bytes;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    if (has_own(t))
      if (auto right = check(tensors[t], own[t]); !right) return right;
    for (std::uint32_t c = 0; c < tensors[t].columns; ++c) {
      const auto memory = has_own(t) ? own[t][c] : rest.first(tensors[t].bytes(c));
      if (!has_own(t)) rest = rest.subspan(room(tensors[t], c));
      auto allocations = device_->allocations(memory);
      if (!allocations)
        return fail(allocations.error().code, "column {} of tensor '{}': {}", c, tensors[t].name,
                    allocations.error().message);
      for (const auto& allocation : *allocations) found.emplace(allocation.memory.data(), allocation);
      columns.push_back(memory);
    }
  }
  // Neighbours that can be mapped as such make one memory range.
  std::vector<std::span<std::byte>> wholes;
  for (const auto& [base, allocation] : found) {
    const bool joins = !memory_ranges_.empty() && allocation.mapped &&
                       memory_ranges_.back().allocations.back().mapped &&
                       wholes.back().data() + wholes.back().size() == base;
    if (!joins) memory_ranges_.emplace_back(), wholes.push_back({base, std::size_t{0}});
    wholes.back() = {wholes.back().data(), wholes.back().size() + allocation.memory.size()};
    memory_ranges_.back().allocations.push_back(allocation);
  }
  std::vector<ColumnLocation> locations;
  for (const auto& column : columns) {
    const auto after = std::upper_bound(wholes.begin(), wholes.end(), column.data(),
                                        [](const std::byte* at, const auto& whole) { return at < whole.data(); });
    const auto memory_range = static_cast<std::uint32_t>(after - wholes.begin() - 1);
    auto& memory = memory_ranges_[memory_range].memory;
    auto* begin = memory.empty() ? column.data() : std::min(memory.data(), column.data());
    auto* end = std::max(memory.data() + memory.size(), column.data() + column.size());
    memory = {begin, end};
    locations.push_back({memory_range, 0});
  }
  std::vector<std::uint64_t> sizes;
  for (const auto& memory_range : memory_ranges_) sizes.push_back(memory_range.memory.size());
  for (std::size_t i = 0; i < locations.size(); ++i)
    locations[i].offset =
        static_cast<std::uint64_t>(columns[i].data() - memory_ranges_[locations[i].memory_range].memory.data());
  auto layout = Layout::make(manifest_, std::move(sizes), std::move(locations));
  if (!layout) return tl::unexpected(layout.error());
  layout_ = std::move(*layout);
  return {};
}

std::span<std::byte> Owner::column(std::uint32_t tensor, std::uint32_t column) const {
  const ColumnLocation location = layout_.location(tensor, column);
  return memory_ranges_[location.memory_range].memory.subspan(location.offset,
                                                              manifest_.tensors()[tensor].bytes(column));
}

std::span<std::byte> Owner::column(const Part& part, std::uint32_t column) const {
  const ColumnLocation location = layout_.location(manifest_, part, column);
  return memory_ranges_[location.memory_range].memory.subspan(location.offset, manifest_.length(part, column));
}

std::vector<std::span<std::byte>> Owner::memory_ranges() const {
  std::vector<std::span<std::byte>> all;
  for (const auto& memory_range : memory_ranges_) all.push_back(memory_range.memory);
  return all;
}

std::vector<std::span<std::byte>> Owner::shared_memory() const {
  auto all = memory_ranges();
  all.push_back(shadow_range_.memory);
  return all;
}

Result<SharedMemory> Owner::share(const MemoryRange& memory_range) const {
  SharedMemory shared;
  shared.skipped = static_cast<std::uint64_t>(memory_range.memory.data() - memory_range.allocations[0].memory.data());
  for (const auto& allocation : memory_range.allocations) {
    auto handle = device_->share(allocation);
    if (!handle) return tl::unexpected(handle.error());
    shared.handles.push_back(std::move(*handle));
  }
  // Where there is none, or nobody knows how what a NIC has written gets to the GPU, it goes through the host's memory.
  if (device_->remote_writes() == device::Device::RemoteWrites::unordered) return shared;
  if (auto exported = device_->export_dma_buf(memory_range.memory)) shared.dma_buf = std::move(*exported);
  return shared;
}

Result<std::vector<Fd>> Owner::offer() const {
  constexpr std::size_t others = 64;  // that the process opens
  std::size_t allocations = 0;
  for (const auto& memory_range : memory_ranges_) allocations += memory_range.allocations.size();
  // One each; on a GPU, whose memory has addresses, a dma-buf for each memory range.
  const bool on_host = device_->kind() == device::MemoryKind::host;
  const std::size_t needed = others + (on_host ? allocations : memory_ranges_.size());
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < needed)
    return fail(
        ErrorCode::exhausted,
        "the state lies in {} {}, shared by descriptors; with them this process needs {}, and may have {}: raise "
        "the limit with 'ulimit -n'",
        on_host ? allocations : memory_ranges_.size(), on_host ? "allocations" : "memory ranges", needed,
        limit.rlim_cur);
  auto shadow = share(shadow_range_);
  if (!shadow) return tl::unexpected(shadow.error());
  Offer offer{.manifest = manifest_, .layout = layout_, .shadow = std::move(*shadow)};
  for (const auto& memory_range : memory_ranges_) {
    auto shared = share(memory_range);
    if (!shared) return tl::unexpected(shared.error());
    offer.memory_ranges.push_back(std::move(*shared));
  }
  for (const auto& [from, to] : {std::pair{&page_fd_, &offer.page}, {&doorbell_, &offer.doorbell}}) {
    auto copy = duplicate(from->get());
    if (!copy) return tl::unexpected(copy.error());
    *to = std::move(*copy);
  }
  return pack(std::move(offer));
}

void Owner::ring() {
  if (page().daemon_waits.load() != 0 && page().daemon_waits.exchange(0) != 0) signal_eventfd(doorbell_);
}

void Owner::set_version(std::uint64_t version) {
  page().clock.store(Clock{version, false}.packed());
  ring();
}

Result<> Owner::begin_update() {
  Page& p = page();
  const Clock before = clock();
  REJOIN_CHECK(!before.updating, "begin_update twice");
  // First say that the state changes, then look for pins: a daemon first pins, then looks at the clock. One of the two
  // sees the other.
  p.clock.store(Clock{before.version, true}.packed());
  p.phase.store(static_cast<std::uint32_t>(Phase::update), std::memory_order_relaxed);
  std::vector<std::uint32_t> copied;
  Result<> done;
  for (std::uint32_t i = 0; i < kMaxPins; ++i) {
    Pin& pin = p.pins[i];
    PinState expected = PinState::pending;
    if (!pin.state.compare_exchange_strong(expected, PinState::copying)) continue;
    copied.push_back(i);
    if (pin.part >= manifest_.parts().size()) continue;
    const Part& part = manifest_.parts()[pin.part];
    std::byte* const to = shadow_.bytes.data() + i * kPartBytes;
    for (std::uint32_t c = 0; c < manifest_.columns(part) && done; ++c) {
      const auto from = column(part, c);
      done = stream_->copy(to + manifest_.packed_offset(part, c), from.data(), from.size());
    }
  }
  // All copies of a GPU run at once; nothing is waited for where nothing is pinned.
  if (done && !copied.empty()) done = stream_->synchronize();
  if (!done) return done;  // and whoever has pinned them waits until this process ends
  for (const auto i : copied) p.pins[i].state.store(PinState::copied);
  ring();
  return {};
}

void Owner::end_update(std::uint64_t version) {
  page().clock.store(Clock{version, false}.packed());
  page().phase.store(static_cast<std::uint32_t>(Phase::compute), std::memory_order_relaxed);
  ring();
}

}  // namespace rejoin::local
