#include "shm/owner.h"

#include <cstring>

namespace rejoin::shm {

Result<Owner> Owner::make(Manifest manifest) {
  Owner owner(std::move(manifest));
  const auto slices = static_cast<std::uint32_t>(owner.manifest_.slices().size());
  const auto segment = [&](const char* name, std::size_t size, Fd& fd, Mapping& mapping) -> Result<> {
    auto made = make_sealed_memfd(name, size);
    if (!made) return tl::unexpected(made.error());
    auto mapped = Mapping::of(*made, size);
    if (!mapped) return tl::unexpected(mapped.error());
    fd = std::move(*made);
    mapping = std::move(*mapped);
    return {};
  };
  for (auto made : {segment("rejoin-state", owner.manifest_.state_bytes(), owner.state_fd_, owner.state_),
                    segment("rejoin-page", page_bytes(slices), owner.page_fd_, owner.page_),
                    segment("rejoin-aside", aside_bytes(), owner.aside_fd_, owner.aside_)})
    if (!made) return tl::unexpected(made.error());
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

void Owner::begin_update() {
  Page& p = page();
  const Clock before = clock();
  REJOIN_CHECK(!before.updating, "begin_update twice");
  // First say that the state changes, then look for pins: a daemon first pins, then looks at the clock. One of the two
  // sees the other.
  p.clock.store(Clock{before.version, true}.packed());
  p.phase.store(static_cast<std::uint32_t>(Phase::update), std::memory_order_relaxed);
  for (std::uint32_t i = 0; i < kMaxPins; ++i) {
    Pin& pin = p.pins[i];
    PinState expected = PinState::owed;
    if (!pin.state.compare_exchange_strong(expected, PinState::copying)) continue;
    if (pin.part < manifest_.parts().size()) {
      const Part& part = manifest_.parts()[pin.part];
      std::byte* to = aside_.data() + i * kPartBytes;
      for (std::uint32_t column = 0; column < manifest_.columns(part); ++column) {
        const Extent extent = manifest_.extent(part, column);
        std::memcpy(to, state_.data() + extent.offset, extent.length);
        to += extent.length;
      }
      p.copied_aside.fetch_add(manifest_.bytes_of(part), std::memory_order_relaxed);
    }
    pin.state.store(PinState::aside);
  }
  ring();
}

void Owner::end_update(std::uint64_t version) {
  page().clock.store(Clock{version, false}.packed());
  page().phase.store(static_cast<std::uint32_t>(Phase::compute), std::memory_order_relaxed);
  ring();
}

}  // namespace rejoin::shm
