#include "shm/owner.h"

#include <cstring>

namespace rejoin::shm {

Result<Owner> Owner::make(Manifest manifest, std::shared_ptr<device::Device> device) {
  Owner owner(std::move(manifest));
  const auto slices = static_cast<std::uint32_t>(owner.manifest_.slices().size());
  auto state = device->allocate_shared(owner.manifest_.state_bytes());
  if (!state) return tl::unexpected(state.error());
  auto aside = device->allocate_shared(aside_bytes());
  if (!aside) return tl::unexpected(aside.error());
  auto stream = device->make_stream();
  if (!stream) return tl::unexpected(stream.error());
  if (auto zeroed = device::zero_fresh(*device, state->memory.bytes); !zeroed) return tl::unexpected(zeroed.error());
  auto page_fd = make_sealed_memfd("rejoin-page", page_bytes(slices));
  if (!page_fd) return tl::unexpected(page_fd.error());
  auto mapped = Mapping::of(*page_fd, page_bytes(slices));
  if (!mapped) return tl::unexpected(mapped.error());
  owner.device_ = std::move(device);
  owner.state_ = std::move(*state);
  owner.aside_ = std::move(*aside);
  owner.stream_ = std::move(*stream);
  owner.page_fd_ = std::move(*page_fd);
  owner.page_ = std::move(*mapped);
  auto doorbell = make_eventfd();
  if (!doorbell) return tl::unexpected(doorbell.error());
  owner.doorbell_ = std::move(*doorbell);
  Page& page = *new (owner.page_.data()) Page{};
  page.layout = kLayoutVersion;
  page.slices = slices;
  page.magic = kPageMagic;
  return owner;
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
    PinState expected = PinState::owed;
    if (!pin.state.compare_exchange_strong(expected, PinState::copying)) continue;
    copied.push_back(i);
    if (pin.part >= manifest_.parts().size()) continue;
    const Part& part = manifest_.parts()[pin.part];
    std::byte* to = aside_.memory.bytes.data() + i * kPartBytes;
    for (std::uint32_t column = 0; column < manifest_.columns(part) && done; ++column) {
      const Extent extent = manifest_.extent(part, column);
      done = stream_->copy(to, state_.memory.bytes.data() + extent.offset, extent.length);
      to += manifest_.packed_stride(part);
    }
    p.copied_aside.fetch_add(manifest_.bytes_of(part), std::memory_order_relaxed);
  }
  // All copies of a GPU run at once; nothing is waited for where nothing is held.
  if (done && !copied.empty()) done = stream_->synchronize();
  if (!done) return done;  // and whoever holds them waits until this process ends
  for (const auto i : copied) p.pins[i].state.store(PinState::aside);
  ring();
  return {};
}

void Owner::end_update(std::uint64_t version) {
  page().clock.store(Clock{version, false}.packed());
  page().phase.store(static_cast<std::uint32_t>(Phase::compute), std::memory_order_relaxed);
  ring();
}

}  // namespace rejoin::shm
