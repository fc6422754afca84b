#include "local/view.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

#include "base/digest.h"
#include "base/fail.h"
#include "base/populate.h"
#include "local/owner.h"

namespace rejoin::local {

namespace {
constexpr std::uint64_t pin_bit(std::uint32_t pin) { return std::uint64_t{1} << pin; }
}  // namespace

Result<View> View::make(std::vector<Fd> descriptors, std::shared_ptr<device::Device> device) {
  auto offer = unpack(std::move(descriptors));
  if (!offer) return tl::unexpected(offer.error());
  auto access = device->make_access();
  if (!access) return tl::unexpected(access.error());
  View view(std::move(offer->manifest), std::move(offer->layout));
  view.device_ = std::move(device);
  view.access_ = std::move(*access);
  if (auto imported = view.import(*offer); !imported) return tl::unexpected(imported.error());
  const auto slices = static_cast<std::uint32_t>(view.manifest_.slices().size());
  const std::uint32_t layout = view.page().layout;
  if (view.page().magic != kPageMagic || layout < kOldestLayout || layout > kLayoutVersion ||
      view.page().slices != slices)
    return fail(ErrorCode::mismatch,
                "the trainer's page has layout {} for {} slices, and this daemon reads {} to {}, for {}; upgrade {} "
                "first",
                layout, view.page().slices, kOldestLayout, kLayoutVersion, slices,
                layout > kLayoutVersion ? "the daemon" : "the trainer's library");
  view.doorbell_ = std::move(offer->doorbell);
  if (const int flags = ::fcntl(view.doorbell_.get(), F_GETFL);
      flags < 0 || ::fcntl(view.doorbell_.get(), F_SETFL, flags | O_NONBLOCK) != 0)
    return fail_errno("the trainer's doorbell");
  // Pins of a daemon before us are nobody's now.
  for (auto& pin : view.page().pins) pin.state.store(PinState::free);
  return view;
}

Result<> View::import(Offer& offer) {
  const auto take = [](const char* what, device::Device& of, std::span<const device::Handle> handles) {
    auto imported = of.import_shared(handles);
    if (!imported)
      return Result<device::Memory>(fail(imported.error().code,
                                         "the daemon (process {}) can't take the trainer's {}: {}", ::getpid(), what,
                                         imported.error().message));
    return imported;
  };
  for (std::size_t i = 0; i < offer.memory_ranges.size(); ++i) {
    auto memory = take("state", *device_, offer.memory_ranges[i].handles);
    if (!memory) return tl::unexpected(memory.error());
    memory_ranges_.push_back(memory->bytes.subspan(offer.memory_ranges[i].skipped, layout_.memory_ranges()[i]));
    state_.push_back(std::move(*memory));
    state_buffers_.push_back(std::move(offer.memory_ranges[i].dma_buf));
  }
  auto shadow = take("shadow buffer", *device_, offer.shadow.handles);
  if (!shadow) return tl::unexpected(shadow.error());
  shadow->bytes = shadow->bytes.subspan(offer.shadow.skipped, shadow_bytes());
  shadow_ = std::move(*shadow);
  shadow_buffer_ = std::move(offer.shadow.dma_buf);
  const std::size_t size = page_bytes(static_cast<std::uint32_t>(manifest_.slices().size()));
  auto fd = duplicate(offer.page.get());
  if (!fd) return tl::unexpected(fd.error());
  const device::Handle page[] = {{.size = size, .fd = std::move(*fd)}};
  auto mapped = take("page", *device::make_host(), page);
  if (!mapped) return tl::unexpected(mapped.error());
  page_ = std::move(*mapped);
  return {};
}

Result<View> View::of(const Owner& owner) {
  auto offer = owner.offer();
  if (!offer) return tl::unexpected(offer.error());
  return make(std::move(*offer), owner.device());
}

bool View::set_slice(std::uint32_t i, SliceStatus expected, SliceStatus next) {
  std::uint64_t bits = expected.packed();
  return statuses()[i].compare_exchange_strong(bits, next.packed());
}

std::uint32_t View::free_pins() const {
  std::uint32_t free = 0;
  for (std::uint32_t i = 0; i < kMaxPins; ++i) free += ((taken_ | withdrawing_) >> i & 1) == 0;
  return free;
}

void View::wait_for_change() {
  std::uint64_t rung = 0;
  const auto got = ::read(doorbell_.get(), &rung, sizeof rung);
  const bool empty = got < 0 && (errno == EAGAIN || errno == EINTR);
  if (got != sizeof rung && !empty)
    check(fail(ErrorCode::corrupt, "what its trainer offers as a doorbell is none: reading {} bytes of it returned {}",
               sizeof rung, got));
  page().daemon_waits.store(1);
}

std::optional<std::pair<std::uint64_t, std::vector<View::Pinned>>> View::pin(const std::vector<std::uint32_t>& parts) {
  for (std::uint32_t i = 0; i < kMaxPins; ++i)  // those that the trainer has finished copying are free again
    if ((withdrawing_ >> i & 1) != 0 && page().pins[i].state.load() == PinState::copied) {
      page().pins[i].state.store(PinState::free);
      withdrawing_ &= ~(pin_bit(i));
    }
  const Clock before = clock();
  if (before.updating || free_pins() < parts.size()) return std::nullopt;
  std::vector<Pinned> pinned;
  for (auto part : parts) {
    std::uint32_t i = 0;
    while (((taken_ | withdrawing_) >> i & 1) != 0) ++i;
    taken_ |= pin_bit(i);
    page().pins[i].part = part;
    page().pins[i].state.store(PinState::pending);
    pinned.push_back({i, part});
  }
  if (clock() == before) return std::pair(before.version, std::move(pinned));
  // An update began meanwhile and may have missed some of them.
  for (const auto& one : pinned) {
    PinState expected = PinState::pending;
    taken_ &= ~(pin_bit(one.pin));
    if (!page().pins[one.pin].state.compare_exchange_strong(expected, PinState::free)) withdrawing_ |= pin_bit(one.pin);
  }
  return std::nullopt;
}

View::Where View::where(const Pinned& pinned) const {
  switch (page().pins[pinned.pin].state.load()) {
    case PinState::pending: return Where::state;
    case PinState::copied: return Where::shadow;
    case PinState::copying:
    case PinState::free: break;
  }
  return Where::copying;
}

std::span<std::byte> View::column(const Part& part, std::uint32_t column) const {
  const ColumnLocation where = location(part, column);
  return memory_ranges_[where.memory_range].subspan(where.offset, manifest_.length(part, column));
}

BytesView View::column(const Pinned& pinned, std::uint32_t column, bool shadow) const {
  const Part& part = manifest_.parts()[pinned.part];
  if (!shadow) return this->column(part, column);
  return BytesView(shadow_.bytes)
      .subspan(shadow_offset(pinned) + manifest_.packed_offset(part, column), manifest_.length(part, column));
}

Columns View::columns(const Part& part) const {
  Columns columns;
  for (std::uint32_t c = 0; c < manifest_.columns(part); ++c) columns.push_back(column(part, c));
  return columns;
}

bool View::release_if_untouched(const Pinned& pinned) {
  PinState expected = PinState::pending;
  if (!page().pins[pinned.pin].state.compare_exchange_strong(expected, PinState::free)) return false;
  taken_ &= ~(pin_bit(pinned.pin));
  return true;
}

bool View::populate_some() {
  constexpr std::size_t most = 16 * MiB;
  if (kind() != device::MemoryKind::host || populated_ranges_ == state_.size()) return false;
  const auto bytes = state_[populated_ranges_].bytes;
  const std::size_t size = std::min(most, bytes.size() - populated_);
  check(populate(bytes.subspan(populated_, size)));
  populated_ += size;
  if (populated_ == bytes.size()) ++populated_ranges_, populated_ = 0;
  return true;
}

bool View::release(const Pinned& pinned) {
  PinState expected = PinState::pending;
  taken_ &= ~(pin_bit(pinned.pin));
  if (page().pins[pinned.pin].state.compare_exchange_strong(expected, PinState::free)) return true;
  if (expected == PinState::copying) withdrawing_ |= pin_bit(pinned.pin);
  else page().pins[pinned.pin].state.store(PinState::free);
  return false;
}

void View::read(BytesView from, std::byte* to) { check(access_->read(from, to)); }
void View::write(std::byte* to, BytesView from) { check(access_->write(to, from)); }

std::uint64_t View::digest(BytesView of) {
  const auto digests = access_->digests({&of, 1});
  check(digests.map([](const auto&) {}));
  return digests ? digests->front() : 0;
}

std::vector<std::uint64_t> View::digests(std::span<const Columns> parts) {
  auto digests = digests_of(parts, *access_);
  check(digests.map([](const auto&) {}));
  return digests ? std::move(*digests) : std::vector<std::uint64_t>(parts.size());
}

std::vector<std::optional<std::uint64_t>> pinned_digests(View& view, std::span<const View::Pinned> pinned) {
  using Where = View::Where;
  std::vector<std::optional<std::uint64_t>> results(pinned.size());
  // First of those that lie in the state. Nobody had begun to change what still lies there afterwards; the others are
  // looked at in the shadow buffer.
  for (const auto where : {Where::state, Where::shadow}) {
    std::vector<std::size_t> there;
    std::vector<Columns> parts;
    for (std::size_t i = 0; i < pinned.size(); ++i) {
      if (results[i] || view.where(pinned[i]) != where) continue;
      there.push_back(i);
      auto& columns = parts.emplace_back();
      for (std::uint32_t c = 0; c < view.manifest().columns(view.manifest().parts()[pinned[i].part]); ++c)
        columns.push_back(view.column(pinned[i], c, where == Where::shadow));
    }
    if (there.empty()) continue;
    const auto digests = view.digests(parts);
    for (std::size_t i = 0; i < there.size(); ++i)
      if (view.where(pinned[there[i]]) == where) results[there[i]] = digests[i];
  }
  return results;
}

bool settle_pins(View& view, std::span<const View::Pinned> pinned, std::span<std::optional<std::uint64_t>> digests) {
  const std::size_t at_once = view.digests_at_once();
  std::vector<std::size_t> missing;
  for (std::size_t i = 0; i < pinned.size(); ++i)
    if (!digests[i]) missing.push_back(i);
  bool all = true;
  for (std::span rest(missing); !rest.empty(); rest = rest.subspan(std::min(at_once, rest.size()))) {
    const auto some = rest.first(std::min(at_once, rest.size()));
    std::vector<View::Pinned> of;
    for (const auto i : some) of.push_back(pinned[i]);
    const auto found = pinned_digests(view, of);
    for (std::size_t k = 0; k < some.size(); ++k) {
      digests[some[k]] = found[k];
      if (found[k]) view.release(of[k]);
      all = all && found[k].has_value();
    }
  }
  return all;
}

}  // namespace rejoin::local
